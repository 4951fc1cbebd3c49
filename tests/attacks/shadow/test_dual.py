"""Models as coefficients of images, against the plain loop and closed forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.shadow import GradientDescent, KnownTraining, PrivateDescent, train_models
from lit_recon.attacks.shadow.engines.batched_mlp import FirstLayers, ImageSpan, suits, train_batched_mlp
from lit_recon.attacks.shadow.engines.mlp_gradients import SharedImages
from lit_recon.attacks.shadow.training import flat_weights
from lit_recon.models.released import ReleasedMLP
from tests.attacks.shadow.conftest import random_images


def training(
    n: int, descent: GradientDescent, hidden: list[int] | None = None, activation: str = "elu"
) -> tuple[KnownTraining, Tensor]:
    """In float64, on images of 25 pixels of which the first row is always black."""
    network = ReleasedMLP((1, 5, 5), 4, hidden or [6], activation)  # type: ignore[arg-type]
    network.initialize(torch.Generator().manual_seed(7))
    fixed = random_images(n, 0)
    images = fixed.pixels()
    images[:, :, 0] = 0
    known = KnownTraining(network, images, fixed.labels, descent).on("cpu", torch.float64)
    return known, flat_weights(known.network)


def shared(known: KnownTraining) -> SharedImages:
    return SharedImages(known.images.flatten(1), known.labels, 4)


@pytest.mark.parametrize("n", [1, 9, 45])
@pytest.mark.parametrize("hidden", [[6], [7, 5]])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dp", [None, PrivateDescent(bound=0.3, noise_multiplier=0.0)])
def test_models_are_those_of_the_loop(n: int, hidden: list[int], momentum: float, dp: PrivateDescent | None) -> None:
    known, start = training(n, GradientDescent(12, 0.3, momentum, dp=dp, snapshots=[1, 7]), hidden)
    own = random_images(4, 1)
    assert suits(known.descent, shared(known))
    images = own.pixels().double()
    by_loop = train_models(known, start, images, own.labels, "loop")
    assert by_loop.shape == (4, 3 * len(start))
    for chunk in (3, 4):
        # Measured at most 5e-15.
        found = train_batched_mlp(known, start, images, own.labels, chunk=chunk)
        torch.testing.assert_close(found, by_loop, rtol=0, atol=1e-10)


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh", "sigmoid"])
def test_models_may_start_apart(activation: str) -> None:
    known, _ = training(9, GradientDescent(12), activation=activation)
    own = random_images(4, 1)
    starts = torch.randn(4, known.n_parameters, generator=torch.Generator().manual_seed(2)).double() / 5
    assert suits(known.descent, shared(known))
    by_loop = train_models(known, starts, own.pixels().double(), own.labels, "loop")
    found = train_models(known, starts, own.pixels().double(), own.labels, "batched_mlp")
    torch.testing.assert_close(found, by_loop, rtol=0, atol=1e-10)


def test_coefficients_are_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    fixed, own, weights = (
        torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in [(9, 25), (3, 25), (3, 6, 25)]
    )
    bias = torch.rand(3, 6, generator=generator, dtype=torch.float64)
    layers = FirstLayers(weights, bias, fixed, ImageSpan.of(fixed), own)
    at_start, bias_at_start = layers.weights()
    assert torch.equal(at_start, weights)
    assert torch.equal(bias_at_start, bias)
    factors = torch.randn(3, 6, 9, generator=generator, dtype=torch.float64)
    theirs = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    for part, change in zip((layers.sides, layers.rest), layers.gradients(factors, theirs[:, :, None]), strict=True):
        part.add_(change)
    # What gradients of these factors with respect to the outputs would add to weights and biases.
    moved = weights + factors @ fixed + theirs[:, :, None] * own[:, None, :]
    shifted = bias + factors.sum(2) + theirs
    torch.testing.assert_close(layers.weights(), (moved, shifted), rtol=0, atol=1e-13)
    torch.testing.assert_close(layers.outputs(), moved @ fixed.T + shifted[:, :, None], rtol=0, atol=1e-12)
    expected = torch.bmm(moved, own[:, :, None]) + shifted[:, :, None]
    torch.testing.assert_close(layers.own_outputs(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("n", "descent", "expected"),
    [
        (49, GradientDescent(), True),
        (50, GradientDescent(), False),
        (9, GradientDescent(optimizer="adam", lr=0.01), False),
        (9, GradientDescent(batch_size=4), False),
        (9, GradientDescent(dp=PrivateDescent(noise_multiplier=1.0)), False),
        (9, GradientDescent(dp=PrivateDescent(noise_multiplier=0.0)), True),
    ],
)
def test_only_linear_descent_on_few_images_is_done_so(n: int, descent: GradientDescent, expected: bool) -> None:
    known, _ = training(n, descent)
    assert suits(descent, shared(known)) == expected


def test_images_with_a_large_mean_lose_few_digits() -> None:
    known, start = training(40, GradientDescent(steps=60, lr=0.02))
    known = dataclasses.replace(known, images=known.images / 2 + 0.5)
    own = random_images(4, 1)
    images = own.pixels().double() / 2 + 0.5
    exact = train_models(known, start, images, own.labels, "loop")
    single = known.on("cpu", torch.float32)
    error = {
        way: float((train_models(single, start.float(), images.float(), own.labels, way) - exact).norm())
        for way in ("loop", "batched_mlp")
    }
    # Measured 0.7 times the loop's.
    assert error["batched_mlp"] < 3 * error["loop"]
