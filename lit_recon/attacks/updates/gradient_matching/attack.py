"""Gradient matching: optimize candidate images until their update equals the observed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lit_recon.attacks.base import AttackRun, Execution, Way
from lit_recon.attacks.updates.feature_maps.matching import MapMatching
from lit_recon.attacks.updates.feature_maps.patches import PatchMatching
from lit_recon.attacks.updates.feature_maps.top_down_matching import TopDownMatching
from lit_recon.attacks.updates.features.inputs import InputMatching
from lit_recon.attacks.updates.features.matching import FeatureMatching
from lit_recon.attacks.updates.gradient_matching.further import FurtherStarts, StartsSoFar
from lit_recon.attacks.updates.gradient_matching.matching import Compilation, exchanged, groupings, regrouped
from lit_recon.attacks.updates.gradient_matching.objectives import GlobalCosine, Objective, Observed
from lit_recon.attacks.updates.gradient_matching.parametrizations import Parametrization, Pixels, Restart
from lit_recon.attacks.updates.gradient_matching.priors import (
    BatchNormPrior,
    GroupConsistency,
    Penalty,
    Prior,
    TotalVariation,
)
from lit_recon.attacks.updates.gradient_matching.solvers import LBFGS, Adam, Ended, Solver, TwoStages
from lit_recon.attacks.updates.gradient_matching.state import Found, MatchingState, Problem
from lit_recon.attacks.updates.labels.head import require_magnitudes
from lit_recon.attacks.updates.labels.recovery import HeadCounts, LabelRecovery
from lit_recon.clients.aggregate import parts_of
from lit_recon.errors import ConfigError
from lit_recon.records import Observation, Reconstruction

#: How often images may be grouped otherwise in all iterations, the least number of exchanges that are then tried, and
#: the share of the iterations before the first, in which candidates tell nothing.
_GROUPINGS, _EXCHANGES, _GROUPED_AT = 20, 4, 0.1


class GradientMatching(FurtherStarts):
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
        compilation: on a GPU, `auto` records the kernels of an iteration once and launches them together, where that is
            possible. `none` never does. `default` and `reduce-overhead` are `torch.compile` modes of the derivative;
            they take minutes before the first iteration.
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
        features: FeatureMatching | InputMatching | MapMatching | PatchMatching | TopDownMatching | None = None,
        steps: int = 4800,
        restarts: int = 1,
        keep: Literal["last", "best"] = "last",
        execution: Execution = "auto",
        compilation: Compilation = "auto",
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
        if features is None and not self.objective.matches and self.network_prior is None:
            raise ConfigError(
                "FeaturesOnly needs something else to match: give `features` or a BatchNormPrior, or another objective"
            )
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
        self.parametrization.records = compilation == "auto"
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
        # an attack that matches no updates has nothing to compute together
        alike = n_victims * self.restarts == 1 or (not self.objective.matches and self.network_prior is None)
        return "loop" if self.execution == "auto" and alike else self.execution

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
        return replace(run, then=partial(self._further, run, 1, progress=StartsSoFar()))

    def follow(
        self, found: Sequence[Reconstruction], observations: Sequence[Observation], execution: Way | None = None
    ) -> AttackRun:
        """The run whose pixels begin at the images found, with their labels."""
        run = self.begin(observations, execution)
        if isinstance(self.parametrization, Pixels):
            assert isinstance(run.state, MatchingState)
            for problem, one in zip(run.state.problems[:: self.restarts], found, strict=True):
                penalty, images, labels = problem.feature_penalty, one.images, one.labels.to(problem.labels)
                if penalty is not None:
                    order, kept = penalty.in_order(images), penalty.kept(one)
                    images, labels = images[order], labels[order]
                    if kept is not None:
                        problem.kept = (kept[order].view(-1, 1, 1, 1), images)
                start = self.parametrization.of(images, problem.restart.observation)
                problem.variables["pixels"].data.copy_(start["pixels"])
                if not self.labels.optimizes(problem.restart.observation):
                    problem.labels = labels
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
            if penalty is not None and self._seeks_parts:
                penalty = penalty.in_parts()
            labels, remarks = self._labels(seen, penalty)
            if penalty is not None and following and not self.labels.optimizes(seen):
                penalty = penalty.with_labels(labels)
            if self._seeks_groups(seen):
                remarks += ("labels: which mini-batch or client had which image is not known but sought",)
            notes.append(remarks if penalty is None else (*remarks, *penalty.notes))
            condition = None if penalty is None or not self.parametrization.conditioned else penalty.condition(labels)
            orders = groupings(labels, parts_of(seen), self.seed) if self._seeks_groups(seen) else None
            for number in range(self.restarts):
                own = None if penalty is None else penalty.for_restart(number)
                problem = self._problem(Restart(seen, self.seed + number, condition), labels, own)
                if orders is not None:
                    problem.exchange(next(orders))
                problems.append(problem)
        return self._state(problems, notes, [self.restarts] * len(notes))

    def _labels(self, seen: Observation, penalty: Penalty | None) -> tuple[Tensor, tuple[str, ...]]:
        """The labels of a victim in ascending order, and notes: those of exact features rather than estimates."""
        known = None if penalty is None else penalty.known_labels
        unsure = self.labels.estimated and seen.labels is None
        if unsure and known is not None and len(known) == seen.n_examples:
            return known.sort().values.to(seen.like.device), ("labels: those of the exact features",)
        return self.labels(seen)

    def approach(self, steps: int, hidden: bool) -> GradientMatching:
        objective = Observed(GlobalCosine()) if hidden else GlobalCosine()
        return GradientMatching(objective, [TotalVariation(0.01)], labels=self.labels, steps=steps, seed=self.seed)

    def step(self, state: MatchingState) -> None:
        progress = state.step / self.steps
        if progress >= self.parametrization.narrows_at:
            state.narrow()
            begins = (state.step - 1) / self.steps < self.parametrization.narrows_at
            for i in state.active if begins and self.solver.line_search else ():
                # its history would go on moving variables that have no gradient any more
                state.problems[i].move(state.problems[i].variables)
        if progress >= self.parametrization.refines_at:
            for problem in (state.problems[i] for i in state.active):
                penalty = problem.feature_penalty
                refined = self.parametrization.refined(problem.variables)
                if refined is not problem.variables and (penalty is None or penalty.refines):
                    problem.move(refined)
        if state.step % self._interval == 0 and progress >= _GROUPED_AT:
            self._regroup(state, progress)
        self._step_together(state, progress)
        active = [i for i in state.active if not state.problems[i].stepwise]
        joint = None if self.solver.line_search else dict(zip(active, self._evaluate(state, active), strict=True))
        for i in active:
            problem = state.problems[i]
            if isinstance(self.solver, LBFGS):
                problem.begin(self.solver.inner)
            if problem.ended(progress):
                continue
            problem.renew(self.parametrization, progress)

            def evaluate(i: int = i) -> Tensor:
                loss = joint[i] if joint is not None else self._evaluate(state, [i])[0]
                if joint is None and state.problems[i].ended(progress):
                    raise Ended
                return loss

            assert isinstance(problem.optimizer, torch.optim.Optimizer)
            self.solver.step(problem.optimizer, problem.variables, self.parametrization.signed, progress, evaluate)
            self.parametrization.project(problem.variables, problem.restart.observation)

    @property
    def _interval(self) -> int:
        """Iterations between attempts to group the images otherwise."""
        return max(1, self.steps // _GROUPINGS)

    def _grouped(self, seen: Observation) -> bool:
        """Whether the update depends on which images were in a mini-batch, or with a client."""
        return parts_of(seen) > 1 and not self.labels.optimizes(seen)

    def _seeks_groups(self, seen: Observation) -> bool:
        """Whether it does, and labels, which are in the client's order where they are given, do not tell."""
        return self._grouped(seen) and seen.labels is None

    def _regroup(self, state: MatchingState, progress: float) -> None:
        """Exchange candidates between mini-batches or clients where that lowers the loss."""
        for i in state.active:
            problem = state.problems[i]
            seen = problem.restart.observation
            stays = problem.kept is not None or problem.within is not None
            # statistics of all images together do not tell groups
            compared = self.objective.matches or problem.feature_penalty is not None
            if stays or not compared or not self._seeks_groups(seen):
                continue
            images = problem.images(self.parametrization).detach()
            loss = partial(self._loss_in_order, state, i, images, progress)
            generator = torch.Generator().manual_seed(problem.restart.seed + state.step)
            order = exchanged(seen.n_examples, parts_of(seen), loss, max(_EXCHANGES, self._interval), generator)
            if not torch.equal(order, torch.arange(seen.n_examples)):
                problem.exchange(order.to(images.device))
                if self.solver.line_search:  # its history is of another function
                    problem.move(problem.variables)

    def _loss_in_order(
        self, state: MatchingState, number: int, images: Tensor, progress: float, order: Tensor
    ) -> float:
        """The data term of a problem's candidates in another order, or their penalty where no updates are matched."""
        problem = state.problems[number]
        labels, penalty = problem.labels[order], problem.feature_penalty
        if self.objective.matches:
            return state.matching.value(images[order], labels, number)
        assert penalty is not None
        with torch.no_grad():
            targets = penalty.targets(images[order], labels)
            return float(penalty.penalty(images[order], targets, progress))

    def _step_together(self, state: MatchingState, progress: float) -> None:
        """Quasi-Newton steps of searches for single images, evaluated together for each victim."""
        for own in state.numbers_of_victims:
            alone = {i: search for i in own if (search := state.problems[i].stepwise)}
            for _ in range(self.solver.inner if alone and isinstance(self.solver, LBFGS) else 0):
                unfinished = [i for i in alone if not state.problems[i].ended(progress)]
                if not unfinished:
                    break
                for i, loss in zip(unfinished, self._evaluate(state, unfinished).tolist(), strict=True):
                    alone[i].told(loss)

    def result(self, state: MatchingState) -> list[Reconstruction]:
        # searches for some images each have candidates of other shapes
        waiting = [i for i in state.active if not state.problems[i].stepwise]
        for which in [[i] for i in waiting] if self.solver.line_search else [waiting]:
            self._evaluate(state, which, final=True)
        results: list[Reconstruction] = []
        refused = sorted(state.matching.refused | self.parametrization.refused)
        slower = tuple(f"slower than it might be: kernels were not recorded ({reason})" for reason in refused)
        for own, noted in zip(state.of_victims, state.notes, strict=True):
            found, remarks = Found.by(own), (*noted, *slower)
            if found is None:
                raise ConfigError(
                    "the loss was never finite: lower the solver's learning rate or the weights of the priors"
                )
            diverged = [problem.diverged_at for problem in own if problem.diverged_at is not None]
            if diverged:
                remarks += (f"{len(diverged)} of {len(own)} restarts diverged, first at step {min(diverged)}",)
            images, labels, loss, trace, penalty = found
            features, certified, final = None, None, False
            if penalty is not None:
                images = penalty.settled(images)
                labels, features = penalty.labels(images, labels), penalty.features
            seen = own[0].restart.observation
            if self._grouped(seen):
                hidden = penalty is not None and penalty.partial
                order = regrouped(seen, images, labels, hidden, self.seed).to(images.device)
                images, labels = images[order], labels[order]
            if penalty is not None:
                certified, final, more = penalty.certificate(images, labels)
                remarks = (*remarks, *more)
            results.append(Reconstruction(images, labels, loss, trace, remarks, features, certified, final))
        return results

    def _evaluate(self, state: MatchingState, which: Sequence[int], final: bool = False) -> Tensor:
        """Total losses `(len(which),)` of the current iterates; sets the variables' gradients, stores best iterates."""
        chosen = [state.problems[i] for i in which]
        progress = state.step / self.steps
        for problem in chosen:
            problem.begin_terms(progress, [prior.start for prior in self.image_priors])
            for name, variable in problem.variables.items():
                variable.requires_grad_(self.parametrization.moves(name, progress))
        drawn = torch.stack([p.images(self.parametrization) for p in chosen])
        labels = torch.stack([p.variables["labels"].detach() if "labels" in p.variables else p.labels for p in chosen])
        images = drawn.detach().requires_grad_()
        evaluation = state.matching(images, labels, which)
        terms = {"matching": evaluation.matching}
        if self.network_prior is not None:
            terms["batch_norm"] = evaluation.batch_norm
        shares = images.new_tensor([problem.prior_share(progress) for problem in chosen])
        drawn_images = torch.stack([p.as_drawn(image) for p, image in zip(chosen, images, strict=True)])
        for prior in self.image_priors:
            # a further start has one problem for each victim
            value = prior(drawn_images, chosen[0].restart.observation.normalization, state.counts[0], progress)
            terms[type(prior).__name__] = prior.weight * shares * value
        if self.features is not None:
            pairs = zip(chosen, images, strict=True)
            together = chosen[0].feature_penalty if chosen[0].stepwise else None
            if together is not None:
                terms["features"] = together.penalties(images.flatten(0, 1))
            else:
                terms["features"] = torch.stack([problem.feature_term(image, progress) for problem, image in pairs])
        added = [term for name, term in terms.items() if name not in ("matching", "batch_norm")]
        image_terms = sum(added, torch.zeros_like(evaluation.matching))
        direction = evaluation.images
        if image_terms.requires_grad:
            direction = direction + torch.autograd.grad(image_terms.sum(), images)[0]
        total = (evaluation.matching + evaluation.batch_norm + image_terms).detach()
        if not final:
            for problem in chosen:
                for variable in problem.variables.values():
                    variable.grad = None
            torch.autograd.backward(drawn, direction)
        finite, lost = torch.isfinite(images.detach()).flatten(1).all(1), direction.isnan().flatten(1).any(1)
        rows = torch.stack([total, *(value.detach() for value in terms.values()), finite, lost], dim=1).tolist()
        for j, problem in enumerate(chosen):
            if "labels" in problem.variables and evaluation.labels is not None:
                problem.variables["labels"].grad = evaluation.labels[j]
            row = dict(zip(("loss", *terms, "finite", "lost"), rows[j], strict=True))
            keep, trace = final and self.keep == "last", final or state.step % self.log_every == 0
            problem.note(state.step, row, images[j].detach(), labels[j], keep, self.objective.matches, trace)
        return total
