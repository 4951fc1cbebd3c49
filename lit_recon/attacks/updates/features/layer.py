"""Gradients of the wide feature layer and of the head after it, and the interface of recoveries from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.features.activations import Activation, activation_of
from lit_recon.attacks.updates.labels.head import exact, mean_gradient, require_cross_entropy
from lit_recon.attacks.updates.noise import singular_values
from lit_recon.errors import ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.models import WideFeatureLayer
from lit_recon.records import ForwardOperator, Observation

#: Share of scattered zeros above which they are attributed to a defense.
SCATTERED = 0.01


@dataclass(frozen=True)
class LayerGradient:
    """Layer `h = activation(W x + b)` of `m` neurons on `d` features, and head `A h + c` with `k` outputs.

    Up to a common factor the gradients are sums over examples i, with delta_i = dL_i / d logits_i:
    head `sum_i delta_i h_i^T`, weight `sum_i (A^T delta_i * activation'(z_i)) x_i^T`, bias the same without `x_i`.

    Attributes:
        weight, bias: `(m, d)`, `(m,)`: W and b.
        head_weight, head_bias: `(k, m)`, `(k,)`: A and c.
        weight_gradient, bias_gradient, head_gradient: `(m, d)`, `(m,)`, `(k, m)`.
        gaussian: `(m,)` bool: neurons with independent weights from N(0, I).
        center: `(d,)`: subtracted from features before they are scaled to norm 1; None: nothing is.
    """

    weight: Tensor
    bias: Tensor
    head_weight: Tensor
    head_bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor
    head_gradient: Tensor
    activation: Activation
    gaussian: Tensor
    n_examples: int
    center: Tensor | None = None

    def __post_init__(self) -> None:
        (m, d), k = self.weight.shape, len(self.head_weight)
        expected = {
            "bias": (m,),
            "head_weight": (k, m),
            "head_bias": (k,),
            "weight_gradient": (m, d),
            "bias_gradient": (m,),
            "head_gradient": (k, m),
            "gaussian": (m,),
        }
        if self.center is not None:
            expected["center"] = (d,)
        for name, shape in expected.items():
            if (got := tuple(getattr(self, name).shape)) != shape:
                raise ShapeError(f"a layer of weight {m, d} and a head of {k} outputs need {name} {shape}; got {got}")
        if not 1 <= self.n_examples <= d:
            raise UnsupportedModelError(
                f"features of {self.n_examples} examples cannot be separated in {d} dimensions: "
                f"attack batches of at most {d}, or build the model with more features"
            )

    @property
    def has_head(self) -> bool:
        """Whether the head's gradient is not zero."""
        return bool(self.head_gradient.any())

    @property
    def has_weight(self) -> bool:
        """Whether the layer's own gradient is not zero."""
        return bool(self.weight_gradient.any())

    def gaussian_rows(self) -> LayerGradient:
        """The same layer with only its Gaussian neurons, or with all if it has none."""
        if self.gaussian.all() or not self.gaussian.any():
            return self
        rows = self.gaussian
        return replace(
            self,
            weight=self.weight[rows],
            bias=self.bias[rows],
            head_weight=self.head_weight[:, rows],
            weight_gradient=self.weight_gradient[rows],
            bias_gradient=self.bias_gradient[rows],
            head_gradient=self.head_gradient[:, rows],
            gaussian=rows[rows],
        )


def layer_gradient(observation: Observation) -> LayerGradient:
    """The wide layer's part of an observation, in double precision on the CPU.

    Raises:
        UnsupportedModelError: no wide feature layer, no linear head after it, an activation whose derivatives are not
            known, or more examples than features.
        ThreatModelError: neither layer nor head released a gradient, or another loss than the cross-entropy.
    """
    require_cross_entropy(observation, "feature recovery", "leave `features` out of the attack")
    layer = getattr(observation.model, "feature_layer", None)
    head = getattr(observation.model, "head", None)
    if not isinstance(layer, WideFeatureLayer):
        raise UnsupportedModelError(
            f"feature recovery needs the gradient of a WideFeatureLayer; {type(observation.model).__name__} has none: "
            "build the backbone with feature_layer=WideFeatureLayer(...)"
        )
    if not isinstance(head, nn.Linear) or "head.weight" not in observation.update:
        raise UnsupportedModelError(
            f"feature recovery needs the gradient of the linear head after the feature layer; "
            f"{type(observation.model).__name__} has no parameter 'head.weight': keep the head in the shared model"
        )
    blocks = [name for name in ("trained", "random") if getattr(layer, name) is not None]
    public, released = observation.parameters, mean_gradient(observation.update, observation)

    def stacked(source: dict[str, Tensor], part: str) -> Tensor:
        return torch.cat([exact(source[f"feature_layer.{block}.{part}"]) for block in blocks])

    head_weight = exact(public["head.weight"])
    seen = LayerGradient(
        weight=stacked(dict(public), "weight"),
        bias=stacked(dict(public), "bias"),
        head_weight=head_weight,
        head_bias=exact(public["head.bias"]) if "head.bias" in public else head_weight.new_zeros(len(head_weight)),
        weight_gradient=stacked(released, "weight"),
        bias_gradient=stacked(released, "bias"),
        head_gradient=exact(released["head.weight"]),
        activation=activation_of(layer.activation),
        gaussian=torch.cat([torch.full((len(getattr(layer, name).bias),), name == "random") for name in blocks]),
        n_examples=observation.n_examples,
        center=exact(layer.center) if layer.center.any() else None,
    )
    if not (seen.has_head or seen.has_weight):
        raise ThreatModelError(
            "the gradients of the feature layer and of the head are zero everywhere: features cannot be recovered from "
            "a client that freezes both or a defense that removes both; use an attack without `features`"
        )
    return seen


class ObservedEntries(NamedTuple):
    """Entries kept by a sparsifying defense, of `layer` `(m, d)` and `head` `(k, m)`; None: all."""

    layer: Tensor | None
    head: Tensor | None


def observed_entries(seen: LayerGradient) -> ObservedEntries:
    """Observed entries of the gradients of layer and head, where more than a few scattered zeros are missing entries.

    Not scattered are the zeros of a feature that is zero in all examples, a column of the layer's gradient; of a class
    without a derivative, a row of the head's; and of a neuron that is inactive for all examples, a row of the layer's
    and a column of the head's.
    """
    layer, head = seen.weight_gradient != 0, seen.head_gradient != 0
    active = layer.any(dim=1) | head.any(dim=0) | seen.activation.smooth
    return ObservedEntries(
        layer if _scattered(layer[active][:, layer.any(dim=0)]) else None,
        head if _scattered(head[head.any(dim=1)][:, active]) else None,
    )


def _scattered(nonzero: Tensor) -> bool:
    return nonzero.numel() - int(nonzero.sum()) > SCATTERED * nonzero.numel()


#: Noise below this share of the layer's gradient (root mean squares) is treated as rounding.
_ROUNDING = 1e-5


class GradientNoise(NamedTuple):
    """Standard deviation of the noise on every entry of the `layer`'s and of the `head`'s gradient."""

    layer: float
    head: float

    def scales(self, seen: LayerGradient) -> tuple[float, float]:
        """Divisors of the squared residuals of head and layer that give a sum near 1 under noise alone."""
        n = seen.head_gradient.numel() + seen.weight_gradient.numel()
        return (self.head**2 * n if seen.has_head else 0.0), self.layer**2 * n


def gradient_noise(seen: LayerGradient) -> GradientNoise | None:
    """The noise in both gradients, or None if there is only rounding.

    Without noise neither gradient has a rank above the batch size; the components beyond are noise, a known share of
    all noise. If the head has too few classes for components beyond, its noise is assumed equal to that of the layer.
    """
    weight = seen.weight_gradient
    layer = _beyond(weight, seen.n_examples)
    if layer is None or layer <= _ROUNDING * float(weight.square().mean().sqrt()):
        return None
    head = _beyond(seen.head_gradient, seen.n_examples) if seen.has_head else None
    if head is None:
        return GradientNoise(layer, layer)
    return GradientNoise(layer, max(head, _ROUNDING * float(seen.head_gradient.square().mean().sqrt())))


def _beyond(gradient: Tensor, rank: int) -> float | None:
    """Root mean square of noise in a matrix `(p, q)` of the given rank; None for a matrix of full rank."""
    p, q = sorted(gradient.shape)
    if rank >= p:
        return None
    # rounding of the squares of singular values stays below the square of `_ROUNDING`
    values = singular_values(gradient.double())[: p - rank]
    return float((values.square().sum() / ((p - rank) * (q - rank))).sqrt())


@dataclass(frozen=True)
class RecoveredFeatures:
    """Inputs of a wide feature layer, in arbitrary order.

    Attributes:
        features: `(r, d)`, float64 rows of unit norm; `r` is the batch size unless features coincide.
        span: `(d, r)` orthonormal: often more accurate than single features.
        certificate: sum of the relative residuals of the gradients that the features imply, if the method has one.
        exact, signed: the certificate holds; the signs of features are known.
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
    """Recovers the features of a batch; a constructor raises a `ConfigError` for a setting out of its range."""

    #: Whether signs of features are determined, except by fall-back methods.
    knows_signs: bool = False
    #: Whether features come from moments of the gradient, for which Liu et al. state the order of the error.
    by_moments: bool = False

    @final
    def __call__(self, observation: Observation) -> RecoveredFeatures:
        """The input features of `model.feature_layer` after centering, up to order.

        Raises:
            UnsupportedModelError: see `layer_gradient`, or an activation that the method cannot use.
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
