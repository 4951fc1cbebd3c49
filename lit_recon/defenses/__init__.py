"""Defenses: what a client does to its batch, its gradients or its update before anybody sees them."""

from __future__ import annotations

from lit_recon.defenses.base import Batch, BatchGradient, Defense, Round, Stage
from lit_recon.defenses.calibration import matched_scale
from lit_recon.defenses.chain import Chain
from lit_recon.defenses.dp_sgd import DPSGD
from lit_recon.defenses.gaussian_noise import GaussianNoise
from lit_recon.defenses.gradient_clipping import GradientClipping
from lit_recon.defenses.gradient_dropout import GradientDropout
from lit_recon.defenses.gradient_pruning import GradientPruning
from lit_recon.defenses.laplace_noise import LaplaceNoise
from lit_recon.defenses.mixup import MixUp
from lit_recon.defenses.network_dropout import NetworkDropout
from lit_recon.defenses.optimal_noise import OptimalGradientNoise
from lit_recon.defenses.optimal_pruning import OptimalGradientPruning
from lit_recon.defenses.per_example import per_example_gradients
from lit_recon.defenses.per_example_clipping import PerExampleClipping
from lit_recon.defenses.release import at_weights, defended_gradient, simulated_gradient
from lit_recon.defenses.sensitivity import fisher_trace, leakage, sensitivities

__all__ = [
    "DPSGD",
    "Batch",
    "BatchGradient",
    "Chain",
    "Defense",
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
    "Round",
    "Stage",
    "at_weights",
    "defended_gradient",
    "fisher_trace",
    "leakage",
    "matched_scale",
    "per_example_gradients",
    "sensitivities",
    "simulated_gradient",
]
