"""Input features of a wide random layer, from the gradients of that layer and of the head after it."""

from __future__ import annotations

from lit_recon.attacks.updates.features.cocktail_party import CocktailParty
from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.layer import FeatureRecovery, LayerGradient, RecoveredFeatures, layer_gradient
from lit_recon.attacks.updates.features.matching import (
    FeatureMap,
    FeatureMatching,
    FeatureTerm,
    SignedCosine,
    SquaredCosine,
    SubspaceDistance,
)
from lit_recon.attacks.updates.features.moments import MomentRecovery

__all__ = [
    "CocktailParty",
    "ExactRecovery",
    "FeatureMap",
    "FeatureMatching",
    "FeatureRecovery",
    "FeatureTerm",
    "LayerGradient",
    "MomentRecovery",
    "RecoveredFeatures",
    "SignedCosine",
    "SquaredCosine",
    "SubspaceDistance",
    "layer_gradient",
]
