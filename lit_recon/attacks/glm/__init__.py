"""Closed-form reconstruction of one record from a fitted generalized linear model."""

from __future__ import annotations

from lit_recon.attacks.glm.estimators import (
    from_linear_regression,
    from_logistic_regression,
    from_poisson_regressor,
    from_ridge,
)
from lit_recon.attacks.glm.family import (
    Bernoulli,
    Family,
    Gaussian,
    GLMReconstruction,
    Poisson,
)
from lit_recon.attacks.glm.released import ReleasedGLM, ReleasedMultinomial
from lit_recon.attacks.glm.without_intercept import ReleasedWithoutIntercept, TwoCandidates

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
