"""Attacks on updates: gradient matching, features and maps of layers, linear layers, a malicious server."""

from __future__ import annotations

from lit_recon.attacks.base import Attack, SimpleState, SteppableAttack
from lit_recon.attacks.updates.feature_maps.matching import MapMatching
from lit_recon.attacks.updates.feature_maps.patches import PatchMatching
from lit_recon.attacks.updates.feature_maps.recovery import MapRecovery, RecoveredMaps
from lit_recon.attacks.updates.feature_maps.top_down_matching import TopDownMatching
from lit_recon.attacks.updates.features.cocktail_party import CocktailParty
from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.inputs import InputMatching, NonNegativeInputs, RecoveredInputs
from lit_recon.attacks.updates.features.layer import FeatureRecovery, RecoveredFeatures
from lit_recon.attacks.updates.features.matching import (
    FeatureMap,
    FeatureMatching,
    FeatureTerm,
    SignedCosine,
    SquaredCosine,
    SubspaceDistance,
)
from lit_recon.attacks.updates.features.moments import MomentRecovery
from lit_recon.attacks.updates.first_applicable import FirstApplicable
from lit_recon.attacks.updates.gradient_matching.attack import GradientMatching
from lit_recon.attacks.updates.gradient_matching.objectives import (
    FeaturesOnly,
    GlobalCosine,
    LayerwiseCosine,
    Likelihood,
    NormReweightedCosine,
    Objective,
    Observed,
    SquaredError,
)
from lit_recon.attacks.updates.gradient_matching.parametrizations import (
    DeepImagePrior,
    GenerativePrior,
    Parametrization,
    Pixels,
)
from lit_recon.attacks.updates.gradient_matching.priors import (
    BatchNormPrior,
    GroupConsistency,
    Prior,
    SquaredNorm,
    TotalVariation,
)
from lit_recon.attacks.updates.gradient_matching.solvers import (
    LBFGS,
    Adam,
    Constant,
    CosineDecay,
    Schedule,
    Solver,
    StepDecay,
    TwoStages,
)
from lit_recon.attacks.updates.gradient_matching.state import MatchingState
from lit_recon.attacks.updates.imprint.attack import RobbingTheFed
from lit_recon.attacks.updates.labels.recovery import IDLG, HeadCounts, JointLabels, KnownLabels, LabelRecovery
from lit_recon.attacks.updates.linear_layer.cocktail_party import CocktailPartyAttack
from lit_recon.attacks.updates.linear_layer.first_layer import AnalyticInversion
from lit_recon.attacks.updates.linear_layer.unmixing import UnmixingTerms

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
    "FirstApplicable",
    "GenerativePrior",
    "GlobalCosine",
    "GradientMatching",
    "GroupConsistency",
    "HeadCounts",
    "InputMatching",
    "JointLabels",
    "KnownLabels",
    "LabelRecovery",
    "LayerwiseCosine",
    "Likelihood",
    "MapMatching",
    "MapRecovery",
    "MatchingState",
    "MomentRecovery",
    "NonNegativeInputs",
    "NormReweightedCosine",
    "Objective",
    "Observed",
    "Parametrization",
    "PatchMatching",
    "Pixels",
    "Prior",
    "RecoveredFeatures",
    "RecoveredInputs",
    "RecoveredMaps",
    "RobbingTheFed",
    "Schedule",
    "SignedCosine",
    "SimpleState",
    "Solver",
    "SquaredCosine",
    "SquaredError",
    "SquaredNorm",
    "StepDecay",
    "SteppableAttack",
    "SubspaceDistance",
    "TopDownMatching",
    "TotalVariation",
    "TwoStages",
    "UnmixingTerms",
]
