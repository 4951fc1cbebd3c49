"""How well any attack can do: baseline errors of priors, and reconstruction robustness from privacy."""

from __future__ import annotations

from lit_recon.bounds.baseline_error import (
    BaselineError,
    empirical_prior,
    empirical_prior_ceiling,
    finite_prior,
    gaussian_prior,
    gaussian_prior_chernoff,
    uniform_ball,
)
from lit_recon.bounds.equivalence import privacy_from_robustness, robustness_from_privacy, two_point_baseline
from lit_recon.bounds.privacy_profile import profile_bound
from lit_recon.bounds.robustness import (
    approximate_bound,
    concentrated_bound,
    gaussian_bound,
    laplace_bound,
    pure_bound,
    renyi_bound,
    tight_pure_bound,
)
from lit_recon.bounds.sampled_gaussian import Simulated, simulated_bound

__all__ = [
    "BaselineError",
    "Simulated",
    "approximate_bound",
    "concentrated_bound",
    "empirical_prior",
    "empirical_prior_ceiling",
    "finite_prior",
    "gaussian_bound",
    "gaussian_prior",
    "gaussian_prior_chernoff",
    "laplace_bound",
    "privacy_from_robustness",
    "profile_bound",
    "pure_bound",
    "renyi_bound",
    "robustness_from_privacy",
    "simulated_bound",
    "tight_pure_bound",
    "two_point_baseline",
    "uniform_ball",
]
