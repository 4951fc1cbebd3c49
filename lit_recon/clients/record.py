"""Recorded updates: what left a real client, in one file, with what is known of how it was made.

In a training loop of any framework that trains a `torch.nn.Module`:

    # before the client trains: 320 images in 10 batches, one epoch
    recorder = Recorder(model, batch_size=320, batches=10, steps=10, lr=0.01)
    ...
    recorder.save("update.safetensors", model)  # afterwards
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lit_recon.clients.local_steps import Optimizer
from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.io.tensors import TensorFormat
from lit_recon.records import BatchNormMode

#: What a client sent: the gradient, weights before minus after, or the new weights.
Sent = Literal["gradient", "difference", "weights"]

_FORMAT = TensorFormat(
    "lit_recon_update",
    "recorded update",
    "record it with lit_recon.clients.record.Recorder, or give the parts as files",
)
_PARTS = ("before", "sent", "truth")
#: Numbers of `Circumstances`: names, what they are instances of, as what they are kept, and that in words.
_NUMBERS: tuple[tuple[tuple[str, ...], Any, Any, str], ...] = (
    (("steps", "batches", "batch_size"), Integral, int, "whole numbers"),
    (("lr", "momentum", "weight_decay"), Real, float, "numbers"),
)


@dataclass(frozen=True)
class Circumstances:
    """What is known of how a client made its update; None: unknown.

    Args:
        batch_size: images that the client trained on, in all its steps together.
        steps: optimizer steps; with several, every step takes the next of `batches` equal parts of the images.
        batches: parts of equal size that the images are divided into, each for one step at a time; 1: every step takes
            all images.
        lr: learning rate; None: the update is in units of a gradient, or the rate is unknown.
        momentum, weight_decay: of SGD; Adam has no momentum.
        batch_norm: BatchNorm layers used running (`eval`) or batch statistics (`train`).
        optimizer: `sgd`, or `adam` (its other settings as by default; weight decay as in AdamW).
    """

    batch_size: int | None = None
    steps: int = 1
    batches: int = 1
    lr: float | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_norm: BatchNormMode | None = None
    optimizer: Optimizer = "sgd"

    def __post_init__(self) -> None:
        for names, kind, to, what in _NUMBERS:
            for name in names:
                given = getattr(self, name)
                value = given.item() if isinstance(given, Tensor) and given.dim() == 0 else given
                if value is None and name in ("batch_size", "lr"):
                    continue
                if isinstance(value, bool) or not isinstance(value, kind):
                    raise ConfigError(f"{', '.join(names)} must be {what}; got {name}={given!r}")
                # numbers of NumPy cannot be written as JSON
                object.__setattr__(self, name, to(value))
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1 image; got {self.batch_size}")
        if not 1 <= self.batches <= self.steps:
            raise ConfigError(
                f"every part of the images is used, so steps must be at least batches, and both at least 1; got "
                f"steps={self.steps} and batches={self.batches}"
            )
        if self.batch_size is not None and self.batch_size % self.batches:
            raise ConfigError(
                f"batch_size={self.batch_size} must be a multiple of batches={self.batches}, as the attacks simulate "
                "steps on equal parts of the images: check both numbers, or record a client without an incomplete last "
                "batch (drop_last)"
            )
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ConfigError(f"lr must be a positive number; got {self.lr:g}")
        if self.optimizer not in get_args(Optimizer) or (self.optimizer == "adam" and self.momentum):
            raise ConfigError(
                f"optimizer must be sgd, or adam without momentum; got {self.optimizer!r} and {self.momentum:g}"
            )
        if self.batch_norm not in (None, "eval", "train"):
            raise ConfigError(f"batch_norm must be eval or train; got {self.batch_norm!r}")
        if not 0 <= self.momentum < 1 or not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(
                f"momentum must be in [0, 1) and weight_decay at least 0; got {self.momentum:g} and "
                f"{self.weight_decay:g}"
            )


@dataclass(frozen=True)
class RecordedUpdate:
    """What a client received and sent.

    Attributes:
        before: parameters and buffers that the client began with, by the names of `model.state_dict()`.
        sent: what left the client, by the same names; buffers, or some parameters, may be missing.
        form: what `sent` is.
        known: of how it was made.
        truth: the client's `images` `(n, c, h, w)` in [0, 1] and `labels` `(n,)`, to score an audit; never for attacks.
    """

    before: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]
    form: Sent | None = None
    known: Circumstances = field(default_factory=Circumstances)
    truth: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_form(self.form)

    def save(self, path: Path | str) -> Path:
        """Write one .safetensors file, and the truth beside it as `NAME.truth.safetensors`; without one, none stays."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise ConfigError(f"a recorded update is a .safetensors file; got {path}: choose another name")
        tensors = {f"{part}/{name}": value for part in _PARTS[:2] for name, value in getattr(self, part).items()}
        _FORMAT.write(path, tensors, {"form": self.form, **asdict(self.known)})
        truth_of(path).unlink(missing_ok=True)  # that of the file which was replaced
        if self.truth:
            _FORMAT.write(truth_of(path), {f"truth/{name}": value for name, value in self.truth.items()}, {})
        return path

    @staticmethod
    def load(path: Path | str) -> RecordedUpdate:
        """Read a file of `save` and the truth beside it; MissingDataError or CorruptFileError for bad files."""
        path = Path(path)
        header, tensors = _FORMAT.read(path)
        if truth_of(path).is_file():
            tensors |= _FORMAT.read(truth_of(path))[1]
        found: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
        for name, value in tensors.items():
            part, _, own = name.partition("/")
            if part in found:
                found[part][own] = value
        form = header.get("form")
        if not found["before"] or not found["sent"] or form not in (None, *get_args(Sent)):
            raise CorruptFileError(f"{path} does not hold weights before and an update: record it again")
        try:
            known = Circumstances(**{one.name: header[one.name] for one in fields(Circumstances) if one.name in header})
        except (TypeError, ValueError, OverflowError, ConfigError) as error:
            raise CorruptFileError(f"{path} states impossible circumstances ({error}): record it again") from error
        return RecordedUpdate(found["before"], found["sent"], form, known, found["truth"])


def require_form(form: Sent | None) -> None:
    """Raise a `ConfigError` for a form that is not one of `Sent`."""
    if form not in (None, *get_args(Sent)):
        raise ConfigError(f"form must be one of {', '.join(get_args(Sent))}; got {form!r}")


def truth_of(path: Path) -> Path:
    """Where the images of a recorded update are kept: not in the file that an attacker sees."""
    return path.with_suffix(".truth.safetensors")


class Recorder:
    """Records what a client receives and sends.

    Args:
        model: as the client receives it; its state is copied at once.
        **known: see `Circumstances`.
    """

    def __init__(self, model: nn.Module, **known: Any) -> None:
        self.before = _copied(model.state_dict())
        self.known = Circumstances(**known)

    def record(
        self,
        sent: nn.Module | Mapping[str, Tensor],
        form: Sent = "weights",
        images: Tensor | None = None,
        labels: Tensor | Sequence[int] | None = None,
    ) -> RecordedUpdate:
        """The trained model, or what leaves the client instead; `images` and `labels` are for scoring only."""
        state = sent.state_dict() if isinstance(sent, nn.Module) else sent
        truth = {} if images is None else {"images": images.detach().clone()}
        if labels is not None:
            truth["labels"] = torch.as_tensor(labels).detach().clone()
        return RecordedUpdate(self.before, _copied(state), form, self.known, truth)

    def save(self, path: Path | str, sent: nn.Module | Mapping[str, Tensor], **more: Any) -> Path:
        """`record`, and write the file."""
        return self.record(sent, **more).save(path)

    def save_gradient(self, path: Path | str, model: nn.Module, **more: Any) -> Path:
        """Write the gradients that `loss.backward()` left in the model's parameters."""
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        if not gradients:
            raise ConfigError("no parameter of the model has a gradient: call save_gradient after loss.backward()")
        return self.save(path, gradients, form="gradient", **more)


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}
