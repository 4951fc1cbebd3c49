"""Attacks that can be interrupted: the state of a running one, and a file for every group of finished victims."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from lit_recon.attacks.base import AttackRun, AttackState, Curve, Way
from lit_recon.errors import CorruptFileError
from lit_recon.io.files import parse_json, write_bytes
from lit_recon.io.tensors import load_saved
from lit_recon.records import Reconstruction, Weights
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
    identity: str = "",
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
        identity: of the run; a state of another one is refused.

    Raises:
        Interrupted: after a signal; the state has been saved.
        CorruptFileError: `saved` cannot be read, or is of another run.
    """
    started = time.perf_counter()
    run, outcome = attack.begin(observations, execution), AttackOutcome(curves=[[] for _ in observations])
    earlier: list[list[Reconstruction]] = []  # results of the runs before this one
    if saved.is_file():
        run = _load(saved, run, outcome, earlier, identity)
    started -= outcome.seconds

    def keep(running: AttackRun) -> None:
        outcome.seconds = time.perf_counter() - started
        _save(saved, running, outcome, earlier, identity)

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


def _save(
    path: Path, run: AttackRun, outcome: AttackOutcome, earlier: list[list[Reconstruction]], identity: str
) -> None:
    content: dict[str, Any] = {name: getattr(outcome, name) for name in _KEPT}
    content["run"] = identity
    content["attack"] = None if run.state is None else run.state.state_dict()
    content["earlier"] = [[vars(result) for result in found] for found in earlier]
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def _load(
    path: Path, run: AttackRun, outcome: AttackOutcome, earlier: list[list[Reconstruction]], identity: str
) -> AttackRun:
    """The run whose state is in the file, on the way to which `run` is the first; fills `outcome` and `earlier`."""
    try:
        device = run.observations[0].like.device
        content: dict[str, Any] = load_saved(path)
        _check_run(content.get("run"), identity)
        for facts in content["earlier"]:
            found = [Reconstruction(**{name: _on(value, device) for name, value in fact.items()}) for fact in facts]
            following = run.then(found)
            if following is None:
                raise ValueError("it holds results of another run")
            earlier.append(found)
            run = following
        if run.state is not None:
            _check_labels(content["attack"], getattr(run.observations[0], "n_classes", None))
            run.state.load_state_dict(content["attack"])
        for name in _KEPT:
            setattr(outcome, name, content[name])
    except Exception as error:  # damaged bytes raise errors of many kinds
        raise CorruptFileError(
            f"{path} is damaged or of another attack ({' '.join(str(error).split())[:200]}): delete it, and these "
            "victims are attacked from the start"
        ) from error
    return run


#: Between the settings and what their paths stand for, in the identity of a run.
_CONTENT = "; content "


def run_identity(settings: str, model: nn.Module, split_hash: str) -> str:
    """The identity of a run, of settings, images and weights: the paths in settings do not say what files hold."""
    content = hashlib.sha256(split_hash.encode())
    for part in Weights.of(model):
        for name, value in part.items():
            content.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            content.update(value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return f"{settings}{_CONTENT}{content.hexdigest()[:16]}"


def _check_run(found: object, identity: str) -> None:
    """A ValueError for a file of another run; those of earlier releases do not say of which, or of which model."""
    if not found or not identity or found == identity:
        return
    settings, _, content = str(found).partition(_CONTENT)
    if settings != identity.partition(_CONTENT)[0]:
        raise ValueError("it is of a run with other settings")
    if content:
        raise ValueError("it is of another model or other images: a file that the settings name has changed since")


def _check_labels(state: Any, n_classes: int | None) -> None:
    """A ValueError for the number of a class that the model does not have."""
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for name, value in parts:
        if not isinstance(value, torch.Tensor):
            _check_labels(value, n_classes)
            continue
        is_label = name in ("labels", "best_labels") and not value.is_floating_point() and value.numel() > 0
        if is_label and n_classes and not 0 <= int(value.min()) <= int(value.max()) < n_classes:
            raise ValueError(f"its labels are not 0 to {n_classes - 1}")


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


_SUFFIX = ".safetensors"
_HEADER, _RUN = "lit_recon.victims", "lit_recon.run"
_TENSORS = ("images", "labels", "features", "certified")
_COSTS = ("seconds", "timed_seconds", "timed_steps")


@dataclass(frozen=True)
class FinishedBatch:
    """The attack on one client's batch; `index` is that of the `VictimBatch`.

    The reconstruction is on the CPU, in the attack's order. Seconds are the batch's share of those of its group's
    `AttackOutcome`. Feature scores `(n,)` by metric are there where the attack recovers features. `refused`: why the
    attack is not applicable to this batch, so that a guess stands in for its result; empty where it is.
    """

    index: int
    reconstruction: Reconstruction
    curves: list[Curve]
    seconds: float
    timed_seconds: float
    timed_steps: int
    feature_scores: dict[str, list[float]] = field(default_factory=dict)
    refused: str = ""

    @classmethod
    def guessed(cls, index: int, images: torch.Tensor, labels: torch.Tensor, refused: str) -> FinishedBatch:
        """A guess of images `(n, c, h, w)` and labels `(n,)` where the attack refused the batch."""
        return cls(index, Reconstruction(images, labels, 0.0), [], 0.0, 0.0, 0, refused=refused)


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


def save_finished(folder: Path, batches: Sequence[FinishedBatch], identity: str = "") -> None:
    """Write a group's file, with the identity of the run; it appears whole or not at all."""
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
    write_bytes(path, save(tensors, {_HEADER: json.dumps(facts), _RUN: identity}))


def load_finished(folder: Path, identity: str = "") -> dict[int, FinishedBatch]:
    """All finished batches below `folder`, by index; a CorruptFileError for a damaged file, or one of another run."""
    found: dict[int, FinishedBatch] = {}
    for path in sorted(folder.glob(f"victims_*{_SUFFIX}")):
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            _check_run(metadata.get(_RUN), identity)
            facts = parse_json(metadata[_HEADER])
            tensors = load_file(path)
            for index, fact in facts.items():
                images, labels, features, certified = (tensors.get(f"{index}.{name}") for name in _TENSORS)
                if images is None or labels is None:
                    raise KeyError(f"{index}.images or {index}.labels")
                if images.dim() != 4 or labels.shape != images.shape[:1] or labels.dtype != torch.int64:
                    raise ValueError("images must be (n, c, h, w) and labels (n,)")
                loss, trace, notes = (fact.pop(name) for name in ("loss", "trace", "notes"))
                for number in (loss, *(fact[name] for name in _COSTS)):
                    if type(number) not in (int, float):
                        raise ValueError(f"{number!r} is no number")
                result = Reconstruction(images, labels, loss, trace, tuple(notes), features, certified)
                found[int(index)] = FinishedBatch(int(index), result, **fact)
        except Exception as error:  # damaged bytes raise errors of many kinds
            raise CorruptFileError(
                f"{path} is damaged or of another run ({error}): delete it, and these victims are attacked from the "
                "start"
            ) from error
    return found
