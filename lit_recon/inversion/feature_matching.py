"""Feature matching as a part of gradient matching: recovered features pull candidate images towards theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_recon.errors import ConfigError
from lit_recon.inversion.features import (
    ExactRecovery,
    FeatureMap,
    FeatureRecovery,
    FeatureTerm,
    RecoveredFeatures,
    SquaredCosine,
    assigned,
)
from lit_recon.records import Observation


@dataclass(frozen=True)
class Pull:
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

    def of_restart(self, number: int) -> Pull:
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

    def prepare(self, observation: Observation) -> Pull:
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
        return Pull(recovered, FeatureMap(observation, observation.operator.batch_norm), term, self.weights)
