"""Privacy accounting for DP-SGD: exact for full batches, upper bounds for sampled ones."""

from __future__ import annotations

from lit_recon.privacy.noisy_sgd import (
    FullBatchSGD,
    Neighbors,
    PoissonSGD,
    PrivateDescent,
    calibrate_noise,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
)

__all__ = [
    "FullBatchSGD",
    "Neighbors",
    "PoissonSGD",
    "PrivateDescent",
    "calibrate_noise",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
]
