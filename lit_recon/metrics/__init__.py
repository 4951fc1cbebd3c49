"""Metrics of matched pairs, baselines, and their means over a run."""

from __future__ import annotations

from lit_recon.measures import Measure
from lit_recon.metrics.aggregate import ImageScore
from lit_recon.metrics.baselines import MeanImage, NearestPublic
from lit_recon.metrics.features import (
    FeatureCosine,
    FeatureError,
    LabelAccuracy,
    PredictionDivergence,
    feature_cosines,
    label_hits,
    span_error,
)
from lit_recon.metrics.fidelity import MSE, PSNR, RMSE, SSIM, mse, psnr, rmse, ssim
from lit_recon.metrics.perceptual import Lpips, LpipsNetwork, PerceptualDistance, load_lpips
from lit_recon.metrics.registry import DEFAULT_METRICS, Metric, Unavailable, metrics_of, register
from lit_recon.metrics.scores import BatchScores, checked_values, match, score_batch, score_pairs

__all__ = [
    "DEFAULT_METRICS",
    "MSE",
    "PSNR",
    "RMSE",
    "SSIM",
    "BatchScores",
    "FeatureCosine",
    "FeatureError",
    "ImageScore",
    "LabelAccuracy",
    "Lpips",
    "LpipsNetwork",
    "MeanImage",
    "Measure",
    "Metric",
    "NearestPublic",
    "PerceptualDistance",
    "PredictionDivergence",
    "Unavailable",
    "checked_values",
    "feature_cosines",
    "label_hits",
    "load_lpips",
    "match",
    "metrics_of",
    "mse",
    "psnr",
    "register",
    "rmse",
    "score_batch",
    "score_pairs",
    "span_error",
    "ssim",
]
