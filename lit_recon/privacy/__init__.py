"""Privacy accounting for noisy training: exact for full batches, safe upper bounds for sampled ones."""

from __future__ import annotations

from lit_recon.privacy.calibration import calibrate_noise
from lit_recon.privacy.gaussian import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_log_delta,
    gaussian_mu,
    renyi_curve,
)
from lit_recon.privacy.noisy_sgd import (
    FullBatchSGD,
    Neighbors,
    NoisySGD,
    PoissonSGD,
    noisy_sgd,
)

__all__ = [
    "FullBatchSGD",
    "Neighbors",
    "NoisySGD",
    "PoissonSGD",
    "calibrate_noise",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_log_delta",
    "gaussian_mu",
    "noisy_sgd",
    "renyi_curve",
]
