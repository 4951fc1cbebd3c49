"""What every defense promises, at strength 0, at some strength, and to the attacker. A new defense joins the table."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch

from lit_recon.defenses import (
    DPSGD,
    Batch,
    BatchGradient,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    MixUp,
    NetworkDropout,
    OptimalGradientNoise,
    OptimalGradientPruning,
    PercentilePrivacy,
    PerExampleClipping,
    SVTPrivacy,
    defended_gradient,
    simulated_gradient,
)
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Differentiable, Update

GradientOf = Callable[[Backbone], BatchGradient]

IDENTITIES: list[Defense] = [
    Defense(),
    Chain(),
    GaussianNoise(),
    LaplaceNoise(),
    GradientClipping(),
    PerExampleClipping(),
    DPSGD(),
    GradientDropout(),
    GradientPruning(),
    NetworkDropout(),
    MixUp(),
    OptimalGradientNoise(),
    OptimalGradientPruning(),
    PercentilePrivacy(),
    ExcludedVariables(),
    ExcludedVariables([]),
    ExcludedVariables(""),
    Chain([MixUp(), NetworkDropout(), DPSGD(), GradientPruning(), GaussianNoise()]),
]
#: Without random numbers, or with ones that the attacker can read off the update.
TRANSPARENT: list[Defense] = [
    GradientClipping(0.1),
    PerExampleClipping(0.1),
    DPSGD(0.1),
    GradientDropout(0.4),
    GradientDropout(0.4, rescale=True),
    GradientPruning(0.4),
    GradientPruning(0.4, scope="tensor"),
    OptimalGradientPruning(0.4),
    PercentilePrivacy(40.0),
    PercentilePrivacy(40.0, gamma=1e-4, lr=0.01),
    PercentilePrivacy(gamma=0.02),
    ExcludedVariables(["head.weight", "head.bias"]),
    ExcludedVariables(r"^trunk\..*weight$"),
    Chain([PerExampleClipping(0.1), GradientPruning(0.4)]),
    Chain([ExcludedVariables("^head"), GradientClipping(0.05), PercentilePrivacy(40.0, gamma=0.005)]),
    Chain([GradientDropout(0.3), GradientPruning(0.4), GradientClipping(0.05)]),
]
RANDOM: list[Defense] = [
    GaussianNoise(0.1),
    GaussianNoise(0.1, relative=True),
    GaussianNoise(0.1, before_averaging=True),
    LaplaceNoise(0.1),
    DPSGD(0.1, 1.0),
    NetworkDropout(0.5),
    MixUp(1.0),
    OptimalGradientNoise(0.1),
    OptimalGradientNoise(0.1, match="measured", scale=2.0, directions=3),
    SVTPrivacy(),
    SVTPrivacy(0.5, 10.0, 1.0, gamma=0.01, tau=0.005, replace=False, lr=0.1),
    Chain([MixUp(1.0), NetworkDropout(0.5), DPSGD(0.1, 1.0), GradientPruning(0.4)]),
]
INVALID: list[tuple[Callable[[], Defense], str]] = [
    (lambda: GaussianNoise(-0.1), "nearest valid choice is 0"),
    (lambda: GaussianNoise(math.inf), "finite std"),
    (lambda: GaussianNoise(math.nan), "std at least 0"),
    (lambda: GaussianNoise(0.1, relative=True, before_averaging=True), "before_averaging to false"),
    (lambda: LaplaceNoise(-1), "nearest valid choice is 0"),
    (lambda: GradientClipping(-1), "nearest valid choice is 0"),
    (lambda: PerExampleClipping(-1), "nearest valid choice is 0"),
    (lambda: DPSGD(1.0, -1.0), "nearest valid choice is 0"),
    (lambda: DPSGD(noise_multiplier=1.0), "finite bound"),
    (lambda: GradientDropout(1.1), "nearest valid choice is 1"),
    (lambda: GradientDropout(1.0, rescale=True), "rescale to false"),
    (lambda: GradientPruning(-0.1), "nearest valid choice is 0"),
    (lambda: GradientPruning(0.1, scope="layer"), "'global' or 'tensor'"),
    (lambda: NetworkDropout(1.0), "nearest valid choice is 0.999"),
    (lambda: NetworkDropout(0.5, []), "at least one layer"),
    (lambda: MixUp(-1), "nearest valid choice is 0"),
    (lambda: OptimalGradientNoise(-1), "nearest valid choice is 0"),
    (lambda: OptimalGradientNoise(1, match="utility"), "'measured'"),
    (lambda: OptimalGradientNoise(1, match="measured"), "matched_scale"),
    (lambda: OptimalGradientNoise(1, scale=2.0), "exactly when"),
    (lambda: OptimalGradientNoise(1, directions=0), "usual number is 10"),
    (lambda: OptimalGradientNoise(1, floor=0.0), "positive, finite floor"),
    (lambda: OptimalGradientPruning(2), "nearest valid choice is 1"),
    (lambda: OptimalGradientPruning(0.2, match="energy"), "'weighted'"),
    (lambda: OptimalGradientPruning(0.2, cap=math.inf), "positive, finite cap"),
    (lambda: PercentilePrivacy(101), "nearest valid choice is 100"),
    (lambda: PercentilePrivacy(10, gamma=0), "positive gamma"),
    (lambda: PercentilePrivacy(10, gamma=-1), "gamma at least 0"),
    (lambda: PercentilePrivacy(10, lr=0), "positive lr"),
    (lambda: PercentilePrivacy(10, lr=math.inf), "finite lr"),
    (lambda: SVTPrivacy(1.1), "nearest valid choice is 1"),
    (lambda: SVTPrivacy(epsilon=0), "positive epsilon"),
    (lambda: SVTPrivacy(epsilon=math.inf), "finite epsilon"),
    (lambda: SVTPrivacy(noise_var=0), "positive noise_var"),
    (lambda: SVTPrivacy(gamma=0), "positive gamma"),
    (lambda: SVTPrivacy(gamma=math.inf), "finite gamma"),
    (lambda: SVTPrivacy(tau=math.nan), "needs tau"),
    (lambda: SVTPrivacy(lr=0), "positive lr"),
    (lambda: ExcludedVariables(3), "names of variables or one regular expression; got 3"),
    (lambda: ExcludedVariables(["head", 3]), "names of variables or one regular expression"),
    (lambda: ExcludedVariables("head("), "needs a regular expression; got 'head\\('"),
]


def release(defense: Defense, model: Backbone, gradient_of: GradientOf, batch: Batch, seed: int = 0) -> Update:
    prepared = defense.prepare(model)
    return defended_gradient(
        defense, prepared, gradient_of(prepared), batch, torch.Generator().manual_seed(seed), chunk=1
    )


def relative_error(got: Update, expected: Update) -> float:
    distance = sum(float((got[name] - value).square().sum()) for name, value in expected.items())
    return math.sqrt(distance / sum(float(value.square().sum()) for value in expected.values()))


@pytest.mark.parametrize("defense", IDENTITIES, ids=repr)
def test_identity_at_strength_zero(
    defense: Defense, model: Backbone, gradient_of: GradientOf, batch: Batch, update: Update
) -> None:
    released = release(defense, model, gradient_of, batch)
    assert list(released) == list(update)
    assert relative_error(released, update) < 1e-12
    assert relative_error(simulated_gradient(defense, gradient_of(model), batch, released), update) < 1e-12


def test_a_configuration_needs_a_strength() -> None:
    for defense in [*IDENTITIES[1:-3], Chain([GradientPruning(0.4), GaussianNoise(relative=True)])]:
        with pytest.raises(ConfigError, match=r"changes nothing: set its \w+( or gamma)?, or leave the defense out"):
            defense.require_strength()
    for defense in TRANSPARENT + RANDOM:
        defense.require_strength()


@pytest.mark.parametrize("defense", TRANSPARENT + RANDOM, ids=repr)
def test_strength_changes_the_release_and_nothing_else(
    defense: Defense, model: Backbone, gradient_of: GradientOf, batch: Batch, update: Update
) -> None:
    before = copy.deepcopy((batch, model.state_dict(), vars(defense)))
    released = release(defense, model, gradient_of, batch)
    assert relative_error(released, update) > 1e-3
    assert {name: (value.shape, value.dtype) for name, value in released.items()} == {
        name: (value.shape, value.dtype) for name, value in update.items()
    }
    assert torch.equal(batch.images, before[0].images)
    assert not batch.masks
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    assert repr(vars(defense)) == repr(before[2])


@pytest.mark.parametrize("defense", RANDOM, ids=repr)
def test_random_numbers_come_from_the_generator(
    defense: Defense, model: Backbone, gradient_of: GradientOf, batch: Batch
) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (release(defense, model, gradient_of, batch, seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert relative_error(other, first) > 1e-3


@pytest.mark.parametrize("defense", TRANSPARENT, ids=repr)
def test_the_truth_reproduces_the_release(
    defense: Defense, model: Backbone, gradient_of: GradientOf, batch: Batch
) -> None:
    released = release(defense, model, gradient_of, batch)
    assert relative_error(simulated_gradient(defense, gradient_of(model), batch, released), released) < 1e-12


@pytest.mark.parametrize("defense", TRANSPARENT, ids=repr)
def test_simulations_are_differentiable_alone_and_under_vmap(
    defense: Defense, model: Backbone, gradient_of: GradientOf, batch: Batch
) -> None:
    gradient, released = gradient_of(model), release(defense, model, gradient_of, batch)
    scales = {name: torch.linspace(1, 2, value.numel()).view(value.shape) for name, value in released.items()}

    def distance(images: torch.Tensor, differentiable: Differentiable = "functional") -> torch.Tensor:
        candidate = Batch(images, batch.labels)
        simulated = simulated_gradient(defense, gradient, candidate, released, differentiable)
        return torch.stack([(value * scales[name]).sum() for name, value in simulated.items()]).sum()

    candidates = torch.stack([batch.images * 0.9, batch.images.flip(3)]).requires_grad_()
    expected = torch.autograd.grad(sum(distance(images, "autograd") for images in candidates), candidates)[0]
    together = torch.func.vmap(torch.func.grad(distance))(candidates.detach())
    torch.testing.assert_close(together, expected, rtol=1e-8, atol=1e-10)
    assert float(expected.abs().max()) > 0


@pytest.mark.parametrize("defense", IDENTITIES + TRANSPARENT + RANDOM, ids=repr)
def test_repr_rebuilds_the_defense(defense: Defense) -> None:
    rebuilt = eval(repr(defense), {**globals(), "inf": math.inf})
    assert repr(rebuilt) == repr(defense)


def test_a_defense_without_its_arguments_is_refused() -> None:
    """Its repr is the key of trainings: without the argument, those of unlike settings would be one."""

    class Quantization(Defense):
        def __init__(self, levels: int) -> None:
            self._levels = levels

    with pytest.raises(ConfigError, match=r"Quantization must keep .* got none named levels: set self\.levels = level"):
        repr(Quantization(8))


@pytest.mark.parametrize(("build", "message"), INVALID)
def test_settings_out_of_range_are_refused(build: Callable[[], Defense], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
