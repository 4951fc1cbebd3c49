"""The parts of a user's update brought under the names of his model, or one sentence that says why they do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lit_recon.clients.local_steps import spacing
from lit_recon.clients.record import RecordedUpdate, Sent
from lit_recon.errors import ConfigError, ShapeError

#: `fits`: what was claimed and what was found agree; `found`: it was worked out; `doubt`: it does not agree; `open`: it
#: could not be checked.
Kind = Literal["fits", "found", "doubt", "open"]
#: Prefixes that wrappers of models put before the names of parameters.
_PREFIXES = ("module.", "_orig_mod.", "_module.", "model.", "net.", "network.", "backbone.")
#: Names of the buffers of BatchNorm.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
#: Precisions in which values are seldom computed, but often sent.
_HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """One thing that an audit checked, in a sentence."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Evidence:
    """What a client received and sent, by the names of the model.

    Attributes:
        before: state of the model before the client trained.
        sent: parameters that left the client; those that did not are left out.
        buffers: buffers that left the client.
        precision: the lowest one that has all values that were sent, perhaps a lower one than their type's.
        findings: how names and values were brought into this form.
    """

    before: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    precision: torch.dtype
    findings: tuple[Finding, ...]


def read_evidence(model: nn.Module, update: RecordedUpdate) -> Evidence:
    """The update under the names of the model's state, in its precision, or all in double precision if some of it is.

    Raises:
        ShapeError: names or shapes that no known wrapper explains.
        ConfigError: values that are not finite, or nothing that was sent.
    """
    expected = model.state_dict()
    parameters = dict(model.named_parameters())
    findings: list[Finding] = []
    before = _named(update.before, expected, "the weights before", findings)
    missing = [name for name in expected if name not in before and not name.endswith(_STATISTICS)]
    if missing:
        raise ShapeError(
            f"the weights before lack {listed(missing)}, which {type(model).__name__} has: give the whole "
            "model.state_dict() that the client received"
        )
    absent = [name for name in expected if name not in before]
    if absent:
        findings.append(
            Finding("doubt", f"The weights before lack {listed(absent)}: the model's own values stand in for them.")
        )
    sent = _named(update.sent, expected, "what was sent", findings)
    own = {name: sent[name] for name in parameters if name in sent}
    if not own:
        raise ConfigError(
            "nothing that was sent is a parameter of the model: give tensors by the names of model.state_dict(), such "
            f"as {listed(parameters)}"
        )
    left_out = [name for name in parameters if name not in own]
    if left_out:
        findings.append(
            Finding(
                "found",
                f"{len(left_out)} of {len(parameters)} parameters were not sent ({listed(left_out)}): frozen, or kept "
                "by the client. The attacker treats them as unknown.",
            )
        )
    precision = lowest_precision(own)
    if precision in _HALF:
        text = f"All values were rounded to {_HALF[precision]}."
        findings.append(Finding("found", f"{text} Exact reconstructions need more digits; the rest still holds."))
    if all(not value.any() for value in own.values()):
        raise ConfigError("everything that was sent is zero: the client has not trained, or sent nothing of it")
    complete = {**expected, **before}
    # differences are taken before anything is rounded to the model's precision
    wide = any(value.dtype is torch.float64 for value in (*before.values(), *sent.values()))
    return Evidence(
        {name: _like(value, expected[name], wide) for name, value in complete.items()},
        {name: _like(value, expected[name], wide) for name, value in own.items()},
        {name: _like(value, expected[name], wide) for name, value in sent.items() if name not in parameters},
        precision,
        tuple(findings),
    )


def without_frozen(evidence: Evidence, change: Mapping[str, Tensor], findings: list[Finding]) -> Evidence:
    """The evidence without layers of whose parameters none changed: frozen ones, sent all the same."""
    layers: dict[str, list[str]] = {}
    for name in change:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    frozen = [name for names in layers.values() if not any(change[one].any() for one in names) for name in names]
    if not frozen:
        return evidence
    text = f"{len(frozen)} of {len(change)} parameters that were sent did not change ({listed(frozen)}): frozen layers."
    findings.append(Finding("found", f"{text} The attacker treats them as unknown."))
    return replace(evidence, sent={name: value for name, value in evidence.sent.items() if name not in frozen})


def frozen_parameters(
    evidence: Evidence, change: Mapping[str, Tensor], model: nn.Module, steps: int, findings: list[Finding]
) -> tuple[str, ...]:
    """Parameters that stay in simulated steps: frozen ones that were sent, and of the others those without a gradient.

    The model's `requires_grad` tells of parameters that were not sent, unless it is false for some that changed.
    """
    parameters = dict(model.named_parameters())
    told = all(parameters[name].requires_grad for name, value in change.items() if value.any())
    unsent = [name for name in parameters if name not in change]
    trained = [name for name in unsent if parameters[name].requires_grad or not told]
    if steps > 1 and trained:
        text = (
            f"The attacks assume that all {steps} steps trained the parameters that were not sent, too "
            f"({listed(trained)}): set requires_grad to False in the model for those that stayed as they were."
        )
        findings.append(Finding("open", text))
    sent = (name for name in change if name not in evidence.sent)
    return (*sent, *(name for name in unsent if name not in trained))


def _like(value: Tensor, like: Tensor, wide: bool) -> Tensor:
    return value.detach().cpu().to(torch.float64 if wide and like.is_floating_point() else like.dtype)


def _named(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, findings: list[Finding]
) -> dict[str, Tensor]:
    """The tensors by the model's names, without a wrapper's prefix."""
    if not found:
        raise ConfigError(f"{what} hold no tensor: give a state dict, or a gradient by the same names")
    prefix = _prefix(found, expected)
    if prefix is None:
        unknown = [name for name in found if name not in expected]
        raise ShapeError(
            f"{what} name {listed(unknown)}, which the model does not have; its names are {listed(expected)}: give "
            "the model whose state_dict() has these names, or rename them"
        )
    if prefix:
        findings.append(Finding("found", f"The names of {what} begin with {prefix!r}, which was taken off."))
    named = {name.removeprefix(prefix): value for name, value in found.items()}
    for name, value in named.items():
        shape = expected[name].shape
        if value.shape != shape:
            hint = "change the model's arguments, or give the state of this model"
            if value.dim() >= 2 and sorted(value.shape) == sorted(shape):
                hint = "its axes are in another order, as other frameworks store them: permute them to PyTorch's"
            raise ShapeError(f"{what}: {name} is {tuple(value.shape)}, but {tuple(shape)} in the model: {hint}")
        if expected[name].is_floating_point() and not value.is_floating_point():
            raise ShapeError(
                f"{what}: {name} is of type {value.dtype}: give real numbers; quantized ones times their scale"
            )
    broken = [name for name, value in named.items() if not value.isfinite().all()]
    if broken:
        raise ConfigError(
            f"{what} hold NaN or infinite values in {listed(broken)}: the client's training overflowed, and no attack "
            "can use it; record another round"
        )
    return named


def _prefix(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """The prefix without which all names are the model's; None if there is none."""
    first = next(iter(found))
    candidates = ["", *_PREFIXES, *(first[: len(first) - len(name)] for name in expected if first.endswith(name))]
    for prefix in dict.fromkeys(candidates):
        if all(name.startswith(prefix) and name.removeprefix(prefix) in expected for name in found):
            return prefix
    return None


def lowest_precision(values: Mapping[str, Tensor]) -> torch.dtype:
    """The lowest precision that has all values."""
    for dtype in (*_HALF, torch.float32):
        if all(torch.equal(value.to(dtype).to(value.dtype), value) for value in values.values()):
            return dtype
    return torch.float64


def weights_precision(evidence: Evidence, form: Sent) -> torch.dtype:
    """The precision of the weights that the client trained, which a difference of them need not have."""
    if form == "weights" or evidence.precision is torch.float64:
        return evidence.precision
    before = {name: evidence.before[name] for name in evidence.sent}
    held = lowest_precision(before)
    # a server may round what it sends to clients who train in single precision
    after = torch.cat([(before[name].double() - value)[value != 0] for name, value in evidence.sent.items()])
    kept = float((after.to(held).double() == after).double().mean())
    return held if held in _HALF and kept > 0.5 else torch.float32


def spacing_in(values: Tensor, precision: torch.dtype) -> Tensor:
    """The distance between numbers of a precision at the values; 0 at 0."""
    own = spacing(values) * (torch.finfo(precision).eps / torch.finfo(values.dtype).eps)
    return torch.where(values == 0, 0.0, own)


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
