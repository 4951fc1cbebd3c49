"""Closed-form reconstruction of one record from a fitted generalized linear model."""

from __future__ import annotations

from lit_recon.attacks.glm.estimators import (
    from_linear_regression,
    from_logistic_regression,
    from_poisson_regressor,
    from_ridge,
)
from lit_recon.attacks.glm.family import Bernoulli, Family, Gaussian, GLMReconstruction, Multinomial, Poisson
from lit_recon.attacks.glm.released import ReleasedGLM, ReleasedWithoutIntercept, TwoCandidates

__all__ = [
    "Bernoulli",
    "Family",
    "GLMReconstruction",
    "Gaussian",
    "Multinomial",
    "Poisson",
    "ReleasedGLM",
    "ReleasedWithoutIntercept",
    "TwoCandidates",
    "from_linear_regression",
    "from_logistic_regression",
    "from_poisson_regressor",
    "from_ridge",
]
