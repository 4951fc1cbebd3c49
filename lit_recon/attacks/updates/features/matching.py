"""Feature matching as a part of gradient matching: recovered features pull candidate images towards theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.recovery import FeatureRecovery, RecoveredFeatures
from lit_recon.clients.gradient import BatchNormMode, pure_copy
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.records import Observation


class FeatureTerm(ABC):
    """A penalty on the features of candidate images, 0 where they are the recovered ones.

    Args:
        weight: multiplies the penalty; chosen by attacker-visible loss only.
        start: share of the iterations after which the penalty sets in.

    Raises:
        ConfigError: a negative weight, or a start outside [0, 1).
    """

    def __init__(self, weight: float, start: float = 0.0) -> None:
        if weight < 0 or not 0 <= start < 1:
            raise ConfigError(
                f"{type(self).__name__} needs weight >= 0 and start in [0, 1); got {weight:g} and {start:g}"
            )
        self.weight, self.start = weight, start

    def check(self, recovered: RecoveredFeatures) -> None:  # noqa: B027 - most terms take any recovery
        """Refuse a recovery that the term cannot use; nothing by default.

        Raises:
            ConfigError: see the class.
        """

    def weighing(self, weight: float) -> FeatureTerm:
        """The same term with another weight."""
        other = copy(self)
        other.weight = weight
        return other

    def unsigned(self) -> FeatureTerm:
        """The term to use where a recovery that usually knows the sign of its features has lost it."""
        return self

    @abstractmethod
    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        """Unweighted penalty, a scalar, of candidate features `(n, d)` for targets: see `targets_for`."""

    def targets_for(self, recovered: RecoveredFeatures, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """Recovered features `(n, d)` in the order of the candidates; see `assigned`."""
        return assigned(recovered, features, labels)


class SquaredCosine(FeatureTerm):
    """Mean over examples of 1 - cos^2: blind to the sign of a feature, which moments cannot tell.

    Mirrored features are a minimum too, and a candidate that starts on the wrong side stays there: where the sign is
    known, `SignedCosine` has one minimum only.

    Source: [Liu2025], section 4 (feature regularizer).
    """

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        return 1 - nn.functional.cosine_similarity(features, targets, dim=1).square().mean()


class SignedCosine(FeatureTerm):
    """Mean over examples of 1 - cos, for a recovery that knows the sign of its features."""

    def check(self, recovered: RecoveredFeatures) -> None:
        if not recovered.signed:
            raise ConfigError(
                f"SignedCosine needs features of known sign; the method {recovered.method!r} leaves it open: "
                "recover with ExactRecovery, or match with SquaredCosine"
            )

    def unsigned(self) -> FeatureTerm:
        return SquaredCosine(self.weight, self.start)

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        return 1 - nn.functional.cosine_similarity(features, targets, dim=1).mean()


class SubspaceDistance(FeatureTerm):
    """Mean over examples of the squared share of a feature outside the recovered span.

    For batches whose features cannot be told apart, as with shared labels, but whose span is known well.
    """

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        unit = nn.functional.normalize(features, dim=1)
        return (unit - unit @ targets @ targets.T).square().sum(dim=1).mean()

    def targets_for(self, recovered: RecoveredFeatures, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """The orthonormal basis `(d, r)`: no candidate has a feature of its own."""
        return recovered.span.to(features)


def assigned(recovered: RecoveredFeatures, features: Tensor, labels: Tensor | None = None) -> Tensor:
    """Recovered features `(n, d)` in the order of candidates with features `(n, d)`.

    The greatest total of cosines, or of |cos| where signs are unknown; candidates with labels first take recovered
    features of the same label. Candidates beyond the number of recovered features share the most similar one.

    Args:
        recovered: at least one feature.
        features: of the candidates, e.g. of their starting images.
        labels: `(n,)` of the candidates; None: unknown.
    """
    from scipy.optimize import linear_sum_assignment

    found = recovered.features.to(features)
    cosines = nn.functional.normalize(features.detach(), dim=1) @ nn.functional.normalize(found, dim=1).T
    likeness = cosines if recovered.signed else cosines.abs()
    if labels is not None and recovered.labels is not None:
        # beyond any difference of cosines: a label decides
        likeness = likeness + 3.0 * (labels[:, None] == recovered.labels.to(labels.device)[None, :])
    choice = likeness.argmax(dim=1)
    rows, columns = linear_sum_assignment(-likeness.cpu().numpy())
    choice[torch.from_numpy(rows)] = torch.from_numpy(columns).to(choice)
    return found[choice]


class FeatureMap:
    """Features of candidate images as the wide feature layer of an observed model sees them, `(n, d)` of unit norm.

    Differentiable in the images; reads parameters and buffers from the observation.

    Args:
        observation: of a model with a wide feature layer.
        batch_norm: mode of BatchNorm layers, as in the client.

    Raises:
        UnsupportedModelError: no wide feature layer.
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

    def __call__(self, images: Tensor) -> Tensor:
        """Features of images `(n, c, h, w)` in [0, 1]."""
        features: Tensor = torch.func.functional_call(self._module, self._public, (images,))
        return features


class _Directions(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        directions: Tensor = self.model.feature_layer.directions(self.model.features(images))  # type: ignore[operator, union-attr]
        return directions


@dataclass(frozen=True)
class FeaturePenalty:
    """What pulls the candidates of one victim.

    Attributes:
        recovered: the victim's features.
        features_of: candidate images to their features.
        term: the penalty.
        weights: of the penalty, which restarts take in turn; none: that of the term.
    """

    recovered: RecoveredFeatures
    features_of: FeatureMap
    term: FeatureTerm
    weights: tuple[float, ...] = ()

    @property
    def start(self) -> float:
        """Share of the iterations after which the penalty sets in."""
        return self.term.start

    @property
    def features(self) -> Tensor:
        """The recovered features `(r, d)`, by which the attack is scored."""
        return self.recovered.features

    @property
    def notes(self) -> tuple[str, ...]:
        """How the features were found, and whether their certificate holds."""
        found = self.recovered
        how = f"{len(found.features)} features recovered from the wide layer's gradient by {found.method}"
        if found.certificate is not None:
            how += f", certificate {found.certificate:.1g} ({'holds' if found.exact else 'does not hold'})"
        return (how, *found.notes)

    @property
    def choice(self) -> tuple[str, ...]:
        """Of the restart that is returned: which weight it had, where several were tried."""
        if not self.weights:
            return ()
        tried = ", ".join(f"{weight:g}" for weight in self.weights)
        return (f"of the feature weights {tried} the gradient was matched best with {self.term.weight:g}",)

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """The recovered features in the order of candidate images `(n, c, h, w)`; to be fixed from then on."""
        return self.term.targets_for(self.recovered, self.features_of(images.detach()), labels).to(images)

    def condition(self, labels: Tensor) -> Tensor:
        """One recovered feature `(n, d)` for every candidate, of its label `(n,)` where the recovery knows labels."""
        undecided = torch.zeros(len(labels), self.recovered.features.shape[1], device=labels.device)
        return assigned(self.recovered, undecided, labels)

    def for_restart(self, number: int) -> FeaturePenalty:
        """What pulls the candidates of one restart, counted from 0."""
        if not self.weights:
            return self
        return replace(self, term=self.term.weighing(self.weights[number % len(self.weights)]))

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """The labels as they are: candidates had them from the start."""
        return labels

    def penalty(self, images: Tensor, targets: Tensor) -> Tensor:
        """Weighted penalty of candidate images `(n, c, h, w)`, a scalar that is differentiable in them."""
        return self.term.weight * self.term(self.features_of(images), targets)


class FeatureMatching:
    """Recovers features once per victim and penalizes candidates that have others.

    Args:
        recovery: how features are computed from the gradient of the wide layer and its head.
        term: the penalty, with its weight and the share of iterations after which it sets in.
        weights: weights to be tried instead of the term's, one per restart in turn. Of all restarts the attack returns
            the one that matches the gradient best, without any penalty: a search by what an attacker sees. A weight of
            0 lets it do without features where they mislead.

    Raises:
        ConfigError: a negative weight.

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
        """Recover a victim's features.

        Raises:
            UnsupportedModelError, ThreatModelError: see `FeatureRecovery`.
            ConfigError: the term cannot use what the recovery finds.
        """
        recovered = self.recovery(observation)
        term = self.term
        if self.recovery.knows_signs and not recovered.signed:
            term = self.term.unsigned()
            if term is not self.term:
                lost = f"their signs are lost, so that {type(term).__name__} stands in for {type(self.term).__name__}"
                recovered = replace(recovered, notes=(*recovered.notes, lost))
        term.check(recovered)
        return FeaturePenalty(recovered, FeatureMap(observation, observation.operator.batch_norm), term, self.weights)
