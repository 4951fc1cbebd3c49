"""The span of training images from the first layer, against the images."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.trainset.base import Candidates, ReleasedModel
from lit_recon.attacks.trainset.kkt import MarginKKT, Stationarity
from lit_recon.attacks.trainset.subspace import shrinkage, training_span
from lit_recon.attacks.trainset.training import Training, Weights
from lit_recon.errors import UnsupportedModelError
from lit_recon.models.centered import CenteredMLP

SHAPE = (2, 6, 6)


class Scaled(nn.Module):
    """A network that scales every pixel by another factor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 3.0, 72, dtype=torch.float64).view(SHAPE))
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(72, 30), nn.ReLU(), nn.Linear(30, 1, bias=False)).double()

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.layers((images - 0.25) * self.scale)
        return outputs


@cache
def trained(scaled: bool = False) -> tuple[Tensor, ReleasedModel, Weights]:
    """Eight images in [0, 1], a network of 30 neurons trained on them, and the weights at which it began."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(8, *SHAPE, dtype=torch.float64, generator=generator)
    labels = torch.arange(8) % 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Scaled() if scaled else CenteredMLP(SHAPE, 1, [30], mean=torch.full(SHAPE, 0.5)).double()
    if isinstance(model, CenteredMLP):
        model.initialize(generator)
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    result = Training(steps=400, lr=1.0, until=1e-3).run(model, images, labels, start)
    mean = torch.full(SHAPE, 0.5, dtype=torch.float64)
    seen = ReleasedModel(model, result.weights, "binary", SHAPE, 2, mean, 8, weight_decay=0.0, loss=result.loss)
    return images, seen, start


def outside(images: Tensor, seen: ReleasedModel) -> float:
    """Share of the images' norm, around the center, that is not in the span."""
    span = training_span(seen)
    projected = span.images(span.coordinates(images))
    return float((images - projected).norm() / (images - span.center).norm())


@pytest.mark.parametrize("scaled", [False, True])
def test_training_images_are_in_the_span_if_the_start_is_known(scaled: bool) -> None:
    images, seen, start = trained(scaled)
    seen = replace(seen, start=start)
    span = training_span(seen)
    assert outside(images, seen) < 1e-7  # measured: 1e-14
    assert span.basis.shape == (8, 72)
    torch.testing.assert_close(span.basis @ span.basis.T, torch.eye(8, dtype=torch.float64))
    torch.testing.assert_close(span.center, torch.full(SHAPE, 0.25 if scaled else 0.5, dtype=torch.float64))
    other = torch.rand(8, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert outside(other, seen) > 0.5  # 64 of 72 dimensions


def test_training_images_are_almost_in_the_span_of_a_layer_with_a_small_unknown_start() -> None:
    images, seen, _ = trained()
    assert len(training_span(seen).basis) == 8
    assert 1e-6 < outside(images, seen) < 0.05


def test_directions_below_the_noise_of_the_start_are_left_out() -> None:
    """Three directions far above a random layer, one below it."""
    _, seen, _ = trained()
    generator = torch.Generator().manual_seed(3)
    noise = 1e-3 * torch.randn(30, 72, dtype=torch.float64, generator=generator)  # singular values up to 0.014
    left, right = (
        torch.linalg.qr(torch.randn(size, 4, dtype=torch.float64, generator=generator))[0] for size in (30, 72)
    )
    strengths = torch.tensor([1.0, 0.3, 0.1, 0.003], dtype=torch.float64)
    weight = noise + (left * strengths) @ right.T
    span = training_span(replace(seen, weights={**seen.weights, "layers.1.weight": weight}))
    assert len(span.basis) == 3
    assert float((span.basis @ right[:, :3]).square().sum()) > 3 * 0.95


@pytest.mark.parametrize("attack", [MarginKKT(subspace=True), Stationarity(subspace=True)])
@pytest.mark.parametrize("scaled", [False, True])
def test_coordinates_give_the_residual_and_gradient_of_images(attack: MarginKKT | Stationarity, scaled: bool) -> None:
    _, seen, start = trained(scaled)
    seen = replace(seen, start=start, weight_decay=0.01)
    around = torch.rand(10, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inside = attack.init(Candidates(seen, around, torch.arange(10) % 2))
    span = training_span(seen)
    projected = span.images(inside["pixels"].detach())
    full = replace(attack, subspace=False)
    anywhere = full.init(Candidates(seen, projected, torch.arange(10) % 2))
    residuals = attack.residual(inside), full.residual(anywhere)
    torch.testing.assert_close(*residuals)
    narrow, wide = (
        torch.autograd.grad(residual, state["pixels"])[0]
        for residual, state in zip(residuals, (inside, anywhere), strict=True)
    )
    torch.testing.assert_close(narrow, wide.flatten(1) @ span.basis.T, rtol=1e-7, atol=1e-7)


def test_a_span_leaves_the_released_model_and_the_random_state_as_they_are() -> None:
    _, seen, _ = trained()
    shapes = {name: tuple(weight.shape) for name, weight in seen.model.named_parameters()}
    before = torch.get_rng_state()
    MarginKKT(subspace=True).init(Candidates(seen, torch.zeros(8, *SHAPE).double(), torch.arange(8) % 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: tuple(weight.shape) for name, weight in seen.model.named_parameters()} == shapes


def _convolutional() -> ReleasedModel:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(72, 1)).double()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return ReleasedModel(model, weights, "binary", SHAPE, 2, torch.zeros(SHAPE), 8, loss=0.0)


def _first_weight(weight: Tensor) -> ReleasedModel:
    _, seen, _ = trained()
    return replace(seen, weights={**seen.weights, "layers.1.weight": weight})


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (_convolutional, "a linear layer on all 72 pixels"),
        (lambda: replace(trained()[1], start=trained()[1].weights), "equals its start"),
        (lambda: _first_weight(torch.eye(30, 72, dtype=torch.float64)), "no training image above the noise"),
    ],
)
def test_networks_without_a_span(seen: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        MarginKKT(subspace=True).check(
            Candidates(seen(), torch.zeros(8, *SHAPE, dtype=torch.float64), torch.arange(8) % 2)
        )


@pytest.mark.parametrize("n_neurons", [12, 40])
def test_the_shrinkage_of_the_start_under_a_change_of_low_rank(n_neurons: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start, left, right = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((n_neurons, 30), (n_neurons, 5), (5, 30))
    )
    assert shrinkage(start, 0.7 * start + left @ right, 5) == pytest.approx(0.7, abs=1e-10)  # measured: 1e-14


@pytest.mark.parametrize("n_images", [20, 28, 40])
def test_the_shrinkage_of_the_start_under_a_change_of_high_rank(n_images: int) -> None:
    # Most eigenvalues are above the factor, and some are complex; more images than pixels: many pixels are black.
    generator = torch.Generator().manual_seed(0)
    start, left, right = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((40, 30), (30, 20), (20, 30))
    )
    change = start @ left @ (left.T + 0.3 * right)
    assert shrinkage(start, 0.7 * start + change, n_images) == pytest.approx(0.7, abs=1e-10)
