"""Bounds on the probability of reconstruction, from a privacy budget and a baseline error."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_recon import bounds as theory
from lit_recon.errors import ConfigError
from lit_recon.experiments.rero.settings import BudgetSettings, PriorSettings, SampledSettings
from lit_recon.privacy import FullBatchSGD, PoissonSGD

#: Orders of theorem 2, dense where the best one lies for any epsilon and kappa.
_ORDERS = tuple(1 + 10 ** (exponent / 20) for exponent in range(-60, 81))
#: Beyond it the odds of theorem 5's candidates leave too few digits of the chance to fail.
_MOST_EPSILON = 20.0


class PriorSpec(NamedTuple):
    """A prior of the adversary, and its criterion of success."""

    name: str
    baseline: theory.BaselineError
    threshold: float | None = None  # MSE up to which a reconstruction succeeds; None: the image is to be identified
    candidates: int | None = None  # size of a finite prior
    is_drawn_from: bool = True  # target images come from it, so that success rates may be compared with its bound
    is_certified: bool = True  # kappa is exact or an upper bound, so that no attack may exceed the bound

    @property
    def log10_kappa(self) -> float:
        """Decimal logarithm of the baseline error."""
        return self.baseline.log_kappa / math.log(10)

    @property
    def description(self) -> dict[str, Any]:
        """For the page, as JSON content."""
        own = {"threshold": self.threshold, "candidates": self.candidates}
        return {**own, "log10_kappa": self.log10_kappa, "caveat": self.baseline.caveat}


@dataclass(frozen=True)
class Bounds:
    """Bounds on the probability of success, each from a different analysis of the same training."""

    tight: float  # the best possible, from the distribution of the noise
    theorem_2: float  # by its Renyi divergence, the best of many orders
    corollary_3: float  # by epsilon alone, as if delta were 0, which Gaussian noise does not have
    corollary_4: float  # by zero-concentrated privacy
    approximate: float  # by epsilon and delta alone


def full_batch(budget: BudgetSettings, epsilon: float, steps: int) -> FullBatchSGD:
    """The training with the least noise that keeps a budget."""
    return FullBatchSGD(budget.descent(epsilon).noise(steps), steps, budget.neighbors)


def bounds(training: FullBatchSGD, epsilon: float, delta: float, log_kappa: float) -> Bounds:
    """All bounds for a training on full batches.

    They compare the output with a record to that without it, whatever neighboring relation epsilon is stated for. A
    ConfigError says that an argument is out of its range.
    """
    mu = math.sqrt(training.steps) / training.noise_multiplier
    rho = mu**2 / 2
    return Bounds(
        theory.gaussian_bound(log_kappa, mu),
        theory.renyi_bound(log_kappa, _ORDERS, [order * rho for order in _ORDERS]),
        theory.pure_bound(log_kappa, epsilon),
        theory.concentrated_bound(log_kappa, rho),
        theory.approximate_bound(log_kappa, epsilon, delta),
    )


def priors(settings: PriorSettings, samples: NDArray[np.floating]) -> list[PriorSpec]:
    """The baseline errors of all priors: images `(m, d)`, the Gaussian with their mean and variance, and its ball."""
    m, d = samples.shape
    sigma = float(np.sqrt(samples.var(axis=0).mean()))
    radius = sigma * math.sqrt(d)
    sizes = sorted(settings.candidates)
    found = [PriorSpec(f"one of {n} candidates", theory.finite_prior([1 / n] * n), candidates=n) for n in sizes]
    for threshold in sorted(settings.thresholds):
        eta = math.sqrt(threshold * d)
        sought = theory.empirical_prior(samples, eta)
        idealized = {
            "uniform ball (proposition 6)": theory.uniform_ball(eta, d, radius),
            "Gaussian (proposition 7, exact)": theory.gaussian_prior(eta, sigma, d),
            "Gaussian (proposition 7, as printed)": theory.gaussian_prior_chernoff(eta, sigma, d),
        }
        found += [
            PriorSpec(f"{m} images, sought among them", sought, threshold, is_certified=False),
            PriorSpec(f"{m} images, certified", theory.empirical_prior_ceiling(samples, eta), threshold),
            *(PriorSpec(name, baseline, threshold, is_drawn_from=False) for name, baseline in idealized.items()),
        ]
    return found


def sampled_noise(settings: SampledSettings, budget: BudgetSettings, steps: int) -> dict[tuple[float, float], float]:
    """The noise multipliers by rate and epsilon, full batches first; ConfigError for a budget that has none."""
    found = {}
    for rate in sorted({1.0, settings.rate}, reverse=True):
        for epsilon in sorted(settings.epsilons):
            try:
                found[rate, epsilon] = budget.descent(epsilon).noise(steps, rate)
            except ConfigError as error:
                raise ConfigError(
                    f"sampled, rate {rate:g}, epsilon {epsilon:g}: {error}; change budget.delta or "
                    "sampled.rate, or set sampled to null for no such bounds"
                ) from error
    return found


def sampled_rows(
    settings: SampledSettings, budget: BudgetSettings, steps: int, seed: int
) -> list[dict[str, float | None]]:
    """The tight bound by privacy-loss distributions and by simulation, for full batches also by the closed form."""
    rows: list[dict[str, float | None]] = []
    for (rate, epsilon), noise in sampled_noise(settings, budget, steps).items():
        losses = PoissonSGD(noise, steps, budget.neighbors, rate)
        for kappa in settings.kappas:
            log_kappa = math.log(kappa)
            found: theory.Simulated | None = None
            # Too few simulations tell anything about a chance that is too small.
            with contextlib.suppress(ConfigError):
                found = theory.simulated_bound(log_kappa, noise, steps, rate, settings.simulations, seed)
            rows.append(
                {
                    "rate": rate,
                    "epsilon": epsilon,
                    "noise_multiplier": noise,
                    "kappa": kappa,
                    "closed": theory.gaussian_bound(log_kappa, math.sqrt(steps) / noise) if rate == 1 else None,
                    "profile": theory.profile_bound(log_kappa, losses.profile),
                    "simulated": found and found.value,
                    "standard_error": found and found.standard_error,
                }
            )
    return rows


def equivalence_row(training: FullBatchSGD, epsilon: float) -> dict[str, float] | None:
    """Theorem 5: from delta, one record replaced, to the chance against two candidates, and back; None if that is 1."""
    if epsilon > _MOST_EPSILON:
        return None
    delta = FullBatchSGD(training.noise_multiplier, training.steps, "replace_one").delta(epsilon)
    gamma = theory.robustness_from_privacy(epsilon, delta)
    return {
        "epsilon": epsilon,
        "guess": theory.two_point_baseline(epsilon),
        "gamma": gamma,
        "delta": delta,
        "delta_from_gamma": theory.privacy_from_robustness(epsilon, gamma),
    }
