"""The density of an update with noise, against SciPy's distributions, and the noise of every defense."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from lit_recon.attacks.updates.noise import expected_log_likelihood, log_likelihood
from lit_recon.defenses import (
    DPSGD,
    AveragedDefense,
    Chain,
    Defense,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    MixUp,
    OptimalGradientNoise,
)
from lit_recon.errors import ConfigError
from lit_recon.records import Noise, NoiseFamily, Update

FAMILIES = {"gaussian": stats.norm, "laplace": stats.laplace}


def updates(dtype: torch.dtype = torch.float64) -> tuple[Update, Update]:
    """Two updates of 12 and 5 coordinates; two coordinates of the second are zero."""
    generator = torch.Generator().manual_seed(0)
    ours, seen = (
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in {"a": (3, 4), "b": (5,)}.items()}
        for _ in range(2)
    )
    seen["a"][1, 2] = seen["b"][0] = 0
    return ours, seen


def observed_residuals(ours: Update, seen: Update) -> torch.Tensor:
    return torch.cat([(ours[name] - seen[name])[seen[name] != 0] for name in seen])


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_density_is_that_of_scipy_on_observed_coordinates(family: NoiseFamily) -> None:
    ours, seen = updates()
    expected = FAMILIES[family].logpdf(observed_residuals(ours, seen), scale=0.3).sum()
    assert float(log_likelihood(ours, seen, Noise(family, 0.3))) == pytest.approx(expected, rel=1e-12)
    assert float(expected_log_likelihood(seen, Noise(family, 0.3))) == pytest.approx(
        -15 * FAMILIES[family].entropy(scale=0.3), rel=1e-12
    )


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_unknown_scale_is_the_most_likely_one(family: NoiseFamily) -> None:
    ours, seen = updates()
    residuals = observed_residuals(ours, seen)
    best = FAMILIES[family].fit(residuals.numpy(), floc=0)[1]
    expected = FAMILIES[family].logpdf(residuals, scale=best).sum()
    assert float(log_likelihood(ours, seen, None, family)) == pytest.approx(expected, rel=1e-9)
    for factor in (0.9, 1.1):
        assert float(log_likelihood(ours, seen, Noise(family, factor * best))) < expected


@pytest.mark.parametrize("noise", [Noise("gaussian", 0.5), Noise("laplace", 0.5), None])
def test_derivative_and_several_candidates_at_once(noise: Noise | None) -> None:
    ours, seen = updates()
    several = {name: torch.stack([value, 2 * value]) for name, value in ours.items()}

    def of(candidate: Update) -> torch.Tensor:
        return log_likelihood(candidate, seen, noise)

    together = torch.func.vmap(of)(several)
    for i in range(2):
        assert float(together[i]) == pytest.approx(float(of({name: value[i] for name, value in several.items()})))
    leaf = ours["a"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a: of({**ours, "a": a}), (leaf,))
    # a coordinate that was not released does not move the candidate
    (slope,) = torch.autograd.grad(of({**ours, "a": leaf}), leaf)
    assert float(slope[1, 2]) == 0
    assert int((slope == 0).sum()) == 1


def test_no_scale_no_density() -> None:
    ours, seen = updates()
    with pytest.raises(ConfigError, match="scale above 0; got 0"):
        log_likelihood(ours, seen, Noise("gaussian", 0.0))
    with pytest.raises(ConfigError, match="family 'gaussian' or 'laplace'; got 'cauchy'"):
        log_likelihood(ours, seen, None, "cauchy")  # type: ignore[arg-type]
    nothing = {name: torch.zeros_like(value) for name, value in seen.items()}
    assert float(log_likelihood(ours, nothing, None)) == 0  # no coordinate was released
    assert torch.isfinite(log_likelihood(seen, seen, None))  # residual zero


@pytest.mark.parametrize(
    ("defense", "noise"),
    [
        (GaussianNoise(0.1), Noise("gaussian", 0.1)),
        (GaussianNoise(0.1, before_averaging=True), Noise("gaussian", 0.05)),
        (LaplaceNoise(0.1), Noise("laplace", 0.1)),
        (DPSGD(2.0, 0.5), Noise("gaussian", 0.25)),
        (Chain([GradientClipping(1.0), LaplaceNoise(0.2)]), Noise("laplace", 0.2)),
        (Chain([DPSGD(2.0, 0.5), Defense()]), Noise("gaussian", 0.25)),
        (AveragedDefense(GaussianNoise(0.1), 4), Noise("gaussian", 0.05)),
        (AveragedDefense(GradientClipping(1.0), 4), None),
        (GradientDropout(0.5, rescale=True), None),
        (DPSGD(2.0), None),
        (Defense(), None),
        (Chain(), None),
    ],
    ids=repr,
)
def test_noise_of_a_release(defense: Defense, noise: Noise | None) -> None:
    found = defense.released_noise(4)
    assert found == (None if noise is None else (noise.family, pytest.approx(noise.scale)))


@pytest.mark.parametrize(
    ("defense", "words"),
    [
        (GaussianNoise(0.1, relative=True), "depends on the images"),
        (OptimalGradientNoise(0.1), "the variances depend on the images"),
        (Chain([MixUp(), GaussianNoise(0.1)]), "no bound is known for MixUp"),
        (Chain([LaplaceNoise(0.1), GradientPruning(0.5)]), "GradientPruning.* after noise: list the noise last"),
        (Chain([Chain([GradientDropout(0.5)]), GaussianNoise(0.1)]), "hides which coordinates were dropped"),
        (Chain([GradientPruning(0.5), LaplaceNoise(0.1)]), "hides which coordinates were dropped"),
        (AveragedDefense(LaplaceNoise(0.1), 4), "its noise is not Gaussian"),
    ],
    ids=repr,
)
def test_why_a_release_has_no_density(defense: Defense, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        defense.released_noise(4)


def test_standard_deviation_of_a_family() -> None:
    for family in FAMILIES:
        assert Noise(family, 0.3).std == pytest.approx(FAMILIES[family].std(scale=0.3))  # type: ignore[arg-type]
