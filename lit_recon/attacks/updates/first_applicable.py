"""Attacks in order of strength: each victim gets the first one that can work on its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates.gradient_matching.attack import GradientMatching, MatchingState
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Observation, Reconstruction


class Chosen(NamedTuple):
    """The attack that works on some observations.

    Attributes:
        attack: itself.
        reasons: why those before it cannot.
        state: at its first iteration, where finding out took labels and features; it may go on from there.
    """

    attack: Attack
    reasons: tuple[str, ...]
    state: MatchingState | None = None


class FirstApplicable(Attack):
    """Try attacks in order; one that says that it cannot work on an update makes way for the next.

    What an attack refuses is known before its first iteration and without the truth: maps that are not in the gradient,
    a layer that is missing, knowledge that is not granted. The last attack is expected to work on anything.

    Args:
        attacks: two or more, the strongest first.

    Raises:
        ConfigError: fewer than two attacks, or one that is itself a list.
    """

    def __init__(self, attacks: list[Attack]) -> None:
        if len(attacks) < 2 or any(isinstance(attack, FirstApplicable) for attack in attacks):
            raise ConfigError(
                f"FirstApplicable needs two or more attacks, none of them another FirstApplicable; got {len(attacks)}: "
                "give the attack itself where there is one"
            )
        self.attacks = attacks

    @property
    def last(self) -> Attack:
        """The attack that has to work on anything."""
        return self.attacks[-1]

    def check(self, observations: Sequence[Observation]) -> None:
        """Refuse what the last attack cannot work on, see `Attack.check`."""
        super().check(observations)
        self.last.check(observations)

    def chosen(self, observations: Sequence[Observation]) -> Chosen:
        """The first attack that can work on these observations."""
        reasons: list[str] = []
        for attack in self.attacks[:-1]:
            try:
                attack.check(observations)
                state = attack.init(observations) if isinstance(attack, GradientMatching) else None
            except (UnsupportedModelError, ThreatModelError) as error:
                reasons.append(f"attack {len(reasons) + 1} of {len(self.attacks)} made way: {error}")
            else:
                return Chosen(attack, tuple(reasons), state)
        return Chosen(self.last, tuple(reasons))

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        """The chosen attack, whose notes begin with why others made way."""
        attack, reasons, state = self.chosen(observations)
        if isinstance(attack, GradientMatching) and state is not None:
            results = attack.finish(state)
        else:
            results = attack.run(observations)
        return [remarked(result, reasons) for result in results]


def remarked(result: Reconstruction, reasons: tuple[str, ...]) -> Reconstruction:
    """A reconstruction whose notes begin with why other attacks made way."""
    return replace(result, notes=(*reasons, *result.notes))
