"""Attacks in order of strength: the first applicable one runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lit_recon.attacks.base import Attack, AttackRun, Way, put, unsolved
from lit_recon.attacks.updates.gradient_matching.matching import regrouped, update_distance
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Observation, Reconstruction


class FirstApplicable(Attack):
    """Tries attacks in order; each group of victims is attacked by the first that is applicable to its updates.

    Applicability is known before the first iteration and without the true images: feature maps that the gradient does
    not determine, a missing layer, missing knowledge. The notes of a reconstruction begin with why others do not apply.

    An attack with images that are not certified (`certified` false for some, `final` false; see `unsolved`) is followed
    by the next applicable one, which begins where it ended if it can (`Attack.follow`). Certified images stay. The
    others are replaced if the update of the batch is then closer to the observed one. If no next attack is applicable,
    all images stay, with a note. An attack that never certifies (`certified` None) is never followed.

    Args:
        attacks: two or more, none itself such a list, the strongest first. The error of the last one is raised where
            none is applicable, or where its `check` or `rehearse` says before the first iteration what it lacks.
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
        return self._begin(0, None, observations, execution)

    def _begin(
        self,
        first: int,
        found: list[Reconstruction] | None,
        observations: Sequence[Observation],
        execution: Way | None,
    ) -> AttackRun:
        """The first applicable attack from number `first` on, counted from 0; `found`: by the one before."""

        def begun(attack: Attack) -> AttackRun:
            return (
                attack.begin(observations, execution)
                if found is None
                else attack.follow(found, observations, execution)
            )

        reasons: dict[str, list[str]] = {}
        for number, attack in enumerate(self.attacks[first:-1], start=first):
            try:
                run = begun(attack)
            except (UnsupportedModelError, ThreatModelError) as error:
                reasons.setdefault(str(error), []).append(str(number + 1))
                continue
            then = partial(self._followed_by_next, number, run, execution)
            return replace(run, reasons=self._told(reasons), then=then)
        return replace(begun(self.last), reasons=self._told(reasons))

    def _told(self, reasons: Mapping[str, list[str]]) -> tuple[str, ...]:
        """Why attacks are not applicable, by their numbers; attacks with the same reason together."""
        return tuple(
            f"attack{'s' * (len(numbers) > 1)} {' and '.join(numbers)} of {len(self.attacks)} not applicable: {reason}"
            for reason, numbers in reasons.items()
        )

    def _followed_by_next(
        self, number: int, run: AttackRun, execution: Way | None, found: list[Reconstruction]
    ) -> AttackRun | None:
        """What follows on the results of attack `number`: its own further runs, then the next attack."""
        following = run.then(found)
        if following is not None:
            return replace(following, then=partial(self._followed_by_next, number, following, execution))
        stuck = unsolved(found)
        if not stuck:
            return None
        own = [found[v] for v in stuck]
        try:
            other = self._begin(number + 1, own, [run.observations[v] for v in stuck], execution)
        except (UnsupportedModelError, ThreatModelError) as error:
            why = f"no further attack of {len(self.attacks)} is applicable: {error}"
            kept = [replace(one, notes=(*one.notes, why)) for one in own]
            return AttackRun(run.observations, lambda: put(found, stuck, kept))
        return _tried(run.observations, found, stuck, other, f"attack {number + 2} of {len(self.attacks)}")

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        return self.begin(observations).finish()

    def rehearse(self, observations: Sequence[Observation]) -> None:
        """Rehearse the last attack, or another one where that is not applicable; the error of the last if none is.

        Which ones are applicable depends on updates of the trained model.
        """
        self.check(observations)
        try:
            return self.last.rehearse(observations)
        except UnsupportedModelError as error:
            for attack in self.attacks[:-1]:
                with contextlib.suppress(UnsupportedModelError, ThreatModelError):
                    return attack.rehearse(observations)
            raise error

    @property
    def planned_steps(self) -> int:
        return self.attacks[0].planned_steps

    @property
    def recovers_features(self) -> bool:
        return all(attack.recovers_features for attack in self.attacks)

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        return {path: seen for attack in self.attacks for path, seen in attack.training_images.items()}


def _tried(
    observations: Sequence[Observation], found: list[Reconstruction], stuck: list[int], run: AttackRun, name: str
) -> AttackRun:
    """The run of another attack on the victims `stuck`, and after it a choice between its results and `found`."""

    def choose(theirs: list[Reconstruction]) -> list[Reconstruction]:
        pairs = zip(stuck, theirs, strict=True)
        return put(found, stuck, [_better(observations[v], found[v], other, name) for v, other in pairs])

    def then(reached: list[Reconstruction]) -> AttackRun:
        theirs = [reached[v] for v in stuck]
        following = run.then(theirs)
        if following is not None:
            return _tried(observations, found, stuck, following, name)
        return AttackRun(observations, partial(choose, theirs))

    return replace(
        run,
        observations=observations,
        compute=lambda: put(found, stuck, run.results()),
        reasons=(),
        then=then,
        victims=stuck if run.victims is None else [stuck[i] for i in run.victims],
    )


def _better(seen: Observation, ours: Reconstruction, theirs: Reconstruction, name: str) -> Reconstruction:
    """`ours`, with images of `theirs` for those that are not certified if that explains the update better."""
    from scipy.optimize import linear_sum_assignment

    assert ours.certified is not None
    certified = ours.certified.to(ours.images.device)
    # their versions of the certified images are left out, the others come in any order
    apart = torch.cdist(ours.images[certified].flatten(1), theirs.images.flatten(1))
    same = torch.as_tensor(linear_sum_assignment(apart.cpu().numpy())[1], device=certified.device)
    others = torch.ones_like(certified)
    others[same] = False
    images, labels, known = ours.images.clone(), ours.labels.clone(), certified.clone()
    images[~certified], labels[~certified] = theirs.images[others], theirs.labels[others].to(labels)
    if theirs.certified is not None:
        known[~certified] = theirs.certified[others].to(known)
    # the places of the others are those of the images that they replace, perhaps of another client
    order = regrouped(seen, images, labels, True, 0)
    images, labels, known = images[order], labels[order], known[order]
    pairs = ((ours.images, ours.labels), (images, labels))
    before, after = (update_distance(seen, *pair, observed_only=True) for pair in pairs)
    what = f"{name} was tried for {int((~certified).sum())} of {len(certified)} images"
    if not after < before:
        why = f"its images are left out, the update is no closer with them (1 - cos {after:.2g}, without {before:.2g})"
        return replace(ours, notes=(*ours.notes, f"{what}: {why}"))
    why = f"its images are taken, the update is closer with them (1 - cos {after:.2g}, without {before:.2g})"
    place = order.argsort()
    kept = dict(zip(certified.nonzero()[:, 0].tolist(), place[certified].tolist(), strict=True))
    taken = dict(zip(others.nonzero()[:, 0].tolist(), place[~certified].tolist(), strict=True))
    notes = (*renumbered(ours.notes, kept), f"{what}: {why}", *renumbered(theirs.notes, taken))
    return replace(ours, images=images, labels=labels, loss=theirs.loss, certified=known, notes=notes)


def renumbered(notes: Iterable[str], places: Mapping[int, int]) -> list[str]:
    """Notes with the new places of the images that they begin with; without those on images that have none.

    >>> renumbered(["image 2: not certified", "image 1: not certified", "one more"], {1: 0})
    ['image 1: not certified', 'one more']
    """
    found = []
    for note in notes:
        start = re.match(r"image (\d+): ", note)
        if start is None:
            found.append(note)
        elif (place := places.get(int(start[1]) - 1)) is not None:
            found.append(f"image {place + 1}: {note[start.end() :]}")
    return found
