"""Attacks on updates: gradient matching, composed of an objective, priors, a parametrization, a solver and labels."""

from __future__ import annotations

from lit_recon.inversion.analytic import AnalyticInversion
from lit_recon.inversion.attack import Attack
from lit_recon.inversion.cocktail_party import CocktailPartyAttack
from lit_recon.inversion.feature_matching import FeatureMatching
from lit_recon.inversion.features import (
    CocktailParty,
    ExactRecovery,
    FeatureMap,
    FeatureRecovery,
    FeatureTerm,
    MomentRecovery,
    RecoveredFeatures,
    SignedCosine,
    SquaredCosine,
    SubspaceDistance,
)
from lit_recon.inversion.generative_prior import GenerativePrior
from lit_recon.inversion.gradient_matching import GradientMatching
from lit_recon.inversion.imprint import RobbingTheFed
from lit_recon.inversion.in_turn import InTurn
from lit_recon.inversion.inversion_state import InversionState
from lit_recon.inversion.labels import IDLG, HeadCounts, JointLabels, KnownLabels, LabelRecovery
from lit_recon.inversion.map_matching import MapMatching
from lit_recon.inversion.maps import MapRecovery, RecoveredMaps
from lit_recon.inversion.objectives import (
    FeaturesOnly,
    GlobalCosine,
    LayerwiseCosine,
    NormReweightedCosine,
    Objective,
    SquaredError,
)
from lit_recon.inversion.parametrizations import DeepImagePrior, Parametrization, Pixels
from lit_recon.inversion.priors import BatchNormPrior, GroupConsistency, Prior, SquaredNorm, TotalVariation
from lit_recon.inversion.pruned import Observed
from lit_recon.inversion.solvers import LBFGS, Adam, Constant, CosineDecay, Schedule, Solver, StepDecay, TwoStages
from lit_recon.inversion.unmixing import UnmixingTerms

__all__ = [
    "IDLG",
    "LBFGS",
    "Adam",
    "AnalyticInversion",
    "Attack",
    "BatchNormPrior",
    "CocktailParty",
    "CocktailPartyAttack",
    "Constant",
    "CosineDecay",
    "DeepImagePrior",
    "ExactRecovery",
    "FeatureMap",
    "FeatureMatching",
    "FeatureRecovery",
    "FeatureTerm",
    "FeaturesOnly",
    "GenerativePrior",
    "GlobalCosine",
    "GradientMatching",
    "GroupConsistency",
    "HeadCounts",
    "InTurn",
    "InversionState",
    "JointLabels",
    "KnownLabels",
    "LabelRecovery",
    "LayerwiseCosine",
    "MapMatching",
    "MapRecovery",
    "MomentRecovery",
    "NormReweightedCosine",
    "Objective",
    "Observed",
    "Parametrization",
    "Pixels",
    "Prior",
    "RecoveredFeatures",
    "RecoveredMaps",
    "RobbingTheFed",
    "Schedule",
    "SignedCosine",
    "Solver",
    "SquaredCosine",
    "SquaredError",
    "SquaredNorm",
    "StepDecay",
    "SubspaceDistance",
    "TotalVariation",
    "TwoStages",
    "UnmixingTerms",
]
