"""Privacy accounting for DP-SGD: exact for full batches, upper bounds for sampled ones."""

from __future__ import annotations

from lit_recon.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_log_delta, gaussian_mu, renyi_curve
from lit_recon.privacy.noisy_sgd import (
    FullBatchSGD,
    Neighbors,
    NoisySGD,
    PoissonSGD,
    PrivateDescent,
    calibrate_noise,
    noisy_sgd,
)

__all__ = [
    "FullBatchSGD",
    "Neighbors",
    "NoisySGD",
    "PoissonSGD",
    "PrivateDescent",
    "calibrate_noise",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_log_delta",
    "gaussian_mu",
    "noisy_sgd",
    "renyi_curve",
]
