"""Shadow models: what an adversary trains who knows all training data but one image."""

from __future__ import annotations

from lit_recon.informed.shadow.engine import Execution, deltas, fastest_execution, train_models, train_reference
from lit_recon.informed.shadow.plan import Initialization, ShadowPlan
from lit_recon.informed.shadow.private import PrivateDescent
from lit_recon.informed.shadow.released import load_released
from lit_recon.informed.shadow.store import ShadowStore
from lit_recon.informed.shadow.training import GradientDescent, KnownTraining

__all__ = [
    "Execution",
    "GradientDescent",
    "Initialization",
    "KnownTraining",
    "PrivateDescent",
    "ShadowPlan",
    "ShadowStore",
    "deltas",
    "fastest_execution",
    "load_released",
    "train_models",
    "train_reference",
]
