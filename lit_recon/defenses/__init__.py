"""Defenses: changes to a client's batch, per-example gradients or update before the release."""

from __future__ import annotations

from lit_recon.defenses.base import BatchGradient, Defense, Round, Stage
from lit_recon.defenses.batch import MixUp, NetworkDropout
from lit_recon.defenses.clipping import DPSGD, GradientClipping, PerExampleClipping
from lit_recon.defenses.combined import AveragedDefense, Chain
from lit_recon.defenses.noise import GaussianNoise, LaplaceNoise, SVTPrivacy
from lit_recon.defenses.optimal import OptimalGradientNoise, OptimalGradientPruning
from lit_recon.defenses.release import defended_gradient, per_example_gradients, simulated_gradient
from lit_recon.defenses.sparsity import ExcludedVariables, GradientDropout, GradientPruning, PercentilePrivacy
from lit_recon.defenses.vectors import matched_scale
from lit_recon.records import Batch

__all__ = [
    "DPSGD",
    "AveragedDefense",
    "Batch",
    "BatchGradient",
    "Chain",
    "Defense",
    "ExcludedVariables",
    "GaussianNoise",
    "GradientClipping",
    "GradientDropout",
    "GradientPruning",
    "LaplaceNoise",
    "MixUp",
    "NetworkDropout",
    "OptimalGradientNoise",
    "OptimalGradientPruning",
    "PerExampleClipping",
    "PercentilePrivacy",
    "Round",
    "SVTPrivacy",
    "Stage",
    "defended_gradient",
    "matched_scale",
    "per_example_gradients",
    "simulated_gradient",
]
