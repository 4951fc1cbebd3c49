"""`attack.py audit`: what a user's own update gives away, from his model and the files that he has."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_recon.attacks.released.base import digest
from lit_recon.clients import Client
from lit_recon.clients.local_steps import Optimizer
from lit_recon.clients.record import Circumstances, RecordedUpdate, Sent
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError, CorruptFileError, check_kind
from lit_recon.experiments.audit.attacks import CANDIDATES, NO_MEMORY, best, check_kept, run_attacks
from lit_recon.experiments.audit.evidence import Finding, read_evidence
from lit_recon.experiments.audit.interpretation import Interpretation, interpret
from lit_recon.experiments.audit.page import AUDIT_FILE
from lit_recon.experiments.audit.protection import (
    check_protection,
    error_of,
    known_defense,
    measure_protection,
    plain_error,
)
from lit_recon.experiments.audit.score import AuditResult, agreement, checked_truth
from lit_recon.experiments.call import Call, RunSettings, check_range
from lit_recon.experiments.configuration import SAME_RUN, allow_class_path, settings_parser
from lit_recon.experiments.settings import ModelSettings
from lit_recon.io.tensors import read_state
from lit_recon.metrics.scores import match
from lit_recon.models import public_model
from lit_recon.models.classifiers.foreign import PublicModel, build_module
from lit_recon.records import BatchNormMode, LayerStatistics, Loss, Normalization
from lit_recon.reporting.pages import write_pdf
from lit_recon.reporting.provenance import read_settings
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.training.trainer import TrainerSettings, check_trainer, configure_process


@dataclass(frozen=True, kw_only=True)
class AuditSettings(RunSettings):
    """One run of `attack.py audit`. What a recorded update states about itself need not be given again.

    Args:
        model: the client's model: import path, arguments, image shape and normalization.
        record: file of `lit_recon.clients.record.Recorder`; instead of it, `before` and `sent`.
        before: state dict that the client began with (.safetensors, or .pt or .pth of tensors only).
        sent: what left the client, by the same names.
        form: what was sent; default: it is worked out.
        truth: .safetensors file of the client's `images` (n, c, h, w), to score what comes back, and perhaps of its
            `labels` (n,).
        batch_size: images that the client trained on, in all its steps together.
        steps: optimizer steps of the client, in all its epochs; default: 1.
        batches: parts of the images that the steps take in turn; default: 1, every step takes all images.
        lr: learning rate of the client.
        optimizer: `sgd` or `adam`.
        momentum: of the client's SGD; default: 0.
        weight_decay: of the client's SGD, or of its Adam as in AdamW; default: 0.
        batch_norm: BatchNorm layers used running (`eval`) or batch statistics (`train`).
        loss: import path of the training loss, of logits and labels; default: cross-entropy.
        labels: the client's labels, if an attacker may know them.
        defense: a defense that the client used and the attacker knows. Absolute strengths are those of a gradient: of
            a change of the weights, divided by `lr` and `steps`, see docs/audit.md.
        attacks: names of the attacks to try; default: all of analytic, cocktail_party, feature_maps, features,
            layer_inputs and geiping2020.
        minutes: time for the attacks.
        protection_minutes: time for measuring which defenses would have stopped them; 0: none is measured.
        pdf: write the report as a PDF, too.
        trainer: devices and threads.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    record: Path | None = None
    before: Path | None = None
    sent: Path | None = None
    form: Sent | None = None
    truth: Path | None = None
    batch_size: int | None = None
    steps: int | None = None
    batches: int | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    optimizer: Optimizer | None = None
    batch_norm: BatchNormMode | None = None
    loss: Callable[..., Any] | None = None
    labels: list[int] | None = None
    defense: Defense | None = None
    attacks: list[str] = field(default_factory=list)
    minutes: float = 10.0
    protection_minutes: float = 10.0
    pdf: bool = False
    trainer: TrainerSettings = field(default_factory=TrainerSettings)

    def __post_init__(self) -> None:
        check_range({"minutes": self.minutes}, 0, strict=True)
        check_range({"protection_minutes": self.protection_minutes}, 0)
        if self.model.weights is not None:
            raise ConfigError(
                "model.weights is not used by an audit, whose weights are those before the client trained: give "
                f"{self.model.weights} as before, or leave it out if record or before has them"
            )
        if self.defense is not None:
            self.defense.require_strength()
        _check_names(self.attacks)

    def read(self) -> RecordedUpdate:
        """The update from its files, with the settings in place of what the file states."""
        parts = [name for name in ("before", "sent") if getattr(self, name) is not None]
        if self.record is not None and parts:
            raise ConfigError(f"record holds weights and update already: leave {' and '.join(parts)} out")
        if self.record is None and len(parts) < 2:
            raise ConfigError("give record, a file of lit_recon.clients.record.Recorder, or both before and sent")
        if self.record is not None:
            found = RecordedUpdate.load(self.record)
        else:
            assert self.before is not None
            assert self.sent is not None
            remedy = "save it with torch.save or safetensors as tensors by name"
            found = RecordedUpdate(
                read_state(self.before, "weights before", remedy), read_state(self.sent, "update", remedy)
            )
        if self.truth is not None:
            found = replace(found, truth=_read_truth(self.truth))
        given = {one.name: own for one in fields(Circumstances) if (own := getattr(self, one.name)) is not None}
        return replace(found, form=self.form or found.form, known=replace(found.known, **given))


def _read_truth(path: Path) -> dict[str, Tensor]:
    """The images and labels of a file, which a Recorder may have written."""
    remedy = "give images and labels, or none"
    truth = {name.removeprefix("truth/"): value for name, value in read_state(path, "true images", remedy).items()}
    if "images" not in truth:
        raise CorruptFileError(f"{path} must hold `images`; got {', '.join(truth) or 'nothing'}: {remedy}")
    return truth


def _check_names(names: Sequence[str]) -> None:
    known = [one.name for one in CANDIDATES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"attacks must be among {', '.join(known)}; got {', '.join(unknown)}")


def audit(
    model: nn.Module,
    update: RecordedUpdate | Path | str,
    image_shape: Sequence[int] | None = None,
    normalization: Normalization | None = None,
    *,
    loss: Loss = cross_entropy,
    labels: Tensor | Sequence[int] | None = None,
    defense: Defense | None = None,
    attacks: Sequence[str] = (),
    minutes: float = 10.0,
    protection_minutes: float = 0.0,
    folder: Path | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] = lambda line: None,
) -> AuditResult:
    """What a client's update gives away: what was sent, which images come back, which defense would have stopped that.

    Args:
        model: the client's model, with any weights; its own are in the update.
        update: recorded by `lit_recon.clients.record.Recorder`, or the path of its file.
        image_shape, normalization: of the images, as in `Client`.
        loss: of the client's training.
        labels: the client's labels, if an attacker may know them.
        defense: of the client, if an attacker may know it. Absolute strengths are those of a gradient: of a change of
            the weights, divided by learning rate and steps, see docs/audit.md.
        attacks: names of the attacks to try; default: all, cheapest first, until all images are certified.
        minutes, protection_minutes: time for the attacks, and for attacks on defended copies of the update.
        folder: where results of attacks are kept, so that a killed audit goes on where it stopped, and one with more
            minutes runs the attacks that had too few; of one update, model, defense and knowledge.
        device: of the attacks.
        progress: gets a line for every finding and every attack.

    Raises:
        LitReconError: model, update and circumstances do not fit together; the message says what does not.
    """
    check_kind("model", model, nn.Module)
    check_kind("update", update, RecordedUpdate, Path, str)
    _check_names(attacks)
    recorded = update if isinstance(update, RecordedUpdate) else RecordedUpdate.load(update)
    case = _prepared(model, recorded, image_shape, normalization, loss, labels, defense)
    return _audited(case, loss, defense, attacks, minutes, protection_minutes, folder, device, progress)


#: Of an object in memory, in the text of a function: another one in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class _Case(NamedTuple):
    """What an audit knows before its attacks begin."""

    public: PublicModel
    found: Interpretation
    truth: tuple[Tensor, Tensor | None] | None
    labels: Tensor | None
    given: str  # a hash of all that was given, but for the defense

    def identity(self, defense: Defense | None) -> str:
        """Of outcomes that are kept: of attacks on the same with the same knowledge."""
        return f"{self.given} {_ADDRESS.sub('', repr(defense))}"


def _prepared(
    model: nn.Module,
    recorded: RecordedUpdate,
    image_shape: Sequence[int] | None,
    normalization: Normalization | None,
    loss: Loss,
    labels: Tensor | Sequence[int] | None,
    defense: Defense | None,
) -> _Case:
    """Model, update, labels and truth, checked against each other."""
    model = copy.deepcopy(model).cpu().eval()  # where the tensors of the update are; it gets the weights before
    evidence = read_evidence(model, recorded)
    public = public_model(model, image_shape, normalization)
    public.model.load_state_dict(dict(evidence.before), strict=False)  # the normalization of pixels is a buffer of ours
    found = interpret(public, evidence, recorded.form, recorded.known, loss, defense)
    # the model as a client with this defense has it, and the errors of one that cannot have it
    mode, own = found.known.batch_norm or "train", known_defense(found, defense)
    client = Client(public.model, mode, own, lambda model, _, loss: found.operator(model, loss), loss=loss)
    public = public._replace(model=client.model)
    n, truth = found.known.batch_size or 1, None
    if "images" in recorded.truth:
        truth = checked_truth(recorded.truth["images"], recorded.truth.get("labels"), n, public.image_shape)
    known = None if labels is None else torch.as_tensor(labels).long()
    if known is not None and tuple(known.shape) != (n,):
        shape = tuple(known.shape)
        hint = ": give labels.argmax(1)" if shape == (n, public.n_classes) else ""
        raise ConfigError(f"labels must be ({n},), the class of each of the {n} images; got {shape}{hint}")
    if known is not None and not ((known >= 0) & (known < public.n_classes)).all():
        raise ConfigError(f"labels must be classes from 0 to {public.n_classes - 1}; got {known.tolist()}")
    sent = {**evidence.sent, **evidence.buffers}
    fixed = (name for name, value in model.named_parameters() if not value.requires_grad)
    given = (tuple(sent), recorded.form, recorded.known, public.image_shape, public.normalization, *fixed)
    text = _ADDRESS.sub("", repr((given, loss, model, None if known is None else known.tolist())))
    # as numbers of one type: NumPy has no bfloat16
    tensors = [value.cpu().double() for value in (*public.model.state_dict().values(), *sent.values())]
    return _Case(public, found, truth, known, digest(text, *tensors))


def _audited(
    case: _Case,
    loss: Loss,
    defense: Defense | None,
    attacks: Sequence[str],
    minutes: float,
    protection_minutes: float,
    folder: Path | None,
    device: torch.device | str,
    progress: Callable[[str], None],
) -> AuditResult:
    found, truth, identity = case.found, case.truth, case.identity(defense)
    if folder is not None:
        check_kept(folder, identity)
        check_protection(folder / "protection", identity)
    for finding in found.findings:
        progress(f"{finding.kind:<11} {finding.text}")
    labels = None if case.labels is None else case.labels.to(device)
    moved = case.public._replace(model=case.public.model.to(device))
    update = {name: value.to(device) for name, value in found.update.items()}
    statistics = found.statistics
    if statistics is not None:
        statistics = {name: LayerStatistics(*(part.to(device) for part in own)) for name, own in statistics.items()}
    on_device = replace(found, update=update, statistics=statistics)
    seen = on_device.observation(moved, labels, known_defense(found, defense), loss)
    outcomes = run_attacks(seen, minutes, folder, attacks, progress, identity)
    findings, chosen, protection = list(found.findings), best(outcomes), []
    if chosen is not None and chosen.found is not None:
        told = agreement(seen, chosen, found.scaled)
        findings += [told] if told is not None else []
        if (
            protection_minutes
            and not chosen.certified
            and truth is not None
            and error_of(chosen.found.images, truth[0]) >= plain_error(truth[0])
        ):
            findings.append(Finding("open", _NOTHING_TO_STOP))
        elif protection_minutes:
            images, labels = (part.cpu() for part in (chosen.found.images, chosen.found.labels))
            if truth is not None:  # and where its labels are not given, those that came back with its images
                images, labels = truth[0], labels[match(images, truth[0])] if truth[1] is None else truth[1]
            protection = measure_protection(
                seen,
                images,
                labels,
                [one.name for one in outcomes if one.found is not None or one.untried],
                protection_minutes,
                None if folder is None else folder / "protection",
                progress=progress,
                identity=identity,
                known=truth is not None or chosen.certified == seen.n_examples,
            )
    return AuditResult(findings, outcomes, protection, seen.n_examples, truth)


_NOTHING_TO_STOP = (
    "Which defense would have stopped the attacks was not measured: what came back is no closer to the true images "
    "than plain images of their mean color, and so there was nothing to stop."
)


def _goes_on(folder: RunFolder, settings: AuditSettings) -> bool:
    """Whether the audit in this folder goes on though it has ended: it had fewer minutes, or attacks lacked memory."""
    if not folder.is_run:
        return False
    record = folder.path / AUDIT_FILE
    if record.is_file() and NO_MEMORY in record.read_text(encoding="utf-8", errors="replace"):
        return True
    before = read_settings(folder.config)
    had = {name: before.get(name) for name in ("minutes", "protection_minutes")}
    return any(isinstance(value, int | float) and value < getattr(settings, name) for name, value in had.items())


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Find out what an update of your own system gives away.", AuditSettings)
    allow_class_path(settings, "--model")
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, audit the update, and write the report."""
    call = Call(arguments, values, "audit")
    settings = call.settings(AuditSettings)
    configure_process(settings.trainer)
    recorded = settings.read()
    if settings.model.class_path is None:
        raise ConfigError("model.class_path is missing: give the import path of the client's model")
    model = build_module(settings.model.class_path, settings.model.init_args, seed=0)
    loss = settings.loss or cross_entropy
    own = settings.model.image_shape, settings.model.normalization
    case = _prepared(model, recorded, *own, loss, settings.labels, settings.defense)
    device = check_trainer(settings.trainer).device
    may_change = (*SAME_RUN, "minutes", "protection_minutes")
    reopen = _goes_on(call.folder, settings)
    if reopen and not settings.overwrite:
        # before the folder counts as unfinished
        check_kept(call.folder.checkpoints, case.identity(settings.defense))
    folder = RunFolder.open(call.folder.path, call.config, settings.overwrite, may_change, reopen, (AUDIT_FILE,))
    print(f"run folder  {folder.path}", flush=True)
    started = time.perf_counter()
    result = _audited(
        case,
        loss,
        settings.defense,
        settings.attacks,
        settings.minutes,
        settings.protection_minutes,
        folder.checkpoints,
        device,
        progress=lambda line: print(line, flush=True),
    )
    result.write(folder, {"seconds": time.perf_counter() - started})
    print(f"report      {folder.report}")
    if settings.pdf:
        print(f"PDF         {write_pdf(folder.report)}")
