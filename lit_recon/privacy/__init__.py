"""Privacy accounting for noisy training: exact for full batches, safe upper bounds for sampled ones."""

from __future__ import annotations

from lit_recon.privacy.calibration import calibrate_noise
from lit_recon.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_log_delta, gaussian_mu
from lit_recon.privacy.neighbors import Neighbors
from lit_recon.privacy.noisy_sgd import FullBatchSGD, NoisySGD, PoissonSGD, noisy_sgd
from lit_recon.privacy.renyi import renyi_curve

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
