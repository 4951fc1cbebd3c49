"""Further starts of gradient matching, for images that are not certified: together, some alone, or from elsewhere."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.base import AttackRun, Execution, SteppableAttack, put, unsolved
from lit_recon.attacks.updates.feature_maps.matching import MapMatching
from lit_recon.attacks.updates.feature_maps.patches import PatchMatching
from lit_recon.attacks.updates.feature_maps.top_down_matching import TopDownMatching
from lit_recon.attacks.updates.features.inputs import InputMatching
from lit_recon.attacks.updates.features.matching import FeatureMatching
from lit_recon.attacks.updates.gradient_matching.matching import Compilation, Matching
from lit_recon.attacks.updates.gradient_matching.objectives import Objective
from lit_recon.attacks.updates.gradient_matching.parametrizations import Parametrization, Pixels, Restart
from lit_recon.attacks.updates.gradient_matching.priors import BatchNormPrior, Part, Penalty
from lit_recon.attacks.updates.gradient_matching.solvers import LBFGS, Solver
from lit_recon.attacks.updates.gradient_matching.state import MatchingState, Problem, Within
from lit_recon.attacks.updates.labels.recovery import LabelRecovery
from lit_recon.records import Reconstruction
from lit_recon.solving import StepwiseLBFGS


class StartsSoFar(NamedTuple):
    """How far the further starts of some victims have come.

    Attributes:
        certified: how many images were certified at most.
        after: number of the start after which they were.
        begun: by victim, images with which a start has begun, or that it found then: no other one begins with them.
        going: victims whose last start began with the images found before.
    """

    certified: int = -1
    after: int = 0
    begun: Mapping[int, Tensor] = MappingProxyType({})
    going: frozenset[int] = frozenset()

    def then(self, found: list[Reconstruction], number: int) -> StartsSoFar:
        """The same once start `number` has found these."""
        certified = sum(one.n_certified for one in found)
        best = (certified, number) if certified > self.certified else (self.certified, self.after)
        return StartsSoFar(*best, {**self.begun, **{v: found[v].images for v in self.going}})

    def fresh(self, found: list[Reconstruction], victim: int) -> bool:
        """Whether no start has begun with the victim's images yet."""
        return victim not in self.begun or not torch.equal(self.begun[victim], found[victim].images)


class FurtherStarts(SteppableAttack[MatchingState]):
    """The starts that follow on the results of a first one, until all images are certified or none are left."""

    objective: Objective
    network_prior: BatchNormPrior | None
    parametrization: Parametrization
    solver: Solver
    labels: LabelRecovery
    features: FeatureMatching | InputMatching | MapMatching | PatchMatching | TopDownMatching | None
    restarts: int
    seed: int
    execution: Execution
    compilation: Compilation

    @abstractmethod
    def approach(self, steps: int, hidden: bool) -> SteppableAttack[MatchingState]:
        """Gradient matching from whose images a start may begin; `hidden`: not all entries of the update are known."""

    @property
    def _seeks_parts(self) -> bool:
        """Whether some images can be sought without the others: their loss depends on nothing else."""
        further = isinstance(self.features, PatchMatching) and self.features.further > 0
        free = not (self.objective.matches or self.network_prior or self.labels.can_optimize)
        return further and free and isinstance(self.solver, LBFGS) and isinstance(self.parametrization, Pixels)

    def _problem(
        self,
        restart: Restart,
        labels: Tensor,
        penalty: Penalty | None,
        start: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> Problem:
        """A restart that begins with images drawn by its seed or, but for those `drawn` `(n,)` bool, with `start`."""
        seen = restart.observation
        variables = self.parametrization.start(restart)
        if start is not None and isinstance(self.parametrization, Pixels):
            if drawn is not None:
                start = torch.where(drawn.view(-1, 1, 1, 1), self.parametrization.images(variables, restart), start)
            variables = self.parametrization.of(start, seen)
        if self.labels.optimizes(seen):
            generator = torch.Generator().manual_seed(restart.seed)
            variables["labels"] = self.labels.initial_logits(seen, generator).to(labels.device)
        for value in variables.values():
            value.requires_grad_()
        # an image conditioned on a feature is matched to the same feature
        optimizer = self.solver.optimizer(variables)
        return Problem(restart, labels, variables, optimizer, self.solver.optimizer, penalty, restart.features)

    def _part(self, restart: Restart, labels: Tensor, part: Part, found: Reconstruction, whole: Penalty) -> Problem:
        """A search for some images, from those found or from random ones."""
        images = found.images
        if part.drawn:
            images = self.parametrization.images(self.parametrization.start(restart), restart).detach()
        problem = self._problem(restart, labels, part.penalty, images[part.places])
        if not part.drawn and isinstance(self.solver, LBFGS):
            self._refine(problem)
            [moved] = problem.variables.values()
            problem.optimizer = StepwiseLBFGS(moved, self.solver.history)
        problem.within = Within(part.places, found.images, whole)
        return problem

    def _refine(self, problem: Problem) -> None:
        """Move the variables that are moved near the end from the beginning."""
        if self.parametrization.refines_at < 1:
            problem.move(self.parametrization.refined(problem.variables))

    def _state(self, problems: list[Problem], notes: list[tuple[str, ...]], counts: list[int]) -> MatchingState:
        seen = [problem.restart.observation for problem in problems]
        how = (self.labels.optimizes(seen[0]), self.execution, self.compilation)
        return MatchingState(problems, Matching(seen, self.objective, self.network_prior, *how), notes, counts)

    def _further(
        self, first: AttackRun, number: int, found: list[Reconstruction], progress: StartsSoFar
    ) -> AttackRun | None:
        """Further start `number`, from 1, for the victims of `first` with images not certified; None: there is none.

        Starts end once as many as are planned certified no other image.
        """
        maps, stuck = self.features, unsolved(found)
        progress = progress.then(found, number - 1)
        if not isinstance(maps, MapMatching | PatchMatching) or number > progress.after + maps.further or not stuck:
            return None
        going = {v for v in stuck if self._maps_of(first, v).goes_on(found[v], progress.fresh(found, v))}
        start = partial(self._start_again, first, number, found, progress._replace(going=frozenset(going)))
        if len(going) == len(stuck):
            return start(None)
        if not (number % 2 and maps.approach and isinstance(self.parametrization, Pixels)):
            return start(None)
        seen = [first.observations[v] for v in stuck]
        hidden = any(self._maps_of(first, v).partial for v in stuck)
        match = self.approach(maps.approach, hidden)
        run = match.begin(seen)
        return replace(
            run,
            observations=first.observations,
            compute=lambda: put(found, stuck, run.results()),
            victims=stuck,
            then=start,
        )

    def _start_again(
        self,
        first: AttackRun,
        number: int,
        found: list[Reconstruction],
        progress: StartsSoFar,
        near: list[Reconstruction] | None,
    ) -> AttackRun:
        """A further start from random images, those of `near` or those found, on the maps of all known layers."""
        stuck, problems, penalties, remarks, counts = unsolved(found), [], [], [], []
        assert isinstance(first.state, MatchingState)
        for v in stuck:
            before, whole = first.state.of_victims[v][0], self._maps_of(first, v)
            restart = before.restart._replace(seed=self.seed + self.restarts + number - 1)
            going = v in progress.going
            if self._seeks_parts and going and (parts := whole.parts(found[v], number)):
                problems += [self._part(restart, before.labels, part, found[v], whole) for part in parts]
                counts.append(len(parts))
                penalties.append(whole)
                sought = f"{sum(len(part.places) for part in parts)} of {len(found[v].images)} images"
                how = "from random ones" if parts[0].drawn else "each by itself from that found"
                remarks.append(f"further start {number}, {sought} {how}")
                continue
            penalty = whole.for_further_start(found[v], going)
            begun = found[v] if going else None if near is None else near[v]
            start = None if begun is None else begun.images[penalty.in_order(begun.images)]
            where = "those found" if going else "random images" if near is None else "images that match the gradient"
            drawn = penalty.misplaced(found[v]) if going else None
            some = f" but {int(drawn.sum())} that are not of the batch" if drawn is not None and drawn.any() else ""
            remarks.append(f"further start {number}, from {where}{some}")
            problems.append(self._problem(restart, before.labels, penalty, start, drawn))
            smoothed = penalty.prior_share(0.0) == 1  # at first, where scaled frequencies are faster
            if going and len(found[v].images) == 1 and penalty.refines and not smoothed:
                self._refine(problems[-1])
            if (kept := penalty.kept(found[v])) is not None:
                order = penalty.in_order(found[v].images)
                problems[-1].kept = (kept[order].view(-1, 1, 1, 1), found[v].images[order])
            penalties.append(penalty)
            counts.append(1)
        again = self._state(problems, [()] * len(stuck), counts)

        def compute() -> list[Reconstruction]:
            before = [found[v] for v in stuck]
            tried = zip(penalties, before, self.result(again), remarks, strict=True)
            return put(found, stuck, [_closer(penalty, old, new, how) for penalty, old, new, how in tried])

        return replace(
            first,
            compute=compute,
            state=again,
            advance=partial(self.advance, again),
            reasons=(),
            then=partial(self._further, first, number + 1, progress=progress),
            victims=stuck,
        )

    def _maps_of(self, run: AttackRun, victim: int) -> Penalty:
        assert isinstance(run.state, MatchingState)
        penalty = run.state.of_victims[victim][0].feature_penalty
        assert penalty is not None
        return penalty


def _closer(penalty: Penalty, before: Reconstruction, after: Reconstruction, what: str) -> Reconstruction:
    """The better one, with the notes that stand before the penalty's: on labels, and on attacks that do not apply."""
    better = penalty.closer(before, after, what)
    own = set(penalty.notes)
    first = next((i for i, note in enumerate(before.notes) if note in own), 0)
    kept = [note for note in before.notes[:first] if note not in better.notes]
    return replace(better, notes=(*kept, *better.notes))
