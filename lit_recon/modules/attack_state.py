"""Attacks that can be interrupted: the state of a running one, and a file for every group of finished victims."""

from __future__ import annotations

import io
import json
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from lit_recon.attacks.base import AttackRun, AttackState, Curve, Way
from lit_recon.errors import CorruptFileError
from lit_recon.io.files import write_bytes
from lit_recon.records import Reconstruction
from lit_recon.training.progress import Interrupted, deferred_interruption

S = TypeVar("S", contravariant=True)


class Steppable(Protocol[S]):
    """An attack on updates, or on released models."""

    def begin(self, observations: Sequence[S], execution: Way | None = None) -> AttackRun: ...


_KEPT = ("curves", "seconds", "timed_seconds", "timed_steps")
#: Called with the state and the number of iterations just done: 0 at the start or after resuming, then 1.
Watch = Callable[[AttackState, int], None]


@dataclass
class AttackOutcome:
    """Result and cost of an attack on a group of victims, each with a reconstruction and the curves of all restarts.

    The cost includes interrupted processes: `seconds` with the setup, and seconds and number of the iterations alone,
    without the first one of every process.
    """

    reconstructions: list[Reconstruction] = field(default_factory=list)
    curves: list[list[Curve]] = field(default_factory=list)
    seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_steps: int = 0


def run_attack(
    attack: Steppable[S],
    observations: Sequence[S],
    saved: Path,
    save_every_seconds: float,
    execution: Way | None,
    watch: Watch,
) -> AttackOutcome:
    """Attack a group of victims together, resuming where an earlier process left a state.

    On devices with deterministic arithmetic the result is bit for bit that of an attack that was never interrupted. An
    attack that is not a `SteppableAttack` starts over after an interruption.

    Args:
        attack, observations: the same as in an earlier process.
        saved: file of the running state; the caller removes it once the outcome is safe.
        save_every_seconds: between two saves.
        execution: how several victims are computed; None leaves it to the attack.
        watch: called at the start and after every iteration.

    Raises:
        Interrupted: after a signal; the state has been saved.
        CorruptFileError: `saved` cannot be read.
    """
    started = time.perf_counter()
    run, outcome = attack.begin(observations, execution), AttackOutcome(curves=[[] for _ in observations])
    earlier: list[list[Reconstruction]] = []  # results of the runs before this one
    if saved.is_file():
        run = _load(saved, run, outcome, earlier)
    started -= outcome.seconds

    def keep(running: AttackRun) -> None:
        outcome.seconds = time.perf_counter() - started
        _save(saved, running, outcome, earlier)

    while True:
        _iterate(run, outcome, watch, save_every_seconds, partial(keep, run))
        found = run.results()
        if run.state is not None:
            victims = range(len(observations)) if run.victims is None else run.victims
            for victim, curves in zip(victims, run.state.curves, strict=True):
                outcome.curves[victim] += curves
        following = run.then(found)
        if following is None:
            break
        earlier.append(found)
        run = following
    outcome.reconstructions = found
    outcome.curves = [own or [result.trace] for own, result in zip(outcome.curves, found, strict=True)]
    outcome.seconds = time.perf_counter() - started
    return outcome


def _iterate(
    run: AttackRun, outcome: AttackOutcome, watch: Watch, save_every_seconds: float, keep: Callable[[], None]
) -> None:
    """The remaining iterations of one run, with its state saved by `keep` from time to time and at a signal."""
    if run.state is None:
        return
    watch(run.state, 0)
    saved_at, step_began = time.monotonic(), None
    with deferred_interruption() as signal_arrived:
        while run.state.step < run.n_steps:
            run.advance()
            watch(run.state, 1)
            now = time.perf_counter()
            if step_began is not None:
                outcome.timed_seconds += now - step_began
                outcome.timed_steps += 1
            number = signal_arrived()
            if number is not None or time.monotonic() - saved_at >= save_every_seconds:
                keep()
                saved_at = time.monotonic()
            if number is not None:
                raise Interrupted(number)
            step_began = time.perf_counter()


def _save(path: Path, run: AttackRun, outcome: AttackOutcome, earlier: list[list[Reconstruction]]) -> None:
    content = {name: getattr(outcome, name) for name in _KEPT}
    content["attack"] = None if run.state is None else run.state.state_dict()
    content["earlier"] = [[vars(result) for result in found] for found in earlier]
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def _load(path: Path, run: AttackRun, outcome: AttackOutcome, earlier: list[list[Reconstruction]]) -> AttackRun:
    """The run whose state is in the file, on the way to which `run` is the first; fills `outcome` and `earlier`."""
    try:
        device = run.observations[0].like.device
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for facts in content["earlier"]:
            found = [Reconstruction(**{name: _on(value, device) for name, value in fact.items()}) for fact in facts]
            following = run.then(found)
            if following is None:
                raise ValueError("it holds results of another run")
            earlier.append(found)
            run = following
        if run.state is not None:
            run.state.load_state_dict(content["attack"])
        for name in _KEPT:
            setattr(outcome, name, content[name])
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError) as error:
        raise CorruptFileError(
            f"{path} is damaged or of another attack ({' '.join(str(error).split())[:200]}): delete it, and these "
            "victims are attacked from the start"
        ) from error
    return run


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


_SUFFIX = ".safetensors"
_HEADER = "lit_recon.victims"
_TENSORS = ("images", "labels", "features", "certified")


@dataclass(frozen=True)
class FinishedBatch:
    """The attack on one client's batch; `index` is that of the `VictimBatch`.

    The reconstruction is on the CPU, in the attack's order. Seconds are the batch's share of those of its group's
    `AttackOutcome`. Feature scores `(n,)` by metric are there where the attack recovers features.
    """

    index: int
    reconstruction: Reconstruction
    curves: list[Curve]
    seconds: float
    timed_seconds: float
    timed_steps: int
    feature_scores: dict[str, list[float]] = field(default_factory=dict)


def group_name(indices: Sequence[int]) -> str:
    """File name, without ending, of a group of batches."""
    return f"victims_{indices[0]:04d}-{indices[-1]:04d}"


def finished_batches(
    indices: Sequence[int], outcome: AttackOutcome, feature_scores: Sequence[dict[str, list[float]]]
) -> list[FinishedBatch]:
    """A group's outcome, batch by batch."""
    n, finished = len(indices), []
    for i, result in enumerate(outcome.reconstructions):
        features = None if result.features is None else result.features.cpu().float()
        certified = None if result.certified is None else result.certified.cpu()
        images, labels, loss = result.images.cpu(), result.labels.cpu(), float(result.loss)
        kept = Reconstruction(images, labels, loss, result.trace, tuple(result.notes), features, certified)
        seconds, timed, steps = outcome.seconds / n, outcome.timed_seconds / n, outcome.timed_steps
        finished.append(FinishedBatch(indices[i], kept, outcome.curves[i], seconds, timed, steps, feature_scores[i]))
    return finished


def save_finished(folder: Path, batches: Sequence[FinishedBatch]) -> None:
    """Write a group's file; it appears whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, dict[str, object]] = {}
    for batch in batches:
        found = batch.reconstruction
        for name in _TENSORS:
            if (value := getattr(found, name)) is not None:
                tensors[f"{batch.index}.{name}"] = value.contiguous()
        own = {name: value for name, value in vars(batch).items() if name not in ("index", "reconstruction")}
        facts[str(batch.index)] = {"loss": found.loss, "trace": found.trace, "notes": found.notes, **own}
    path = folder / (group_name([batch.index for batch in batches]) + _SUFFIX)
    write_bytes(path, save(tensors, {_HEADER: json.dumps(facts)}))


def load_finished(folder: Path) -> dict[int, FinishedBatch]:
    """All finished batches below `folder`, by index; a CorruptFileError for a file that cannot be read."""
    found: dict[int, FinishedBatch] = {}
    for path in sorted(folder.glob(f"victims_*{_SUFFIX}")):
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})[_HEADER])
            tensors = load_file(path)
            for index, fact in facts.items():
                images, labels, features, certified = (tensors.get(f"{index}.{name}") for name in _TENSORS)
                if images is None or labels is None:
                    raise KeyError(f"{index}.images or {index}.labels")
                loss, trace, notes = (fact.pop(name) for name in ("loss", "trace", "notes"))
                result = Reconstruction(images, labels, loss, trace, tuple(notes), features, certified)
                found[int(index)] = FinishedBatch(int(index), result, **fact)
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise CorruptFileError(
                f"{path} is damaged ({error}): delete it, and these victims are attacked from the start"
            ) from error
    return found
