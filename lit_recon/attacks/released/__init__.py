"""Attacks on released models by an informed adversary, who knows all of the training data but one record."""

from __future__ import annotations

from lit_recon.attacks.released.access import BlackBox, LayersOnly, ModelAccess, WholeModel
from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.ensemble import Ensemble
from lit_recon.attacks.released.first_layer import FirstLayerRidge
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.kernel_systems import BlockSolver
from lit_recon.attacks.released.retraining.anderson import AndersonRetraining
from lit_recon.attacks.released.retraining.descent import Retraining
from lit_recon.attacks.released.retraining.newton import NewtonRetraining

__all__ = [
    "AndersonRetraining",
    "Background",
    "BlackBox",
    "BlockSolver",
    "Ensemble",
    "FirstLayerRidge",
    "KernelRidge",
    "LayersOnly",
    "ModelAccess",
    "NewtonRetraining",
    "ReconstructedTargets",
    "Reconstructor",
    "Retraining",
    "WholeModel",
]
