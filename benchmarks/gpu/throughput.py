"""How long an attack iteration takes on a GPU: launched kernel by kernel, recorded, compiled, one victim or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.gpu.agreement import distances
from benchmarks.gpu.device import clock, forget_peak, peak_memory, tensor_float
from benchmarks.gpu.plan import Plan, attempt
from benchmarks.record import Row, alternate, ratios, spread
from benchmarks.workload import Workload
from lit_recon.attacks.base import Execution
from lit_recon.attacks.updates import DeepImagePrior, GradientMatching, MatchingState
from lit_recon.attacks.updates.gradient_matching.matching import Compilation, MatchingTerms
from lit_recon.clients import BatchNormMode

#: Seconds that a measurement may take at most; compilers are slow.
EAGER_SECONDS, COMPILED_SECONDS = 15, 100

Variants = dict[str, Callable[[], Any]]


def throughput(plan: Plan) -> Iterator[Row]:
    """Seconds per iteration and ratio to one forward and backward pass, by batch size; pixels and a deep image prior.

    The compiled forms come last, the mode with CUDA graphs first: each takes a minute or more to begin.
    """
    modes: tuple[BatchNormMode, ...] = ("eval", "train")
    for mode in modes:
        for batch in plan.sizes.batches:
            about = {"batch": batch, "batch_norm": mode}
            yield attempt(plan, about, EAGER_SECONDS, partial(eager, plan, batch, mode))
    for batch in plan.sizes.batches:
        about = {"batch": batch, "batch_norm": "eval", "parametrization": "deep image prior"}
        yield attempt(plan, about, EAGER_SECONDS, partial(prior, plan, batch))
    if not plan.on_gpu:
        yield {"compilation": "default, reduce-overhead", "skipped": "a rehearsal on the CPU compiles nothing"}
        return
    compilations: tuple[Compilation, ...] = ("reduce-overhead", "default")
    for batch in plan.sizes.batches:
        for compilation in compilations:
            yield from compiled(plan, batch, compilation)


def together(plan: Plan) -> Iterator[Row]:
    """Several victims with one image each: one after the other, or together under `vmap`; both also as one graph."""
    for victims in plan.sizes.victims:
        yield attempt(plan, {"victims": victims, "batch": 1}, EAGER_SECONDS, partial(several, plan, victims))


def eager(plan: Plan, batch: int, mode: BatchNormMode) -> Row:
    """One victim: whole iterations, and the derivative alone, which shows what the rest of an iteration costs."""
    forget_peak(plan.device)
    workload = Workload.build(batch, mode, width=plan.sizes.width, device=plan.device)
    attack, state = workload.attack()
    images, labels = _candidates(state)
    variants: Variants = {
        "forward_backward": workload.forward_backward,
        "eager": partial(attack.step, state),
        "eager_derivative": partial(state.matching, images, labels, [0]),
    }
    if plan.on_gpu:
        variants["eager_tf32"] = _with_tensor_float(partial(attack.step, state))
        recording, recorded = workload.attack(compilation="auto")
        variants["recorded"] = partial(recording.step, recorded)
        variants["recorded_derivative"] = partial(recorded.matching, images, labels, [0])
        return _recorded(_timed(plan, variants), (recording, recorded))
    return _timed(plan, variants)


def prior(plan: Plan, batch: int) -> Row:
    """One victim whose images are those of a U-Net: whole iterations."""
    forget_peak(plan.device)
    workload = Workload.build(batch, width=plan.sizes.width, device=plan.device)
    attack, state = workload.attack(parametrization=DeepImagePrior())
    variants: Variants = {"forward_backward": workload.forward_backward, "eager": partial(attack.step, state)}
    if not plan.on_gpu:
        return _timed(plan, variants)
    recording, recorded = workload.attack(compilation="auto", parametrization=DeepImagePrior())
    variants["recorded"] = partial(recording.step, recorded)
    return _recorded(_timed(plan, variants), (recording, recorded))


def compiled(plan: Plan, batch: int, compilation: Compilation) -> Iterator[Row]:
    """One victim with the derivative compiled, and whether two calls in a row still give what eager calls give."""
    about = {"batch": batch, "batch_norm": "eval", "compilation": compilation}
    workload = Workload.build(batch, width=plan.sizes.width, device=plan.device)
    attack, state = workload.attack(compilation=compilation)
    plain, reference = workload.attack()
    now = clock(plan.device)

    def measure() -> Row:
        forget_peak(plan.device)
        start = now()
        attack.advance(state)
        first = now() - start
        variants: Variants = {
            "forward_backward": workload.forward_backward,
            "eager": partial(plain.step, reference),
            "compiled": partial(attack.step, state),
        }
        return {"first_iteration_seconds": round(first, 1), **_timed(plan, variants)}

    def compare() -> Row:
        images = torch.rand(2, *workload.images.shape, device=plan.device)
        labels = torch.stack([workload.labels, workload.labels])
        ours, theirs = (_parts(running.matching(images, labels, [0, 0])) for running in (state, reference))
        return {"from_eager": distances(ours, theirs)}

    timed = attempt(plan, about, COMPILED_SECONDS, measure)
    yield timed
    if "seconds" in timed:
        yield attempt(plan, {**about, "check": "two problems one after the other"}, 5, compare)


def several(plan: Plan, victims: int) -> Row:
    """Iterations of `victims` clients at once."""
    forget_peak(plan.device)
    workload = Workload.build(1, victims=victims, width=plan.sizes.width, device=plan.device)
    executions: tuple[Execution, ...] = ("loop", "vmap")
    variants: Variants = {"forward_backward": workload.forward_backward}
    running = []
    for execution in executions:
        attack, state = workload.attack(execution)
        variants[execution] = partial(attack.step, state)
        if plan.on_gpu:
            recording, recorded = workload.attack(execution, "auto")
            variants[f"recorded_{execution}"] = partial(recording.step, recorded)
            running.append((recording, recorded))
    row = _recorded(_timed(plan, variants), *running)
    medians = {name: row["seconds"][name]["median"] for name in variants if name != "forward_backward"}
    row["iterations_per_second"] = {name: round(1 / median, 2) for name, median in medians.items()}
    row["victim_iterations_per_second"] = {name: round(victims / median, 2) for name, median in medians.items()}
    return row


def _timed(plan: Plan, variants: Variants) -> Row:
    for run in variants.values():
        for _ in range(plan.sizes.warm_up):
            run()
    seconds = alternate(variants, plan.sizes.rounds, clock(plan.device))
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": ratios(seconds, "forward_backward"),
        **peak_memory(plan.device),
    }


def _candidates(state: MatchingState) -> tuple[Tensor, Tensor]:
    """Images and labels for a call of the data term about all problems."""
    shape = (state.problems[0].restart.observation.n_examples, *state.problems[0].restart.observation.image_shape)
    labels = torch.stack([problem.labels for problem in state.problems])
    return torch.rand(len(state.problems), *shape, device=labels.device), labels


def _recorded(row: Row, *running: tuple[GradientMatching, MatchingState]) -> Row:
    """The row, and why kernels of these attacks could not be recorded."""
    refused = {
        reason for attack, state in running for reason in state.matching.refused | attack.parametrization.refused
    }
    return {**row, "not_recorded": sorted(refused)} if refused else row


def _with_tensor_float(run: Callable[[], None]) -> Callable[[], None]:
    def allowed() -> None:
        with tensor_float(True):
            run()

    return allowed


def _parts(evaluation: MatchingTerms) -> dict[str, Tensor]:
    return {"matching": evaluation.matching.double().cpu(), "derivative": evaluation.images.double().cpu()}
