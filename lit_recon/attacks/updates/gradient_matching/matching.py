"""The data term: distances of candidates' updates to the observed ones, and their gradients in the images.

Problems (restarts of victims) run one after the other (`loop`, faster for convolutions on a CPU) or together under
`torch.func.vmap` (faster for small kernels); `auto` times both once and keeps the faster. Where the update depends on
which images a client took together, and labels do not tell, images change places to lower the distance.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lit_recon.attacks.base import Execution, Way
from lit_recon.attacks.updates.gradient_matching.objectives import GlobalCosine, Objective, Observed, ObservedUpdate
from lit_recon.attacks.updates.gradient_matching.priors import BatchNormPrior
from lit_recon.clients.aggregate import one_client, parts_of
from lit_recon.defenses import simulated_gradient
from lit_recon.records import Batch, BatchStatistics, Differentiable, Observation, Update, Weights

#: Share by which an exchange has to lower a loss.
_LESS = 1e-3
#: Draws in search of a grouping that was not tried.
_DRAWS = 100
#: Of images found: exchanges that are tried in a row, and how often all are tried.
_MOST, _SWEEPS = 256, 4
#: Misfit of a tensor of the update, in standard deviations of the noise, up to which it is noise alone; and what is
#: added to it, divided by the root of the number of entries: five standard deviations or so of such a root mean square.
_LIKE_NOISE, _FEW = 1.2, 5.0
Compilation = Literal["auto", "none", "default", "reduce-overhead"]

#: (images, labels, target, known statistics) -> matching loss, BatchNorm penalty, gradients in images and, if soft, in
#: labels.
Derivative = Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]]


class MatchingTerms(NamedTuple):
    """Matching loss `(p,)` of `p` problems, weighted BatchNorm penalty `(p,)`, derivatives of their sum."""

    matching: Tensor
    batch_norm: Tensor
    images: Tensor
    labels: Tensor | None


class Matching:
    """Loss of candidates of `p` problems against their observed updates.

    Observations are one per problem, from one client object, so that model and operator are shared. `soft_labels` are
    logits `(p, n, k)` to be optimized, not classes `(p, n)`. `compilation` is a `torch.compile` mode of the derivative;
    `reduce-overhead` uses CUDA graphs on a GPU. `auto` records them there without a compiler, see `Recorded`.
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        objective: Objective,
        prior: BatchNormPrior | None,
        soft_labels: bool = False,
        execution: Execution = "auto",
        compilation: Compilation = "auto",
    ) -> None:
        self.observations, self.prior, self.soft = list(observations), prior, soft_labels
        self.objective = objective.for_victims(observations[0])
        self.execution: Execution = "loop" if execution == "auto" and len(observations) == 1 else execution
        by_update = {id(seen.update): self.objective.observed(seen) for seen in observations}
        self._targets = [by_update[id(seen.update)] for seen in observations]
        self._statistics: list[BatchStatistics] = [prior.targets(seen) if prior else {} for seen in observations]
        self.compilation: Compilation = compilation
        self._cache: dict[tuple[Any, ...], Derivative] = {}

    def __call__(self, images: Tensor, labels: Tensor, which: Sequence[int]) -> MatchingTerms:
        """Evaluate the problems `which` at images `(len(which), n, c, h, w)` and labels."""
        images = images.detach()  # one recording for candidates with a gradient and without
        if self.execution == "auto":
            self.execution = self._faster(images, labels, which)
            # recordings of the other form would hold their memory
            self._cache = {form: one for form, one in self._cache.items() if form[0] == self.execution}
        return self._together(images, labels, which) if self.execution == "vmap" else self._loop(images, labels, which)

    def value(self, images: Tensor, labels: Tensor, number: int) -> float:
        """The matching loss of one problem at images `(n, c, h, w)` and labels, without derivatives."""
        with torch.enable_grad():  # the client's own
            _, (matching, _) = self._loss(
                images.detach(), labels, self._targets[number], self._statistics[number], "no"
            )
        return float(matching)

    def _faster(self, images: Tensor, labels: Tensor, which: Sequence[int]) -> Way:
        def seconds(run: Callable[[Tensor, Tensor, Sequence[int]], MatchingTerms]) -> float:
            best = float("inf")
            for _ in range(3):
                start = time.perf_counter()
                run(images, labels, which)
                if images.is_cuda:
                    torch.cuda.synchronize(images.device)
                best = min(best, time.perf_counter() - start)
            return best

        return "vmap" if seconds(self._together) < seconds(self._loop) else "loop"

    def _loop(self, images: Tensor, labels: Tensor, which: Sequence[int]) -> MatchingTerms:
        derivative = self._prepared(("loop",), self._functional_derivative, self._eager_derivative)
        parts = []
        for image, label, i in zip(images, labels, which, strict=True):
            if self.compilation == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            part = derivative(image, label, self._targets[i], self._statistics[i])
            if self.compilation == "reduce-overhead":  # the next replay overwrites the output
                part = tree_map(torch.clone, part)
            parts.append(part)
        return self._terms(*_stack(parts))

    def _together(self, images: Tensor, labels: Tensor, which: Sequence[int]) -> MatchingTerms:
        targets, target_axis = _stacked([self._targets[i] for i in which])
        known, known_axis = _stacked([self._statistics[i] for i in which])
        mapped = torch.func.vmap(self._functional_derivative, in_dims=(0, 0, target_axis, known_axis))
        derivative = self._prepared(("vmap", target_axis, known_axis), mapped, mapped)
        return self._terms(*derivative(images, labels, targets, known))

    def _terms(self, matching: Tensor, batch_norm: Tensor, gradients: tuple[Tensor, ...]) -> MatchingTerms:
        return MatchingTerms(matching, batch_norm, gradients[0], gradients[1] if self.soft else None)

    def _prepared(self, form: tuple[Any, ...], functional: Derivative, plain: Derivative) -> Derivative:
        """The plain derivative, on a GPU recorded, or the functional one compiled; prepared on first use."""
        on_gpu = next(iter(self._targets[0].update.values())).is_cuda
        if self.compilation == "none" or (self.compilation == "auto" and not on_gpu):
            return plain
        if form not in self._cache:
            self._cache[form] = recorded(plain) if self.compilation == "auto" else self._compiled(functional, on_gpu)
        return self._cache[form]

    def _compiled(self, derivative: Derivative, on_gpu: bool) -> Derivative:
        mode = None if self.compilation == "default" else self.compilation
        # Channels-last weight gradients make the inner products with the observed update slow:
        # on a CPU this costs more than the compiled derivative saves.
        options: Any = None if on_gpu or mode is not None else {"layout_optimization": False}
        return torch.compile(derivative, mode=mode, options=options, fullgraph=True, dynamic=False)

    @property
    def refused(self) -> set[str]:
        """Why kernels are launched one by one on a GPU, where they could not be recorded."""
        return {reason for one in self._cache.values() if (reason := getattr(one, "refused", None))}

    def _loss(
        self, images: Tensor, labels: Tensor, target: ObservedUpdate, known: BatchStatistics, form: Differentiable
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        seen, batch = self.observations[0], Batch(images, labels.softmax(-1) if self.soft else labels)
        if self.prior is None and not self.objective.matches:
            nothing = 0 * (images.sum() + labels.sum())
            return nothing, (nothing, nothing)
        if self.prior is None:
            matching = self.objective(self._update(batch, target.update, form), target)
            return matching, (matching, torch.zeros_like(matching))
        update: Update = {}
        if seen.defense is None and self.objective.matches:
            update, statistics = seen.operator.with_statistics(seen.weights, batch, form)
        else:
            statistics = seen.operator.statistics(seen.weights, batch)
            if self.objective.matches:  # a defense may need per-example gradients, statistics need the whole batch
                update = self._update(batch, target.update, form)
        matching = self.objective(update, target)
        batch_norm = self.prior.weight * self.prior(statistics, known) + 0 * labels.sum()
        return matching + batch_norm, (matching, batch_norm)

    def _update(self, candidate: Batch, observed: Update, form: Differentiable) -> Update:
        """The simulated release of a candidate, with the attacker's knowledge."""
        seen = self.observations[0]
        if seen.defense is None:
            return seen.operator(seen.weights, candidate, form)
        buffers = seen.defense.simulate_buffers(seen.buffers, observed, seen.n_examples)
        own, clients = one_client(seen.operator)
        gradient = partial(own, Weights(seen.parameters, buffers))
        return simulated_gradient(seen.defense, gradient, candidate, observed, form, clients)

    def _eager_derivative(
        self, images: Tensor, labels: Tensor, target: ObservedUpdate, known: BatchStatistics
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        leaves = [images.detach().requires_grad_()] + ([labels.detach().requires_grad_()] if self.soft else [])
        given = leaves[1] if self.soft else labels
        loss, (matching, batch_norm) = self._loss(leaves[0], given, target, known, "autograd")
        return matching.detach(), batch_norm.detach(), torch.autograd.grad(loss, leaves)

    def _functional_derivative(
        self, images: Tensor, labels: Tensor, target: ObservedUpdate, known: BatchStatistics
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        derivative = torch.func.grad(self._loss, argnums=(0, 1) if self.soft else (0,), has_aux=True)
        gradients, (matching, batch_norm) = derivative(images, labels, target, known, "functional")
        return matching, batch_norm, gradients


def recorded(derivative: Derivative) -> Derivative:
    """See `Recorded`."""
    from lit_recon.attacks.updates.gradient_matching.recording import Recorded  # only a GPU needs it

    return Recorded(derivative)


def update_distance(observation: Observation, images: Tensor, labels: Tensor, observed_only: bool = False) -> float:
    """1 - cos between the simulated release of images with labels `(n,)` and the observed one, in [0, 2].

    With `observed_only`, on coordinates at which the observed update is not zero.
    """
    objective = Observed(GlobalCosine()) if observed_only else GlobalCosine()
    matching, target = Matching([observation], objective, None), ObservedUpdate.of(observation.update)
    with torch.enable_grad():
        return float(matching._loss(images.detach(), labels, target, {}, "no")[0])


def simulated_release(observation: Observation, images: Tensor, labels: Tensor) -> Update:
    """The update that images with labels `(n,)` would give, with the attacker's knowledge of a defense."""
    matching = Matching([observation], GlobalCosine(), None)
    with torch.enable_grad():
        update = matching._update(Batch(images.detach(), labels), observation.update, "no")
    return {name: value.detach() for name, value in update.items()}


def update_misfits(observation: Observation, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Root mean square of the observed update less the simulated release of images with labels `(n,)`, by tensor.

    Over the entries that are observed: those released as zero have no noise.
    """
    update = simulated_release(observation, images, labels)
    misfits: dict[str, float] = {}
    for name, value in observation.update.items():
        rest = (value - update[name])[value != 0].double()
        misfits[name] = float((rest.square().sum() / max(1, len(rest))).sqrt())
    return misfits


def beside_noise(observation: Observation, images: Tensor, labels: Tensor, std: float) -> str:
    """How far the simulated update is from the observed one, in standard deviations of known noise."""
    misfits, beyond = update_misfits(observation, images, labels), {}
    for name, value in observation.update.items():
        # the mean square of few entries varies
        like = _LIKE_NOISE + _FEW / max(1, int(value.count_nonzero())) ** 0.5
        if misfits[name] > like * std:
            beyond[name] = misfits[name]
    most = max(beyond, key=lambda name: beyond[name], default=None)
    if most is None:
        return "the update of the images differs from the observed one by the noise alone"
    return (
        f"the update of the images differs from the observed one by {misfits[most] / std:.2g} times the noise in "
        f"{most}: where activations of the images differ from the client's, so do the derivatives, which patches leave "
        "free"
    )


def groupings(labels: Tensor, parts: int, seed: int) -> Iterator[Tensor]:
    """Orders `(n,)` of images with labels `(n,)` in `parts` equal groups; the first is the given one, others are drawn.

    One that gives the groups the same labels as an earlier one comes only after `_DRAWS` draws that find no other.
    """
    generator, known = torch.Generator().manual_seed(seed), set()
    order = torch.arange(len(labels))
    while True:
        for _ in range(_DRAWS):
            groups = tuple(tuple(group.sort().values.tolist()) for group in labels.cpu()[order].chunk(parts))
            if groups not in known:
                break
            order = torch.randperm(len(labels), generator=generator)
        known.add(groups)
        yield order.to(labels.device)


def exchanged(n: int, parts: int, loss: Callable[[Tensor], float], most: int, generator: torch.Generator) -> Tensor:
    """An order `(n,)` of images in `parts` equal groups: exchanges of two of them are kept if they lower its `loss`.

    At most so many are tried, in random order. `loss` gets orders; that of images within a group does not matter.
    """
    order, size = torch.arange(n), n // parts
    pairs = [(i, j) for i, j in itertools.combinations(range(n), 2) if i // size != j // size]
    least = loss(order)
    for k in torch.randperm(len(pairs), generator=generator)[:most].tolist():
        i, j = pairs[k]
        other = order.clone()
        other[[i, j]] = order[[j, i]]
        lower = loss(other)
        if lower < least - _LESS * abs(least):
            order, least = other, lower
    return order


def regrouped(observation: Observation, images: Tensor, labels: Tensor, observed_only: bool, seed: int) -> Tensor:
    """The order `(n,)` in which images found `(n, c, h, w)`, with labels `(n,)`, explain the update best."""
    order, parts = torch.arange(len(images)), parts_of(observation)
    if parts == 1:
        return order
    generator = torch.Generator().manual_seed(seed)

    def distance(other: Tensor) -> float:
        return update_distance(observation, images[order[other]], labels[order[other]], observed_only)

    for _ in range(_SWEEPS):
        further = exchanged(len(images), parts, distance, _MOST, generator)
        order = order[further]
        if torch.equal(further, torch.arange(len(images))):
            break
    return order


def _stack(values: list[Any]) -> Any:
    """Pytrees of tensors, stacked along a new leading axis."""
    return tree_map(lambda *parts: torch.stack(parts), *values)


def _stacked(values: list[Any]) -> tuple[Any, int | None]:
    """Stacked pytrees, or a shared one unstacked; and the axis for vmap."""
    if all(value is values[0] for value in values) or not tree_leaves(values[0]):
        return values[0], None
    return _stack(values), 0
