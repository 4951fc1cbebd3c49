"""Defenses in the words of a bound: what noise is left, what is kept, and what has no bound."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import TANH
from lit_recon.bounds import TwoLayerJacobian, TwoLayerNet, autograd_jacobian, cramer_rao
from lit_recon.defenses import (
    DPSGD,
    Batch,
    Chain,
    Defense,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    MixUp,
    OptimalGradientNoise,
    OptimalGradientPruning,
    simulated_gradient,
)
from lit_recon.errors import ConfigError
from lit_recon.experiments.defended_bound import Released, acting, defended_release, quiet, released_std
from lit_recon.records import Update


@pytest.mark.parametrize(
    ("defense", "std"),
    [
        (GaussianNoise(std=0.1), 0.1),
        (GaussianNoise(std=0.1, before_averaging=True), 0.05),
        (DPSGD(bound=2.0, noise_multiplier=0.5), 0.25),
        (Chain([GradientClipping(bound=1.0), GaussianNoise(std=0.2)]), 0.2),
        (Chain([Chain([GradientPruning(fraction=0.5)]), Defense(), GaussianNoise(std=0.2)]), 0.2),
    ],
)
def test_noise_of_known_size(defense: Defense, std: float) -> None:
    assert released_std(defense, n_examples=4) == pytest.approx(std)


@pytest.mark.parametrize(
    ("defense", "words"),
    [
        (Defense(), "the only bound is 0"),
        (GaussianNoise(std=0.0), "the only bound is 0"),
        (GradientPruning(fraction=0.5), "the only bound is 0"),
        (DPSGD(bound=2.0), "the only bound is 0"),
        (GaussianNoise(std=0.1, relative=True), "relative noise tells"),
        (OptimalGradientNoise(std=0.1), "variances of OptimalGradientNoise tell"),
        (LaplaceNoise(scale=0.1), "LaplaceNoise adds is not Gaussian"),
        (Chain([MixUp(), GaussianNoise(std=0.1)]), "MixUp does to a batch"),
    ],
)
def test_why_there_is_no_bound(defense: Defense, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        released_std(defense, n_examples=4)


def test_without_its_noise_a_defense_shows_what_it_drops() -> None:
    defense = Chain([GradientPruning(fraction=0.5), GaussianNoise(std=0.1)])
    assert [type(part) for part in acting(defense)] == [GradientPruning, GaussianNoise]
    assert repr(quiet(defense)) == repr(Chain([GradientPruning(fraction=0.5)]))
    assert acting(quiet(DPSGD(bound=1.0, noise_multiplier=1.0))) == []


STD = 0.1


def gradient_of(net: TwoLayerNet, factor: float = 1.0):  # type: ignore[no-untyped-def]
    def summed(batch: Batch, *, create_graph: bool = False, functional: bool = False) -> Update:
        return {name: factor * value for name, value in net.update(batch.images, batch.labels).items()}

    return summed


@pytest.fixture
def batch() -> tuple[TwoLayerNet, Batch]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    net = TwoLayerNet(normal(40, 4), torch.zeros(40, dtype=torch.float64), normal(1, 40), TANH)
    return net, Batch(normal(2, 4), torch.tensor([[1.0], [-1.0]], dtype=torch.float64))


def released(defense: Defense, net: TwoLayerNet, batch: Batch) -> Released:
    jacobian = TwoLayerJacobian(net, batch.images, batch.labels)
    return defended_release(defense, jacobian, batch, gradient_of(net), STD, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "defense",
    [
        GradientClipping(bound=3.0),
        GradientDropout(rate=0.4),
        GradientPruning(fraction=0.4),
        GaussianNoise(std=STD),
        OptimalGradientPruning(fraction=0.2),
        DPSGD(bound=3.0, noise_multiplier=2 * STD / 3.0),
    ],
    ids=lambda defense: type(defense).__name__,
)
def test_closed_forms_agree_with_the_defense_itself(defense: Defense, batch: tuple[TwoLayerNet, Batch]) -> None:
    net, true = batch
    found = released(defense, net, true)
    seen = found.release.mean(found.update)

    def mean(inputs: Tensor) -> Update:
        return simulated_gradient(defense, gradient_of(net), true._replace(images=inputs), seen, functional=True)

    expected = autograd_jacobian(mean, true.images)
    assert all(torch.allclose(expected.update[name], value) for name, value in seen.items())
    assert torch.allclose(found.information, expected.gram(STD**-2), rtol=1e-8)


def test_optimal_noise_is_the_noise_of_the_defense(batch: tuple[TwoLayerNet, Batch]) -> None:
    net, true = batch
    found = released(OptimalGradientNoise(std=STD, match="energy", directions=None), net, true)
    assert isinstance(found.release.std, dict)
    variances = torch.cat([value.square().flatten() for value in found.release.std.values()])
    assert float(variances.sum()) == pytest.approx(STD**2 * len(variances), rel=1e-9)
    assert math.isfinite(cramer_rao(found.information).squared)
    assert "variances" in found.notes[0]


@pytest.mark.parametrize(
    "defense", [GradientDropout(rate=0.4, rescale=True), GaussianNoise(std=0.1, relative=True), LaplaceNoise(scale=0.1)]
)
def test_what_has_no_closed_form_is_refused(defense: Defense, batch: tuple[TwoLayerNet, Batch]) -> None:
    with pytest.raises(ConfigError, match="has no bound for"):
        released(defense, *batch)
