"""Defenses as Gaussian channels: the noise and the information of a release, and defenses without a bound."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import TANH
from lit_recon.bounds import ReleasedInformation, TwoLayerJacobian, TwoLayerNet, autograd_jacobian, cramer_rao
from lit_recon.defenses import (
    DPSGD,
    Batch,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    MixUp,
    OptimalGradientNoise,
    OptimalGradientPruning,
    PercentilePrivacy,
    PerExampleClipping,
    Round,
    SVTPrivacy,
    simulated_gradient,
)
from lit_recon.errors import ConfigError
from lit_recon.records import Differentiable, Update


class Rounded(Defense):
    """A defense about which this package knows nothing; it adds no noise."""

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return {name: value.round(decimals=2) for name, value in update.items()}


@pytest.mark.parametrize(
    ("defense", "std"),
    [
        (GaussianNoise(std=0.1), 0.1),
        (GaussianNoise(std=0.1, before_averaging=True), 0.05),
        (DPSGD(bound=2.0, noise_multiplier=0.5), 0.25),
        (Chain([GradientClipping(bound=1.0), GaussianNoise(std=0.2)]), 0.2),
        (Chain([Chain([GradientPruning(fraction=0.5)]), Defense(), GaussianNoise(std=0.2)]), 0.2),
        (Chain([PerExampleClipping(bound=1.0), GaussianNoise(std=0.2)]), 0.2),
        (Chain([GaussianNoise(std=0.2), Defense()]), 0.2),
        (Chain(), 0.0),
        (Defense(), 0.0),
        (GaussianNoise(std=0.0, relative=True), 0.0),
        (LaplaceNoise(scale=0.0), 0.0),
        (OptimalGradientNoise(std=0.0), 0.0),
        (GradientPruning(fraction=0.5), 0.0),
        (GradientDropout(rate=0.5, rescale=True), 0.0),
        (OptimalGradientPruning(fraction=0.5), 0.0),
        (PercentilePrivacy(50.0, gamma=0.1), 0.0),
        (ExcludedVariables("a"), 0.0),
        (DPSGD(bound=2.0), 0.0),
    ],
)
def test_noise_of_known_size(defense: Defense, std: float) -> None:
    assert defense.released_std(n_examples=4) == pytest.approx(std)


@pytest.mark.parametrize(
    ("defense", "words"),
    [
        (GaussianNoise(std=0.1, relative=True), "GaussianNoise.*: the size of relative noise depends on the images"),
        (OptimalGradientNoise(std=0.1), "OptimalGradientNoise.*: the variances depend on the images"),
        (LaplaceNoise(scale=0.1), r"LaplaceNoise\(scale=0.1\): its noise is not Gaussian"),
        (Chain([MixUp(), GaussianNoise(std=0.1)]), r"no bound is known for MixUp\(alpha=0.0\)$"),
        (Chain([GaussianNoise(std=0.1), GradientPruning(fraction=0.5)]), "GradientPruning.* after noise: list the"),
        (SVTPrivacy(), r"SVTPrivacy.*: its noise is not Gaussian"),
        (Rounded(), r"^no bound is known for Rounded\(\)$"),
    ],
)
def test_why_there_is_no_bound(defense: Defense, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        defense.released_std(n_examples=4)


def test_the_noise_is_removed_and_nothing_else() -> None:
    defense = Chain([GradientPruning(fraction=0.5), GaussianNoise(std=0.1)])
    assert repr(defense.without_noise()) == repr(Chain([GradientPruning(fraction=0.5), Defense()]))
    assert repr(DPSGD(bound=1.0, noise_multiplier=1.0).without_noise()) == repr(DPSGD(bound=1.0))


STD = 0.1


def gradient_of(net: TwoLayerNet, factor: float = 1.0):  # type: ignore[no-untyped-def]
    def summed(batch: Batch, differentiable: Differentiable = "no") -> Update:
        return {name: factor * value for name, value in net.update(batch.images, batch.labels).items()}

    return summed


@pytest.fixture
def batch() -> tuple[TwoLayerNet, Batch]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    net = TwoLayerNet(normal(40, 4), torch.zeros(40, dtype=torch.float64), normal(1, 40), TANH)
    return net, Batch(normal(2, 4), torch.tensor([[1.0], [-1.0]], dtype=torch.float64))


def released(defense: Defense, net: TwoLayerNet, batch: Batch) -> ReleasedInformation:
    jacobian, generator = TwoLayerJacobian(net, batch.images, batch.labels), torch.Generator().manual_seed(1)
    return defense.released_information(jacobian, Round(batch, gradient_of(net)), STD, generator)


@pytest.mark.parametrize(
    "defense",
    [
        GradientClipping(bound=3.0),
        GradientDropout(rate=0.4),
        GradientPruning(fraction=0.4),
        Defense(),
        GaussianNoise(std=STD),
        OptimalGradientPruning(fraction=0.2),
        OptimalGradientNoise(std=0.0),
        PercentilePrivacy(40.0, gamma=0.05, lr=0.5),
        ExcludedVariables("bias"),
        DPSGD(bound=3.0, noise_multiplier=2 * STD / 3.0),
        PerExampleClipping(bound=3.0),
        LaplaceNoise(STD),
        GaussianNoise(2**0.5 * STD, before_averaging=True),
        Chain(),
        Chain([GradientClipping(bound=3.0), GradientDropout(rate=0.4)]),
        Chain([GradientPruning(fraction=0.4), GradientClipping(bound=2.0), GaussianNoise(STD)]),
        Chain([GradientClipping(bound=3.0), GradientClipping(bound=2.0), LaplaceNoise(STD)]),
        Chain([PerExampleClipping(bound=3.0), GradientPruning(fraction=0.4), GradientClipping(bound=1.0)]),
        Chain([PerExampleClipping(bound=3.0), GradientDropout(rate=0.4), ExcludedVariables("bias")]),
        Chain([PercentilePrivacy(40.0, gamma=0.05, lr=0.5), GradientClipping(bound=0.3)]),
        Chain([PercentilePrivacy(40.0, gamma=0.05, lr=0.5), ExcludedVariables("bias"), GradientClipping(bound=0.3)]),
        Chain([GradientClipping(bound=3.0), GradientPruning(0.4), PercentilePrivacy(60.0, gamma=0.05, lr=0.5)]),
        Chain([GaussianNoise(0.0), OptimalGradientPruning(fraction=0.2), GradientClipping(bound=2.0)]),
    ],
    ids=lambda defense: repr(defense)[:90],
)
def test_closed_forms_agree_with_the_defense_itself(defense: Defense, batch: tuple[TwoLayerNet, Batch]) -> None:
    net, true = batch
    found = released(defense, net, true)
    seen = found.release.mean(found.update)

    def mean(inputs: Tensor) -> Update:
        return simulated_gradient(defense, gradient_of(net), true._replace(images=inputs), seen, "functional")

    expected = autograd_jacobian(mean, true.images)
    assert all(torch.allclose(expected.update[name], value) for name, value in seen.items())
    assert torch.allclose(found.information, expected.gram(STD**-2), rtol=1e-8)


@pytest.mark.parametrize(
    "defense",
    [
        GradientDropout(rate=0.4),
        GradientPruning(fraction=0.5),
        GradientPruning(fraction=0.5, scope="tensor"),
        OptimalGradientPruning(fraction=0.1),
        OptimalGradientPruning(fraction=0.4, match="weighted"),
        PercentilePrivacy(50.0),
    ],
    ids=repr,
)
def test_black_pixels_tell_as_much_as_nearly_black_ones(defense: Defense, batch: tuple[TwoLayerNet, Batch]) -> None:
    net, true = batch
    # one pixel of four is black
    black, nearly = (true._replace(images=true.images * torch.tensor([by, 1, 1, 1])) for by in (0.0, 1e-12))
    found, expected = released(defense, net, black), released(defense, net, nearly)
    assert int((found.update["layer"] == 0).sum()) == 40
    assert torch.allclose(found.information, expected.information, rtol=1e-6)


@pytest.mark.parametrize(
    "defense",
    [
        GradientPruning(fraction=0.02),
        GradientPruning(fraction=0.01, scope="tensor"),
        PercentilePrivacy(2.0),
        OptimalGradientPruning(fraction=0.02, match="weighted"),
    ],
    ids=repr,
)
def test_pruning_of_some_zeros_hides_nothing(defense: Defense, batch: tuple[TwoLayerNet, Batch]) -> None:
    net, true = batch
    blackened = true._replace(images=true.images * torch.tensor([0.0, 1.0, 1.0, 1.0]))
    found, expected = (released(one, net, blackened).information for one in (defense, Defense()))
    assert torch.allclose(found, expected, rtol=1e-9)


def test_optimal_noise_is_the_noise_of_the_defense(batch: tuple[TwoLayerNet, Batch]) -> None:
    net, true = batch
    found = released(OptimalGradientNoise(std=STD, match="energy", directions=None), net, true)
    assert isinstance(found.release.scale, dict)
    variances = torch.cat([value.square().flatten() for value in found.release.scale.values()])
    assert float(variances.sum()) == pytest.approx(STD**2 * len(variances), rel=1e-9)
    assert math.isfinite(cramer_rao(found.information).squared)
    assert "variances" in found.notes[0]


def test_noise_in_proportion_to_the_update_counts_as_of_known_size(batch: tuple[TwoLayerNet, Batch]) -> None:
    found = released(GaussianNoise(0.5, relative=True), *batch)
    values = torch.cat([value.flatten() for value in found.update.values()])
    std = 0.5 * float(values.square().mean().sqrt())
    assert torch.allclose(found.information, released(GaussianNoise(std), *batch).information, rtol=1e-9)
    assert found.notes == ("the information in the size of the noise is left out",)


def test_masks_of_a_chain_are_those_that_it_draws(batch: tuple[TwoLayerNet, Batch]) -> None:
    net, true = batch
    chain = Chain([GradientDropout(rate=0.4), GradientDropout(rate=0.3)])
    jacobian, round_ = released(Defense(), net, true), Round(true, gradient_of(net))
    drawn = chain.transform_update(jacobian.update, round_, torch.Generator().manual_seed(1))
    found = released(chain, net, true)
    mean = found.release.mean(found.update)
    assert all(torch.equal(mean[name], value) for name, value in drawn.items())


@pytest.mark.parametrize(
    "defense",
    [
        GradientDropout(rate=0.4, rescale=True),
        MixUp(1.0),
        SVTPrivacy(),
        Rounded(),
    ],
    ids=repr,
)
def test_what_has_no_closed_form_is_refused(defense: Defense, batch: tuple[TwoLayerNet, Batch]) -> None:
    with pytest.raises(ConfigError, match=f"no bound is known for {type(defense).__name__}"):
        released(defense, *batch)


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ([GaussianNoise(STD), GradientDropout(0.5)], r"GradientDropout\(.*\) after noise: list the noise last"),
        # its mask depends on the images, not on the noisy update alone
        ([DPSGD(1.0, 1.0), OptimalGradientPruning(0.5)], r"OptimalGradientPruning\(.*\) after noise"),
        (
            [PerExampleClipping(3.0), PerExampleClipping(2.0)],
            r".*after PerExampleClipping\(.*: both change single grad",
        ),
        ([PerExampleClipping(3.0), Chain([DPSGD(2.0, 0.1)])], r"Chain\(.*\) after PerExampleClipping\(.*: both change"),
        ([PerExampleClipping(3.0), GaussianNoise(0.1, before_averaging=True)], "GaussianNoise.*both change single"),
        ([GaussianNoise(0.1, before_averaging=True), PerExampleClipping(2.0)], "PerExampleClipping.*after noise"),
    ],
    ids=repr,
)
def test_chains_without_a_closed_form_are_refused(
    chain: list[Defense], words: str, batch: tuple[TwoLayerNet, Batch]
) -> None:
    with pytest.raises(ConfigError, match=f"no bound is known for {words}"):
        released(Chain(chain), *batch)
