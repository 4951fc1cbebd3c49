"""Attacks in order of strength: the first applicable one runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from lit_recon.attacks.base import Attack, AttackRun, Way
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Observation, Reconstruction


class FirstApplicable(Attack):
    """Tries attacks in order; each group of victims is attacked by the first that is applicable to its updates.

    Applicability is known before the first iteration and without the true images: feature maps that the gradient does
    not determine, a missing layer, missing knowledge. The notes of a reconstruction begin with why others do not apply.

    Args:
        attacks: two or more, none itself such a list, the strongest first; the last must always be applicable.
    """

    def __init__(self, attacks: list[Attack]) -> None:
        if len(attacks) < 2 or any(isinstance(attack, FirstApplicable) for attack in attacks):
            raise ConfigError(
                f"FirstApplicable needs two or more attacks, none of them another FirstApplicable; got {len(attacks)}: "
                "give a single attack directly"
            )
        self.attacks, self.last = attacks, attacks[-1]

    def check(self, observations: Sequence[Observation]) -> None:
        super().check(observations)
        self.last.check(observations)

    def begin(self, observations: Sequence[Observation], execution: Way | None = None) -> AttackRun:
        self.check(observations)
        reasons: list[str] = []
        for attack in self.attacks[:-1]:
            try:
                return replace(attack.begin(observations, execution), reasons=tuple(reasons))
            except (UnsupportedModelError, ThreatModelError) as error:
                reasons.append(f"attack {len(reasons) + 1} of {len(self.attacks)} not applicable: {error}")
        return replace(self.last.begin(observations, execution), reasons=tuple(reasons))

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        return self.begin(observations).finish()

    def rehearse(self, observations: Sequence[Observation]) -> None:
        """Rehearse the last attack: whether others are applicable depends on updates of the trained model."""
        self.check(observations)
        self.last.rehearse(observations)

    @property
    def planned_steps(self) -> int:
        return self.attacks[0].planned_steps

    @property
    def recovers_features(self) -> bool:
        return all(attack.recovers_features for attack in self.attacks)

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        return {path: seen for attack in self.attacks for path, seen in attack.training_images.items()}
