"""Shadow models, trained by an adversary who knows all training data but one image."""

from __future__ import annotations

from lit_recon.attacks.shadow.engine import Execution, deltas, fastest_execution, train_models, train_reference
from lit_recon.attacks.shadow.linear_plan import ApproximationError, LinearPlan
from lit_recon.attacks.shadow.linear_response import LinearResponse
from lit_recon.attacks.shadow.plan import (
    ExactSample,
    Initialization,
    Plan,
    Pretraining,
    ShadowPlan,
    load_released,
    pretrained_weights,
)
from lit_recon.attacks.shadow.store import ShadowStore
from lit_recon.attacks.shadow.training import GradientDescent, KnownTraining
from lit_recon.privacy.noisy_sgd import PrivateDescent

__all__ = [
    "ApproximationError",
    "ExactSample",
    "Execution",
    "GradientDescent",
    "Initialization",
    "KnownTraining",
    "LinearPlan",
    "LinearResponse",
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
