"""How close a reconstruction came to the truth: scores of matched pairs, baselines, and their means over a run."""

from __future__ import annotations

from lit_recon.metrics.aggregate import ImageScore, LabelAccuracy
from lit_recon.metrics.baselines import MeanImage, NearestPublic
from lit_recon.metrics.features import feature_cosines, span_error
from lit_recon.metrics.fidelity import mse, psnr, rmse, ssim
from lit_recon.metrics.labels import label_accuracy
from lit_recon.metrics.perceptual import Lpips, LpipsNetwork, Unavailable, load_lpips
from lit_recon.metrics.scores import BatchScores, match, score_batch, score_pairs

__all__ = [
    "BatchScores",
    "ImageScore",
    "LabelAccuracy",
    "Lpips",
    "LpipsNetwork",
    "MeanImage",
    "NearestPublic",
    "Unavailable",
    "feature_cosines",
    "label_accuracy",
    "load_lpips",
    "match",
    "mse",
    "psnr",
    "rmse",
    "score_batch",
    "score_pairs",
    "span_error",
    "ssim",
]
