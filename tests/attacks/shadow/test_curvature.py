"""Hessians by their structure, against those of automatic differentiation over all weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, hessian, jacrev
from torch.nn import functional as F

from lit_recon.attacks.shadow import linear_response as curvature
from lit_recon.attacks.shadow.linear_response import Coordinates, n_coordinates
from lit_recon.attacks.shadow.training import KnownTraining, flat_weights, unflatten
from lit_recon.errors import ConfigError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP
from tests.attacks.shadow.conftest import known_training, random_images


def training(hidden: Sequence[int], activation: str = "elu") -> tuple[KnownTraining, Tensor]:
    network = ReleasedMLP((1, 3, 3), 4, hidden, activation)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    network.initialize(generator)
    known = known_training(network, random_images(12, 0, side=3)).on("cpu", torch.float64)
    weights = flat_weights(known.network)
    return known, weights + 0.1 * torch.randn(len(weights), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("hidden", "activation"),
    [([5], "elu"), ([5, 4], "tanh"), ([], "elu"), ([6], "gelu"), ([6], "relu"), ([5], "softplus")],
)
@pytest.mark.parametrize("rank", [100, 4])
def test_the_reduced_hessian_is_that_of_all_weights_along_its_coordinates(
    hidden: list[int], activation: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, weights = training(hidden, activation)
    coordinates = Coordinates.of(known, rank)
    assert coordinates.rank == min(rank, 10)

    def loss(weights: Tensor) -> Tensor:
        logits = functional_call(known.network, unflatten(known.network, weights), known.images)
        return F.cross_entropy(logits, known.labels, reduction="sum")

    def placed(point: Tensor) -> Tensor:
        split = coordinates.neurons * coordinates.rank
        first = point[:split].view(-1, coordinates.rank) @ coordinates.basis.T
        return coordinates.flat(first[None], point[None, split:])[0]

    jacobian = jacrev(placed)(weights.new_zeros(coordinates.n))
    monkeypatch.setattr(curvature, "_IMAGES", 5)
    with torch.no_grad():
        found = coordinates.hessian(weights, known.images.flatten(1), known.labels)
    expected = jacobian.T @ hessian(loss)(weights) @ jacobian
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)  # measured at most 4e-15


def test_weights_are_taken_apart_and_put_together() -> None:
    known, weights = training([5, 4])
    coordinates, many = Coordinates.of(known, 3), torch.stack([weights, weights.flip(0)])
    first, later = coordinates.first_layer(many), coordinates.later(many)
    assert first.shape == (2, 5, 10)
    assert later.shape == (2, 4 * 5 + 4 + 4 * 4 + 4)
    assert torch.equal(coordinates.flat(first, later), many)


def test_gradients_of_every_model_at_its_own_image() -> None:
    known, weights = training([5])
    coordinates = Coordinates.of(known, 100)
    pull, own = coordinates.flow(coordinates.later(weights), known.images.flatten(1)[:, :5], known.labels)
    outputs = known.images.flatten(1)[7, :5].requires_grad_()
    later = coordinates.later(weights).clone().requires_grad_()
    loss = F.cross_entropy(
        functional_call(coordinates.head, unflatten(coordinates.head, later), outputs), known.labels[7]
    )
    for found, expected in zip((pull[7], own[7]), torch.autograd.grad(loss, [outputs, later]), strict=True):
        torch.testing.assert_close(found, expected)


def test_what_cannot_be_reduced_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a ReleasedMLP; got ReleasedCNN: set shadows to exact"):
        n_coordinates(ReleasedCNN(), 3072, 100)
    with pytest.raises(ConfigError, match="rank 10000 has 39760 coordinates .* more than 8192 .* lower linear.rank"):
        n_coordinates(ReleasedMLP(hidden=[50]), 784, 10_000)
    assert n_coordinates(ReleasedMLP(), 784, 100) == 1_110
