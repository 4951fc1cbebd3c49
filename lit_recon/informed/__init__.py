"""Attacks of an informed adversary, who holds the released model and all of its training data but one record."""

from __future__ import annotations

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

__all__ = [
    "Bernoulli",
    "Family",
    "GLMReconstruction",
    "Gaussian",
    "Poisson",
    "ReleasedGLM",
    "ReleasedMultinomial",
    "ReleasedWithoutIntercept",
    "TwoCandidates",
    "from_linear_regression",
    "from_logistic_regression",
    "from_poisson_regressor",
    "from_ridge",
]
