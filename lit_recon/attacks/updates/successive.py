"""Attacks one after the other, each from the images of the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from lit_recon.attacks.base import Attack, AttackRun, Way
from lit_recon.attacks.updates.gradient_matching.attack import GradientMatching
from lit_recon.attacks.updates.gradient_matching.parametrizations import Pixels
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Observation, Reconstruction


class Successive(Attack):
    """Runs gradient matchings in order: the first starts as usual, each other from the images of the one before.

    An attack that is not applicable to the updates is left out, and a note says why. The images are those of the last
    one that ran.

    Args:
        attacks: two or more; all but the first optimize pixels.
    """

    def __init__(self, attacks: list[GradientMatching]) -> None:
        if len(attacks) < 2:
            raise ConfigError(f"Successive needs two or more attacks; got {len(attacks)}: give a single one directly")
        if not all(isinstance(attack.parametrization, Pixels) for attack in attacks[1:]):
            raise ConfigError("Successive starts from images, which needs the parametrization Pixels after the first")
        self.attacks = attacks

    def check(self, observations: Sequence[Observation]) -> None:
        super().check(observations)
        self.attacks[-1].check(observations)

    def begin(self, observations: Sequence[Observation], execution: Way | None = None) -> AttackRun:
        self.check(observations)
        run = self._begin(0, observations, execution, None)
        assert run is not None
        return run

    def _begin(
        self, first: int, observations: Sequence[Observation], execution: Way | None, near: list[Reconstruction] | None
    ) -> AttackRun | None:
        """The first applicable attack from number `first` on; None if there is none but images are found."""
        reasons: list[str] = []
        for number, attack in enumerate(self.attacks[first:], start=first):
            try:
                run = attack.begin_near(observations, near, execution)
            except (UnsupportedModelError, ThreatModelError) as error:
                if near is None and number == len(self.attacks) - 1:
                    raise
                reasons.append(f"stage {number + 1} of {len(self.attacks)} left out: {error}")
                continue
            return self._noted(run, number, execution, near, tuple(reasons))
        if near is None or not reasons:
            return None
        found = [replace(one, notes=(*one.notes, *reasons)) for one in near]
        return AttackRun(observations, lambda: found)

    def _noted(
        self,
        run: AttackRun,
        number: int,
        execution: Way | None,
        near: list[Reconstruction] | None,
        reasons: tuple[str, ...],
    ) -> AttackRun:
        """The run of attack `number`, with the notes of those before, and what follows it."""

        def compute() -> list[Reconstruction]:
            before = [()] * len(run.observations) if near is None else [one.notes for one in near]
            return [
                replace(one, notes=(*notes, *reasons, *one.notes))
                for one, notes in zip(run.compute(), before, strict=True)
            ]

        def then(found: list[Reconstruction]) -> AttackRun | None:
            following = run.then(found)
            if following is not None:
                return self._noted(following, number, execution, None, ())
            return self._begin(number + 1, run.observations, execution, found)

        return replace(run, compute=compute, then=then)

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        return self.begin(observations).finish()

    def rehearse(self, observations: Sequence[Observation]) -> None:
        """Rehearse the last attack: whether others are applicable depends on updates of the trained model."""
        self.check(observations)
        self.attacks[-1].rehearse(observations)

    @property
    def planned_steps(self) -> int:
        return self.attacks[0].planned_steps

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        return {path: seen for attack in self.attacks for path, seen in attack.training_images.items()}
