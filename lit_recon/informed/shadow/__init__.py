"""Shadow models: what an adversary trains who knows all training data but one image."""

from __future__ import annotations

from lit_recon.informed.shadow.engine import Execution, deltas, fastest_execution, train_models, train_reference
from lit_recon.informed.shadow.linear_plan import LinearPlan
from lit_recon.informed.shadow.linear_response import LinearResponse
from lit_recon.informed.shadow.measured_error import MeasuredError
from lit_recon.informed.shadow.plan import Initialization, ShadowPlan
from lit_recon.informed.shadow.pretraining import Pretraining, pretrained_weights
from lit_recon.informed.shadow.private import PrivateDescent
from lit_recon.informed.shadow.released import load_released
from lit_recon.informed.shadow.store import ShadowStore
from lit_recon.informed.shadow.training import GradientDescent, KnownTraining

#: Of shadow models, however they are made.
Plan = ShadowPlan | LinearPlan

__all__ = [
    "Execution",
    "GradientDescent",
    "Initialization",
    "KnownTraining",
    "LinearPlan",
    "LinearResponse",
    "MeasuredError",
    "Plan",
    "Pretraining",
    "PrivateDescent",
    "ShadowPlan",
    "ShadowStore",
    "deltas",
    "fastest_execution",
    "load_released",
    "pretrained_weights",
    "train_models",
    "train_reference",
]
