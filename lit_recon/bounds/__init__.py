"""Bounds on all attacks: information bounds, baseline errors of priors, reconstruction robustness from privacy."""

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
    GaussianPrior,
    Rounding,
    cramer_rao,
    likeliest_inputs,
    remaining,
    unit_norm_cramer_rao,
    unknown_basis,
    unknown_directions,
    van_trees,
)
from lit_recon.bounds.fisher import ReleasedInformation, autograd_jacobian, fisher_information
from lit_recon.bounds.network import NetworkJacobian, ProductJacobian
from lit_recon.bounds.robustness import (
    Simulated,
    approximate_bound,
    concentrated_bound,
    gaussian_bound,
    laplace_bound,
    privacy_from_robustness,
    profile_bound,
    pure_bound,
    renyi_bound,
    robustness_from_privacy,
    simulated_bound,
    tight_pure_bound,
    two_point_baseline,
)
from lit_recon.bounds.sampled import SampledJacobian
from lit_recon.bounds.two_layer import RATES, TwoLayerJacobian, TwoLayerNet, moments_noise, replacement_sensitivity
from lit_recon.noisy_release import NoisyRelease

__all__ = [
    "RATES",
    "BaselineError",
    "GaussianPrior",
    "NetworkJacobian",
    "NoisyRelease",
    "ProductJacobian",
    "ReleasedInformation",
    "Rounding",
    "SampledJacobian",
    "Simulated",
    "TwoLayerJacobian",
    "TwoLayerNet",
    "approximate_bound",
    "autograd_jacobian",
    "concentrated_bound",
    "cramer_rao",
    "empirical_prior",
    "empirical_prior_ceiling",
    "finite_prior",
    "fisher_information",
    "gaussian_bound",
    "gaussian_prior",
    "gaussian_prior_chernoff",
    "laplace_bound",
    "likeliest_inputs",
    "moments_noise",
    "privacy_from_robustness",
    "profile_bound",
    "pure_bound",
    "remaining",
    "renyi_bound",
    "replacement_sensitivity",
    "robustness_from_privacy",
    "simulated_bound",
    "tight_pure_bound",
    "two_point_baseline",
    "uniform_ball",
    "unit_norm_cramer_rao",
    "unknown_basis",
    "unknown_directions",
    "van_trees",
]
