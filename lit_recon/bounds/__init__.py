"""Limits of every attack: information bounds, baseline errors of priors, reconstruction robustness from privacy."""

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
from lit_recon.bounds.cramer_rao import (
    ErrorBound,
    GaussianPrior,
    cramer_rao,
    unit_norm_cramer_rao,
    van_trees,
)
from lit_recon.bounds.fisher import (
    DenseJacobian,
    GaussianRelease,
    Jacobian,
    ReleasedInformation,
    autograd_jacobian,
    example_clipped_information,
    fisher_information,
)
from lit_recon.bounds.likelihood import likeliest_inputs
from lit_recon.bounds.rates import RATES, Rate, Slope, log_slope
from lit_recon.bounds.robustness import (
    approximate_bound,
    concentrated_bound,
    gaussian_bound,
    laplace_bound,
    privacy_from_robustness,
    profile_bound,
    pure_bound,
    renyi_bound,
    robustness_from_privacy,
    tight_pure_bound,
    two_point_baseline,
)
from lit_recon.bounds.sampled_gaussian import Simulated, simulated_bound
from lit_recon.bounds.two_layer import TwoLayerJacobian, TwoLayerNet, moments_noise, replacement_sensitivity

__all__ = [
    "RATES",
    "BaselineError",
    "DenseJacobian",
    "ErrorBound",
    "GaussianPrior",
    "GaussianRelease",
    "Jacobian",
    "Rate",
    "ReleasedInformation",
    "Simulated",
    "Slope",
    "TwoLayerJacobian",
    "TwoLayerNet",
    "approximate_bound",
    "autograd_jacobian",
    "concentrated_bound",
    "cramer_rao",
    "empirical_prior",
    "empirical_prior_ceiling",
    "example_clipped_information",
    "finite_prior",
    "fisher_information",
    "gaussian_bound",
    "gaussian_prior",
    "gaussian_prior_chernoff",
    "laplace_bound",
    "likeliest_inputs",
    "log_slope",
    "moments_noise",
    "privacy_from_robustness",
    "profile_bound",
    "pure_bound",
    "renyi_bound",
    "replacement_sensitivity",
    "robustness_from_privacy",
    "simulated_bound",
    "tight_pure_bound",
    "two_point_baseline",
    "uniform_ball",
    "unit_norm_cramer_rao",
    "van_trees",
]
