"""Gradient matching: optimize candidate images until their update equals the observed one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lit_recon.attacks.base import AttackRun, Execution, SteppableAttack, Way, put, unsolved
from lit_recon.attacks.updates.feature_maps.matching import MapMatching
from lit_recon.attacks.updates.feature_maps.patches import PatchMatching
from lit_recon.attacks.updates.features.inputs import InputMatching
from lit_recon.attacks.updates.features.matching import FeatureMatching
from lit_recon.attacks.updates.gradient_matching.matching import Compilation, Matching
from lit_recon.attacks.updates.gradient_matching.objectives import GlobalCosine, Objective, Observed
from lit_recon.attacks.updates.gradient_matching.parametrizations import Parametrization, Pixels, Restart
from lit_recon.attacks.updates.gradient_matching.priors import (
    BatchNormPrior,
    GroupConsistency,
    Penalty,
    Prior,
    TotalVariation,
)
from lit_recon.attacks.updates.gradient_matching.solvers import Adam, Ended, Solver, TwoStages
from lit_recon.attacks.updates.gradient_matching.state import MatchingState, Problem
from lit_recon.attacks.updates.labels.head import require_magnitudes
from lit_recon.attacks.updates.labels.recovery import HeadCounts, LabelRecovery
from lit_recon.errors import ConfigError
from lit_recon.records import Observation, Reconstruction


class GradientMatching(SteppableAttack[MatchingState]):
    """Minimizes objective(update of the candidate, observed update) + priors over candidate images.

    Args:
        objective: distance between updates.
        priors: penalties on images or on BatchNorm statistics.
        parametrization: the variables of the optimization.
        solver: of the optimization.
        labels: recovery of the batch's labels.
        features: matches features of a wide layer, or input maps or patches of convolutions; default: none.
        steps: iterations.
        restarts: independent starts per victim; the one with the least matching loss is returned.
        keep: return the `last` iterate of a restart, or the `best` by total loss.
        execution: problems one after the other (`loop`), together (`vmap`), or whichever is measured to be faster
            (`auto`). The two differ by rounding: fix one for bitwise repeatable runs.
        compilation: `torch.compile` mode of the derivative; takes minutes before the first iteration on a CPU.
        seed: of the first restart; restart i uses `seed + i`.
        log_every: iterations between two points of the loss curve; default: 200 points a run.

    Source: [Zhu2019], [Geiping2020], [Yin2021], [Liu2025] for the settings under configs/attack.
    """

    def __init__(
        self,
        objective: Objective | None = None,
        priors: list[Prior | BatchNormPrior] | None = None,
        parametrization: Parametrization | None = None,
        solver: Solver | None = None,
        labels: LabelRecovery | None = None,
        features: FeatureMatching | InputMatching | MapMatching | PatchMatching | None = None,
        steps: int = 4800,
        restarts: int = 1,
        keep: Literal["last", "best"] = "last",
        execution: Execution = "auto",
        compilation: Compilation = "none",
        seed: int = 0,
        log_every: int | None = None,
    ) -> None:
        if steps < 1 or restarts < 1 or (log_every is not None and log_every < 1):
            raise ConfigError(
                "GradientMatching needs steps, restarts and log_every of at least 1; "
                f"got {steps}, {restarts}, {log_every}"
            )
        self.objective, self.priors = objective or GlobalCosine(), priors or []
        self.image_priors = [prior for prior in self.priors if isinstance(prior, Prior)]
        on_network = [prior for prior in self.priors if isinstance(prior, BatchNormPrior)]
        if len(on_network) > 1:
            raise ConfigError(f"an attack takes at most one BatchNormPrior; got {len(on_network)}")
        self.network_prior = on_network[0] if on_network else None
        self.parametrization, self.solver = parametrization or Pixels(), solver or Adam()
        schedule, narrows_at = self.solver.schedule, self.parametrization.narrows_at
        if isinstance(schedule, TwoStages) and schedule.switch != narrows_at:
            raise ConfigError(
                f"TwoStages switches at {schedule.switch:g} of the iterations, the parametrization at {narrows_at:g}: "
                "give both the same share, or another schedule"
            )
        self.labels, self.features = labels or HeadCounts(), features
        if features is None and not self.objective.matches:
            raise ConfigError("FeaturesOnly needs features to match: give `features`, or another objective")
        if isinstance(features, FeatureMatching) and len(features.weights) > restarts:
            raise ConfigError(
                f"each of the {len(features.weights)} weights of the features needs a restart; got "
                f"restarts={restarts}: raise restarts, or give fewer weights"
            )
        if self.parametrization.conditioned and features is None:
            raise ConfigError(
                f"{type(self.parametrization).__name__} with conditioned=true needs recovered features, but "
                "this attack recovers none: give it `features`, or set conditioned to false"
            )
        self.steps, self.restarts, self.keep, self.seed = steps, restarts, keep, seed
        self.execution: Execution = "loop" if self.solver.line_search else execution
        self.compilation: Compilation = compilation
        self.log_every = log_every or max(1, steps // 200)
        if any(isinstance(prior, GroupConsistency) for prior in self.priors):
            if restarts < 2:
                raise ConfigError(f"GroupConsistency compares restarts and needs at least 2; got restarts={restarts}")
            if narrows_at < 1:
                raise ConfigError("GroupConsistency needs several restarts; this parametrization keeps only the best")
            if self.solver.line_search:
                raise ConfigError("GroupConsistency couples restarts, which a line search does not support: use Adam")

    @property
    def recovers_features(self) -> bool:
        return isinstance(self.features, FeatureMatching)

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        return self.parametrization.training_images

    def execution_for(self, n_victims: int) -> Execution:
        return "loop" if self.execution == "auto" and n_victims * self.restarts == 1 else self.execution

    def measured_execution(self, observations: Sequence[Observation]) -> Way:
        state = self._set_up(observations, following=False)
        self.advance(state)
        return "vmap" if state.matching.execution == "vmap" else "loop"

    def set_execution(self, state: MatchingState, execution: Way) -> None:
        state.matching.execution = execution

    def check(self, observations: Sequence[Observation]) -> None:
        super().check(observations)
        if self.network_prior is not None:
            for seen in observations:
                self.network_prior.targets(seen)

    def rehearse(self, observations: Sequence[Observation]) -> None:
        self.check(observations)
        self._set_up(observations, following=False)

    def begin(self, observations: Sequence[Observation], execution: Way | None = None) -> AttackRun:
        run = super().begin(observations, execution)
        return replace(run, then=partial(self._further, run, 1))

    def follow(
        self, found: Sequence[Reconstruction], observations: Sequence[Observation], execution: Way | None = None
    ) -> AttackRun:
        """The run whose pixels begin at the images found."""
        run = self.begin(observations, execution)
        if isinstance(self.parametrization, Pixels):
            assert isinstance(run.state, MatchingState)
            for problem, one in zip(run.state.problems[:: self.restarts], found, strict=True):
                penalty, images = problem.feature_penalty, one.images
                if penalty is not None:
                    order, kept = penalty.in_order(images), penalty.kept(one)
                    images = images[order]
                    if kept is not None:
                        problem.kept = (kept[order].view(-1, 1, 1, 1), images)
                start = self.parametrization.of(images, problem.restart.observation)
                problem.variables["pixels"].data.copy_(start["pixels"])
        return run

    def init(self, observations: Sequence[Observation]) -> MatchingState:
        """Recover labels and features, and draw candidates for every restart of every victim."""
        return self._set_up(observations, following=True)

    def _set_up(self, observations: Sequence[Observation], following: bool) -> MatchingState:
        """The state before the first iteration; `following`: recovered maps are followed towards the images."""
        problems: list[Problem] = []
        notes: list[tuple[str, ...]] = []
        for seen in observations:
            # features first: if they cannot be recovered, another attack may take over before labels are recovered
            if self.features is not None:
                require_magnitudes(seen, type(self.features).__name__)
            penalty = None if self.features is None else self.features.prepare(seen)
            labels, remarks = self.labels(seen)
            if penalty is not None and following and not self.labels.optimised:
                penalty = penalty.with_labels(labels)
            notes.append(remarks if penalty is None else (*remarks, *penalty.notes))
            condition = None if penalty is None or not self.parametrization.conditioned else penalty.condition(labels)
            for number in range(self.restarts):
                own = None if penalty is None else penalty.for_restart(number)
                problems.append(self._problem(Restart(seen, self.seed + number, condition), labels, own))
        return self._state(problems, notes)

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
        if self.labels.optimised:
            generator = torch.Generator().manual_seed(restart.seed)
            variables["labels"] = self.labels.initial_logits(seen, generator).to(labels.device)
        for value in variables.values():
            value.requires_grad_()
        # an image conditioned on a feature is matched to the same feature
        return Problem(restart, labels, variables, self.solver.optimizer(variables), penalty, restart.features)

    def _state(self, problems: list[Problem], notes: list[tuple[str, ...]]) -> MatchingState:
        seen = [problem.restart.observation for problem in problems]
        how = (self.labels.optimised, self.execution, self.compilation)
        return MatchingState(problems, Matching(seen, self.objective, self.network_prior, *how), notes)

    def _further(self, first: AttackRun, number: int, found: list[Reconstruction]) -> AttackRun | None:
        """Further start `number`, from 1, for the victims of `first` with images not certified; None: there is none."""
        maps, stuck = self.features, unsolved(found)
        if not isinstance(maps, MapMatching | PatchMatching) or number > maps.further or not stuck:
            return None
        start = partial(self._start_again, first, number, found)
        if all(self._maps_of(first, v).goes_on(found[v], number) for v in stuck):
            return start(None)
        if not (number % 2 and maps.approach and isinstance(self.parametrization, Pixels)):
            return start(None)
        seen = [first.observations[v] for v in stuck]
        hidden = any(self._maps_of(first, v).partial for v in stuck)
        match = GradientMatching(
            Observed(GlobalCosine()) if hidden else GlobalCosine(),
            [TotalVariation(0.01)],
            labels=self.labels,
            steps=maps.approach,
            seed=self.seed,
        )
        run = match.begin(seen)
        return replace(
            run,
            observations=first.observations,
            compute=lambda: put(found, stuck, run.results()),
            victims=stuck,
            then=start,
        )

    def _start_again(
        self, first: AttackRun, number: int, found: list[Reconstruction], near: list[Reconstruction] | None
    ) -> AttackRun:
        """A further start from random images, those of `near` or those found, on the maps of all known layers."""
        stuck, problems, penalties, remarks = unsolved(found), [], [], []
        assert isinstance(first.state, MatchingState)
        for v in stuck:
            before = first.state.problems[v * self.restarts]
            going = self._maps_of(first, v).goes_on(found[v], number)
            penalty = self._maps_of(first, v).for_further_start(found[v], going)
            begun = found[v] if going else None if near is None else near[v]
            start = None if begun is None else begun.images[penalty.in_order(begun.images)]
            where = "those found" if going else "random images" if near is None else "images that match the gradient"
            drawn = penalty.misplaced(found[v]) if going else None
            some = f" but {int(drawn.sum())} that are not of the batch" if drawn is not None and drawn.any() else ""
            remarks.append(f"further start {number}, from {where}{some}")
            restart = before.restart._replace(seed=self.seed + self.restarts + number - 1)
            problems.append(self._problem(restart, before.labels, penalty, start, drawn))
            if (kept := penalty.kept(found[v])) is not None:
                problems[-1].kept = (kept.view(-1, 1, 1, 1), found[v].images)
            penalties.append(penalty)
        again = self._state(problems, [()] * len(stuck))

        def compute() -> list[Reconstruction]:
            before = [found[v] for v in stuck]
            tried = zip(penalties, before, self.result(again), remarks, strict=True)
            return put(found, stuck, [penalty.closer(old, new, how) for penalty, old, new, how in tried])

        return replace(
            first,
            compute=compute,
            state=again,
            advance=partial(self.advance, again),
            reasons=(),
            then=partial(self._further, first, number + 1),
            victims=stuck,
        )

    def _maps_of(self, run: AttackRun, victim: int) -> Penalty:
        assert isinstance(run.state, MatchingState)
        penalty = run.state.problems[victim * self.restarts].feature_penalty
        assert penalty is not None
        return penalty

    def step(self, state: MatchingState) -> None:
        progress = state.step / self.steps
        if progress >= self.parametrization.narrows_at:
            self._narrow(state)
        going = state.going
        joint = None if self.solver.line_search else dict(zip(going, self._evaluate(state, going), strict=True))
        for i in going:
            problem = state.problems[i]
            if problem.ended(progress):
                continue

            def evaluate(i: int = i) -> Tensor:
                loss = joint[i] if joint is not None else self._evaluate(state, [i])[0]
                if joint is None and state.problems[i].ended(progress):
                    raise Ended
                return loss

            self.solver.step(problem.optimizer, problem.variables, self.parametrization.signed, progress, evaluate)
            self.parametrization.project(problem.variables, problem.restart.observation)

    def result(self, state: MatchingState) -> list[Reconstruction]:
        self._evaluate(state, state.going, final=True)
        results: list[Reconstruction] = []
        for v, remarks in enumerate(state.notes):
            restarts = state.problems[v * state.restarts : (v + 1) * state.restarts]
            chosen = min((p for p in restarts if not p.set_aside), key=lambda problem: problem.best_matching)
            if chosen.best_images is None or chosen.best_labels is None:
                raise ConfigError(
                    "the loss was never finite: lower the solver's learning rate or the weights of the priors"
                )
            diverged = [problem.diverged_at for problem in restarts if problem.diverged_at is not None]
            if diverged:
                remarks += (f"{len(diverged)} of {state.restarts} restarts diverged, first at step {min(diverged)}",)
            images, labels = chosen.best_images, chosen.best_labels
            features, certified, final = None, None, False
            if (penalty := chosen.feature_penalty) is not None:
                images = penalty.settled(images)
                labels, features = penalty.labels(images, labels), penalty.features
                certified, final, own = penalty.certificate(images, labels)
                remarks = (*remarks, *own)
            loss, trace = chosen.best_matching, chosen.trace
            results.append(Reconstruction(images, labels, loss, trace, remarks, features, certified, final))
        return results

    def _narrow(self, state: MatchingState) -> None:
        """Stop all restarts of every victim except the one with the least matching loss so far."""
        for first in range(0, len(state.problems), state.restarts):
            restarts = state.problems[first : first + state.restarts]
            best = min((p for p in restarts if not p.set_aside), key=lambda problem: problem.best_matching)
            for problem in restarts:
                problem.set_aside = problem is not best

    def _evaluate(self, state: MatchingState, which: Sequence[int], final: bool = False) -> Tensor:
        """Total losses `(len(which),)` of the current iterates; sets the variables' gradients, stores best iterates."""
        chosen = [state.problems[i] for i in which]
        progress = state.step / self.steps
        for problem in chosen:
            for name, variable in problem.variables.items():
                variable.requires_grad_(self.parametrization.moves(name, progress))
        drawn = torch.stack([p.images(self.parametrization) for p in chosen])
        labels = torch.stack([p.variables["labels"].detach() if self.labels.optimised else p.labels for p in chosen])
        images = drawn.detach().requires_grad_()
        evaluation = state.matching(images, labels, which)
        terms = {"matching": evaluation.matching}
        if self.network_prior is not None:
            terms["batch_norm"] = evaluation.penalty
        shares = images.new_tensor([problem.prior_share(progress) for problem in chosen])
        for prior in self.image_priors:
            value = prior(images, chosen[0].restart.observation.normalization, state.restarts, progress)
            terms[type(prior).__name__] = prior.weight * shares * value
        if self.features is not None:
            pairs = zip(chosen, images, strict=True)
            terms["features"] = torch.stack([problem.feature_term(image, progress) for problem, image in pairs])
        added = [term for name, term in terms.items() if name not in ("matching", "batch_norm")]
        penalty = sum(added, torch.zeros_like(evaluation.matching))
        direction = evaluation.images
        if penalty.requires_grad:
            direction = direction + torch.autograd.grad(penalty.sum(), images)[0]
        total = (evaluation.matching + evaluation.penalty + penalty).detach()
        if not final:
            for problem in chosen:
                for variable in problem.variables.values():
                    variable.grad = None
            torch.autograd.backward(drawn, direction)
        finite = torch.isfinite(images.detach()).flatten(1).all(1)
        rows = torch.stack([total, *(value.detach() for value in terms.values()), finite], dim=1).tolist()
        for j, problem in enumerate(chosen):
            if self.labels.optimised and evaluation.labels is not None:
                problem.variables["labels"].grad = evaluation.labels[j]
            row = dict(zip(("loss", *terms, "finite"), rows[j], strict=True))
            self._note(problem, state.step, row, images[j].detach(), labels[j], final)
        return total

    def _note(
        self, problem: Problem, step: int, row: dict[str, float], images: Tensor, labels: Tensor, final: bool
    ) -> None:
        """Store the iterate if it is the best, and a point of the loss curve every `log_every` steps."""
        loss, finite = row["loss"], row.pop("finite")
        if not math.isfinite(loss) or not finite:
            problem.diverged_at = step if problem.diverged_at is None else problem.diverged_at
            return
        if loss < problem.best_loss or (final and self.keep == "last"):
            problem.best_images = images.clone()
            problem.best_labels = labels.argmax(-1) if self.labels.optimised else labels
            problem.best_matching = row["matching"] if self.objective.matches else loss
        problem.best_loss = min(problem.best_loss, loss)
        if final or step % self.log_every == 0:
            for name, value in {"step": float(step), **row}.items():
                problem.trace.setdefault(name, []).append(value)
