"""Predicted differences of models from the reference, against derivatives of the training and dense matrices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from lit_recon.attacks.shadow import (
    GradientDescent,
    KnownTraining,
    LinearPlan,
    LinearResponse,
    ShadowPlan,
    deltas,
    train_models,
    train_reference,
)
from lit_recon.attacks.shadow.engine import full_batch_path
from lit_recon.attacks.shadow.path_response import (
    PathResponse,
    ResponseSettings,
    gauss_newton_rows,
    interpolation,
    leading_directions,
    spread_steps,
)
from lit_recon.attacks.shadow.training import cross_entropy, flat_weights, unflatten
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.released import ReleasedCNN
from tests.attacks.shadow.conftest import filled_store, random_images

EXACT = ResponseSettings(rank=1_000, steps=1_000, images=1_000)


def convolutional() -> nn.Module:
    """A network of 114 weights."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ELU(), nn.Flatten(), nn.Linear(18, 4), nn.ELU(), nn.Linear(4, 4))


def linear() -> nn.Module:
    """Multinomial regression, whose Gauss-Newton matrix is the Hessian; 104 weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 4))


def training(
    network: nn.Module, n: int = 12, steps: int = 12, momentum: float = 0.9, lr: float = 0.05
) -> tuple[KnownTraining, Tensor]:
    torch.manual_seed(3)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = random_images(n, 0)
    descent = GradientDescent(steps=steps, lr=lr, momentum=momentum)
    known = KnownTraining(network, images.pixels(), images.labels, descent).on("cpu", torch.float64)
    return known, flat_weights(known.network)


def own(n: int = 3) -> tuple[Tensor, Tensor]:
    images = random_images(n, 1)
    return images.pixels().double(), images.labels


def derivative(known: KnownTraining, initial: Tensor, image: Tensor, label: Tensor) -> Tensor:
    """Of the trained weights in the weight of the own image's loss, by autograd through the whole training, at 0."""
    descent, n = known.descent, len(known.images)

    def trained(share: Tensor) -> Tensor:
        def loss(weights: Tensor) -> Tensor:
            fixed = cross_entropy(known.network, weights, known.images, known.labels, "sum")
            return (fixed + share * cross_entropy(known.network, weights, image[None], label[None])) / (n + 1)

        weights, speed = initial, torch.zeros_like(initial)
        for _ in range(descent.steps):
            speed = descent.momentum * speed + torch.func.grad(loss)(weights)
            weights = weights - descent.lr * speed
        return weights

    return jacrev(trained)(torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_derivative_of_the_training_where_gauss_newton_is_the_hessian(momentum: float) -> None:
    known, initial = training(linear(), momentum=momentum)
    found = PathResponse.of(known, initial, EXACT)(*own())
    expected = torch.stack([derivative(known, initial, *each) for each in zip(*own(), strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


def test_with_the_rest_of_the_hessian_it_is_the_derivative_of_any_training() -> None:
    known, initial = training(convolutional(), lr=0.02)
    expected = torch.stack([derivative(known, initial, *each) for each in zip(*own(), strict=True)])
    found = PathResponse.of(known, initial, dataclasses.replace(EXACT, rest=1_000))(*own())
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    without = PathResponse.of(known, initial, EXACT)(*own())
    assert (without - expected).norm() > 0.03 * expected.norm()  # 0.097


def test_gradients_between_the_steps_are_interpolated() -> None:
    """Errors with 3, 5 and 9 of 40 steps: 0.081, 0.037 and 0.0084."""
    known, initial = training(linear(), steps=40)
    exact = PathResponse.of(known, initial, EXACT)(*own())
    found = [PathResponse.of(known, initial, ResponseSettings(1_000, n, 1_000))(*own()) for n in (3, 5, 9)]
    errors = [float((each - exact).norm() / exact.norm()) for each in found]
    assert errors[0] < 0.2
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < 0.5 * errors[1]


def test_models_that_are_trained_are_predicted_the_better_the_more_images_are_fixed() -> None:
    """Medians of relative errors at 20, 100 and 500 fixed images: 0.47, 0.24 and 0.14."""
    errors = []
    for n in (20, 100, 500):
        known, initial = training(convolutional(), n, steps=40)
        exact = deltas(train_models(known, initial, *own(8), "loop"), train_reference(known, initial)).double()
        found = PathResponse.of(known, initial, EXACT)(*own(8))
        errors.append(float(((found - exact).norm(dim=1) / exact.norm(dim=1)).median()))
    assert errors[2] < 0.25
    assert errors[1] < 0.75 * errors[0]
    assert errors[2] < 0.75 * errors[1]


def test_what_is_left_out_of_the_directions_has_no_curvature() -> None:
    known, initial = training(linear(), steps=40, lr=0.5)
    exact = PathResponse.of(known, initial, EXACT)(*own(8))

    def error(rank: int) -> float:
        found = PathResponse.of(known, initial, ResponseSettings(rank, 1_000, 1_000))(*own(8))
        return float((found - exact).norm() / exact.norm())

    # directions without curvature change nothing: 13 images and three differences of logits have 36
    assert error(36) < 1e-6
    assert 1e-2 < error(12) < 0.5 * error(2)  # 0.16 and 1.05


def test_it_can_be_differentiated_in_the_image() -> None:
    known, initial = training(convolutional())
    response, (images, labels) = PathResponse.of(known, initial, ResponseSettings(20, 4, 12)), own(2)
    assert torch.autograd.gradcheck(lambda some: response(some, labels), images.requires_grad_(True))


def test_rows_square_to_the_gauss_newton_matrix() -> None:
    for network in (linear(), convolutional()):
        known, weights = training(network)

        def logits(weights: Tensor, known: KnownTraining = known) -> Tensor:
            return functional_call(known.network, unflatten(known.network, weights), known.images)

        slopes, shares = jacrev(logits)(weights), logits(weights).softmax(1)
        curved = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
        expected = torch.einsum("nap,nab,nbq->pq", slopes, curved, slopes)
        rows = gauss_newton_rows(known.network, weights, known.images)
        torch.testing.assert_close(rows.T @ rows, expected, rtol=1e-8, atol=1e-12)
    known, weights = training(linear())
    rows = gauss_newton_rows(known.network, weights, known.images)
    dense = hessian(lambda at: cross_entropy(known.network, at, known.images, known.labels, "sum"))(weights)
    torch.testing.assert_close(rows.T @ rows, dense, rtol=1e-8, atol=1e-12)


def test_directions_are_the_leading_eigenvectors() -> None:
    known, weights = training(convolutional())
    rows = gauss_newton_rows(known.network, weights, known.images)
    expected = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :6]
    found = leading_directions(known.network, weights[None], known.images, 6)
    torch.testing.assert_close(found.T @ found, torch.eye(6, dtype=torch.float64))
    overlaps = torch.linalg.svdvals(expected.T @ found)
    assert overlaps.min() > 0.999


def test_every_step_of_a_path_has_shares_that_add_up_to_one() -> None:
    for n_steps, n in ((1, 5), (2, 5), (40, 7), (7, 40)):
        steps = spread_steps(n_steps, n)
        shares = interpolation(steps, n_steps)
        torch.testing.assert_close(shares.sum(dim=1), torch.ones(n_steps))
        torch.testing.assert_close(shares @ steps.float(), torch.arange(n_steps).float())


def test_the_weights_are_those_of_the_reference_at_these_steps() -> None:
    known, initial = training(linear(), steps=20)
    path = torch.stack(list(full_batch_path(known, initial)))
    response = PathResponse.of(known, initial, ResponseSettings(5, 4, 12))
    torch.testing.assert_close(response.weights, path[spread_steps(20, 4)])


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"steps": 1}, {"images": 0}, {"rest": -1}, {"images": 5, "rest": 6}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="rank and images must be at least 1, steps at least 2 and rest from 0"):
        ResponseSettings(**wrong)


@pytest.mark.parametrize("rest", [0, 30])
def test_a_plan_of_a_convolutional_network_stores_what_is_predicted(tmp_path: Path, rest: int) -> None:
    def images(n: int, seed: int) -> ImageSet:
        return random_images(n, seed, side=10)

    exact = ShadowPlan(ReleasedCNN((1, 10, 10), 4, hidden=3), images(60, 0), GradientDescent(steps=10, lr=0.02))
    linear = LinearResponse(rank=50, hessian_images=60, sample=2, tolerance=0.5, steps=5, rest=rest)
    plan, own_images = LinearPlan(exact, linear, "linear"), images(7, 1)
    assert plan.description["shadows.steps"] == 5
    assert plan.description["shadows.rank"] == 50
    store = filled_store(tmp_path, plan, own_images)
    assert plan.description.get("shadows.rest", 0) == rest
    response = PathResponse.of(exact.known, exact.initial_weights(), ResponseSettings(50, 5, 60, rest))
    torch.testing.assert_close(store.read(own_images), response(own_images.pixels(), own_images.labels).detach())
    assert plan.measured(tmp_path).median < 0.3
    assert "7 of the 7 shadow models were made by linear response" in plan.notes(tmp_path, 7)[0]


def test_a_single_step_of_linear_response_is_refused() -> None:
    with pytest.raises(ConfigError, match="linear.steps must be 0, or at least 2; got 1"):
        LinearResponse(steps=1)


def test_differences_that_are_not_finite_are_refused() -> None:
    known, initial = training(linear())
    response = PathResponse.of(known, initial, EXACT)
    with pytest.raises(ShapeError, match="diverged to NaN or infinity: lower descent.lr"):
        dataclasses.replace(response, sums=response.sums * torch.inf).differences(*own())
