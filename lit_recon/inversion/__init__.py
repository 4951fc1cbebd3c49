"""Attacks on updates: gradient matching, composed of an objective, priors, a parametrization, a solver and labels."""

from __future__ import annotations

from lit_recon.inversion.attack import Attack
from lit_recon.inversion.gradient_matching import GradientMatching, InversionState
from lit_recon.inversion.labels import IDLG, HeadCounts, JointLabels, KnownLabels, LabelRecovery
from lit_recon.inversion.objectives import (
    GlobalCosine,
    LayerwiseCosine,
    NormReweightedCosine,
    Objective,
    SquaredError,
)
from lit_recon.inversion.parametrizations import DeepImagePrior, Parametrization, Pixels
from lit_recon.inversion.priors import BatchNormPrior, GroupConsistency, Prior, SquaredNorm, TotalVariation
from lit_recon.inversion.solvers import LBFGS, Adam, Constant, CosineDecay, Schedule, Solver, StepDecay

__all__ = [
    "IDLG",
    "LBFGS",
    "Adam",
    "Attack",
    "BatchNormPrior",
    "Constant",
    "CosineDecay",
    "DeepImagePrior",
    "GlobalCosine",
    "GradientMatching",
    "GroupConsistency",
    "HeadCounts",
    "InversionState",
    "JointLabels",
    "KnownLabels",
    "LabelRecovery",
    "LayerwiseCosine",
    "NormReweightedCosine",
    "Objective",
    "Parametrization",
    "Pixels",
    "Prior",
    "Schedule",
    "Solver",
    "SquaredError",
    "SquaredNorm",
    "StepDecay",
    "TotalVariation",
]
