"""Interface and result of feature recovery."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from lit_recon.attacks.updates.features.layer import LayerGradient, layer_gradient
from lit_recon.records import ForwardOperator, Observation


@dataclass(frozen=True)
class RecoveredFeatures:
    """Inputs of a wide feature layer, in arbitrary order.

    Attributes:
        features: `(r, d)`, float64 rows of unit norm; `r` is the batch size unless features coincide.
        span: `(d, r)` orthonormal: often more accurate than single features.
        method: its name.
        certificate: sum of the relative residuals of the gradients that the features imply, if the method has one.
        exact: the certificate holds.
        signed: the signs of features are known.
        labels: `(r,)` class of each feature, if the method finds it.
        notes: fall-backs and assumptions.
    """

    features: Tensor
    span: Tensor
    method: str
    certificate: float | None = None
    exact: bool = False
    signed: bool = False
    labels: Tensor | None = None
    notes: tuple[str, ...] = ()


class FeatureRecovery(ABC):
    """Computes the features of a batch from the gradients of a wide feature layer and its head.

    A constructor raises a `ConfigError` for a setting out of its range.
    """

    #: Whether signs of features are determined, except by fall-back methods.
    knows_signs: bool = False
    #: Whether features come from moments of the gradient, for which Liu et al. state the order of the error.
    by_moments: bool = False

    @final
    def __call__(self, observation: Observation) -> RecoveredFeatures:
        """The input features of `model.feature_layer` after centering, up to order.

        Raises:
            UnsupportedModelError: no wide feature layer, no head after it, more examples than features, or an
                activation that the method cannot use.
            ThreatModelError: neither feature layer nor head released a gradient.
        """
        return self.recover(layer_gradient(observation), observation.operator)

    @final
    def recover(self, seen: LayerGradient, operator: ForwardOperator | None = None) -> RecoveredFeatures:
        """The same from a layer's gradient; `operator` is the client's rule, None for one gradient."""
        found = self.run(seen, operator)
        notes = found.notes
        if found.features.shape[0] < seen.n_examples:
            rank = f"the gradient has rank {found.features.shape[0]} for {seen.n_examples} examples"
            notes = (*notes, f"{rank}: some features coincide or have no gradient")
        features = torch.nn.functional.normalize(found.features.detach(), dim=1)
        return replace(found, features=features, span=found.span.detach(), notes=notes)

    @abstractmethod
    def run(self, seen: LayerGradient, operator: ForwardOperator | None) -> RecoveredFeatures:
        """The recovery itself."""
