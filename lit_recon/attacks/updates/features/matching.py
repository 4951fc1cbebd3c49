"""Feature matching in gradient matching: a penalty on candidate images with other than the recovered features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.layer import FeatureRecovery, RecoveredFeatures
from lit_recon.attacks.updates.gradient_matching.priors import Penalty
from lit_recon.clients.aggregate import normalized_apart
from lit_recon.clients.gradient import pure_copy
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.records import BatchNormMode, Observation


class FeatureTerm(ABC):
    """A penalty on the features of candidate images, 0 for the recovered ones.

    Args:
        weight: multiplies the penalty, at least 0; chosen by the attack's loss only.
        start: share of the iterations before the penalty starts, in [0, 1).
    """

    def __init__(self, weight: float, start: float = 0.0) -> None:
        if weight < 0 or not 0 <= start < 1:
            raise ConfigError(
                f"{type(self).__name__} needs weight >= 0 and start in [0, 1); got {weight:g} and {start:g}"
            )
        self.weight, self.start = weight, start

    def check(self, recovered: RecoveredFeatures) -> None:  # noqa: B027 - most terms take any recovery
        """Raise a `ConfigError` for a recovery that the term cannot use; nothing by default."""

    def unsigned(self) -> FeatureTerm:
        """The term to use if a recovery did not determine the signs of its features."""
        return self

    @abstractmethod
    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        """Unweighted penalty, a scalar, of candidate features `(n, d)`; `targets` as of `targets_for`."""

    def targets_for(self, recovered: RecoveredFeatures, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """Recovered features `(n, d)` in the order of the candidates; see `assigned`."""
        return assigned(recovered, features, labels)


class SquaredCosine(FeatureTerm):
    """Mean over examples of 1 - cos^2: independent of the sign of a feature, which moments do not determine.

    Features of the opposite sign are a minimum too, which candidates that start near it do not leave: if the sign is
    known, use `SignedCosine`. Source: [Liu2025], section 4 (feature regularizer).
    """

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        return 1 - nn.functional.cosine_similarity(features, targets, dim=1).square().mean()


class SignedCosine(FeatureTerm):
    """Mean over examples of 1 - cos, for features of known sign."""

    def check(self, recovered: RecoveredFeatures) -> None:
        if not recovered.signed:
            raise ConfigError(
                f"SignedCosine needs features of known sign; the method {recovered.method!r} does not determine it: "
                "recover with ExactRecovery, or match with SquaredCosine"
            )

    def unsigned(self) -> FeatureTerm:
        return SquaredCosine(self.weight, self.start)

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        return 1 - nn.functional.cosine_similarity(features, targets, dim=1).mean()


class SubspaceDistance(FeatureTerm):
    """Mean over examples of the squared share of a feature outside the span, for features that cannot be separated."""

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        unit = nn.functional.normalize(features, dim=1)
        return (unit - unit @ targets @ targets.T).square().sum(dim=1).mean()

    def targets_for(self, recovered: RecoveredFeatures, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """The orthonormal basis `(d, r)` of the span, for all candidates."""
        return recovered.span.to(features)


def assigned(recovered: RecoveredFeatures, features: Tensor, labels: Tensor | None = None) -> Tensor:
    """Recovered features `(n, d)` in the order of candidates with features `(n, d)` and perhaps known labels `(n,)`.

    Maximizes the sum of cosines, or of |cos| if signs are unknown; candidates with labels are first assigned features
    of the same label. Candidates beyond the number of recovered features take the most similar one.
    """
    from scipy.optimize import linear_sum_assignment

    found = recovered.features.to(features)
    cosines = nn.functional.normalize(features.detach(), dim=1) @ nn.functional.normalize(found, dim=1).T
    likeness = cosines if recovered.signed else cosines.abs()
    if labels is not None and recovered.labels is not None:
        # larger than any difference of cosines: labels take precedence
        likeness = likeness + 3.0 * (labels[:, None] == recovered.labels.to(labels.device)[None, :])
    choice = likeness.argmax(dim=1)
    rows, columns = linear_sum_assignment(-likeness.cpu().numpy())
    choice[torch.from_numpy(rows)] = torch.from_numpy(columns).to(choice)
    return found[choice]


class FeatureMap:
    """Features of candidate images at the input of the wide feature layer, `(n, d)` of unit norm, differentiable.

    Uses the observation's parameters and buffers; `batch_norm` is the mode of BatchNorm layers in the client. Every
    client and every mini-batch has statistics of its own equal share of the images, in order. A model without a wide
    feature layer raises an `UnsupportedModelError`.
    """

    def __init__(self, observation: Observation, batch_norm: BatchNormMode = "eval") -> None:
        if not isinstance(observation.model, Backbone) or observation.model.feature_layer is None:
            raise UnsupportedModelError(
                "matching features needs a Backbone with a wide feature layer: build it with "
                "feature_layer=WideFeatureLayer(...), or drop the feature term"
            )
        self._module = _Directions(pure_copy(observation.model, batch_norm))
        public = {**observation.parameters, **observation.buffers}
        self._public = {f"model.{name}": value for name, value in public.items()}
        self._parts = normalized_apart(observation, batch_norm)

    def __call__(self, images: Tensor) -> Tensor:
        """Features of images `(n, c, h, w)` in [0, 1]."""
        shares = images.split(max(1, len(images) // self._parts))
        return torch.cat([torch.func.functional_call(self._module, self._public, (share,)) for share in shares])


class _Directions(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        directions: Tensor = self.model.feature_layer.directions(self.model.features(images))  # type: ignore[operator, union-attr]
        return directions


@dataclass(frozen=True)
class FeaturePenalty(Penalty):
    """The feature penalty for one victim.

    `weights` are those of the penalty, one per restart in turn; none: that of the term. `notes` tell what was found.
    """

    recovered: RecoveredFeatures
    features_of: FeatureMap
    term: FeatureTerm
    weights: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def start(self) -> float:
        """Share of the iterations before the penalty starts."""
        return self.term.start

    @property
    def features(self) -> Tensor:
        """The recovered features `(r, d)`, by which the attack is scored."""
        return self.recovered.features

    @property
    def known_labels(self) -> Tensor | None:
        """The labels of exact features."""
        return self.recovered.labels if self.recovered.exact else None

    def certificate(self, images: Tensor, labels: Tensor) -> tuple[None, bool, tuple[str, ...]]:
        """No certificate, and a note on the weight of the returned restart, if several were tried."""
        if not self.weights:
            return None, False, ()
        tried = ", ".join(f"{weight:g}" for weight in self.weights)
        return None, False, (f"of the feature weights {tried}, {self.term.weight:g} matched the gradient best",)

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """The recovered features in the order of candidate images `(n, c, h, w)`; called once."""
        return self.term.targets_for(self.recovered, self.features_of(images.detach()), labels).to(images)

    def condition(self, labels: Tensor) -> Tensor:
        """One recovered feature `(n, d)` per candidate, of its label `(n,)` if the recovery found labels."""
        undecided = torch.zeros(len(labels), self.recovered.features.shape[1], device=labels.device)
        return assigned(self.recovered, undecided, labels)

    def for_restart(self, number: int) -> FeaturePenalty:
        """The penalty of one restart, counted from 0."""
        if not self.weights:
            return self
        term = copy(self.term)
        term.weight = self.weights[number % len(self.weights)]
        return replace(self, term=term)

    def penalty(self, images: Tensor, targets: Tensor, progress: float) -> Tensor:
        """Weighted penalty of candidate images `(n, c, h, w)`, a differentiable scalar."""
        return self.term.weight * self.term(self.features_of(images), targets)


class FeatureMatching:
    """Recovers features once per victim and penalizes candidates with other features.

    Args:
        recovery: computes features from the gradients of the wide layer and its head.
        term: the penalty.
        weights: weights to try instead of the term's, at least 0, one per restart in turn. The attack returns the
            restart that matches the gradient best, without any penalty. A weight of 0 runs a restart without features.

    Source: [Liu2025], section 4.
    """

    def __init__(
        self,
        recovery: FeatureRecovery | None = None,
        term: FeatureTerm | None = None,
        weights: list[float] | None = None,
    ) -> None:
        self.recovery = recovery if recovery is not None else ExactRecovery()
        self.term = term if term is not None else SquaredCosine(weight=1.0)
        self.weights = tuple(weights or ())
        if any(weight < 0 for weight in self.weights):
            raise ConfigError(f"FeatureMatching needs weights of at least 0; got {weights}")

    def prepare(self, observation: Observation) -> FeaturePenalty:
        """Recover a victim's features; errors as for `FeatureRecovery` and `FeatureTerm.check`."""
        recovered = self.recovery(observation)
        term = self.term
        if self.recovery.knows_signs and not recovered.signed and (term := self.term.unsigned()) is not self.term:
            lost = f"their signs are unknown, so {type(term).__name__} replaces {type(self.term).__name__}"
            recovered = replace(recovered, notes=(*recovered.notes, lost))
        term.check(recovered)
        how = f"{len(recovered.features)} features recovered from the wide layer's gradient by {recovered.method}"
        if recovered.certificate is not None:
            how += f", certificate {recovered.certificate:.1g} ({'holds' if recovered.exact else 'does not hold'})"
        seen = FeatureMap(observation, observation.operator.batch_norm)
        return FeaturePenalty(recovered, seen, term, self.weights, (how, *recovered.notes))
