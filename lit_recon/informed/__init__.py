"""Attacks of an informed adversary, who holds the released model and all of its training data but one record."""

from __future__ import annotations

from lit_recon.informed.anderson_retraining import AndersonRetraining
from lit_recon.informed.ensemble import Ensemble
from lit_recon.informed.first_layer_ridge import FirstLayerRidge
from lit_recon.informed.glm import ReleasedGLM
from lit_recon.informed.glm_estimators import (
    from_linear_regression,
    from_logistic_regression,
    from_poisson_regressor,
    from_ridge,
)
from lit_recon.informed.glm_family import Bernoulli, Family, Gaussian, Poisson
from lit_recon.informed.glm_multinomial import ReleasedMultinomial
from lit_recon.informed.glm_reconstruction import GLMReconstruction
from lit_recon.informed.glm_without_intercept import ReleasedWithoutIntercept, TwoCandidates
from lit_recon.informed.kernel_ridge import KernelRidge
from lit_recon.informed.reconstructor import Background, FittedReconstructor, ReconstructedTargets, Reconstructor
from lit_recon.informed.retraining import Retraining
from lit_recon.informed.shadow import GradientDescent, KnownTraining, ShadowPlan, ShadowStore
from lit_recon.informed.view import BlackBox, LayersOnly, View, WholeModel

__all__ = [
    "AndersonRetraining",
    "Background",
    "Bernoulli",
    "BlackBox",
    "Ensemble",
    "Family",
    "FirstLayerRidge",
    "FittedReconstructor",
    "GLMReconstruction",
    "Gaussian",
    "GradientDescent",
    "KernelRidge",
    "KnownTraining",
    "LayersOnly",
    "Poisson",
    "ReconstructedTargets",
    "Reconstructor",
    "ReleasedGLM",
    "ReleasedMultinomial",
    "ReleasedWithoutIntercept",
    "Retraining",
    "ShadowPlan",
    "ShadowStore",
    "TwoCandidates",
    "View",
    "WholeModel",
    "from_linear_regression",
    "from_logistic_regression",
    "from_poisson_regressor",
    "from_ridge",
]
