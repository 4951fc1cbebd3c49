"""Buffers of BatchNorm: how the layers ran, how many steps they counted, and mean and variance of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_recon.clients.record import Circumstances, Sent
from lit_recon.experiments.audit.evidence import Evidence, Finding
from lit_recon.models.classifiers.foreign import PublicModel
from lit_recon.records import BatchStatistics, LayerStatistics

_MODES = {"train": "the statistics of the batch", "eval": "its running statistics"}


class BatchNormFacts(NamedTuple):
    """Statistics of the client's batch, where they follow, and the circumstances with what was counted."""

    statistics: BatchStatistics | None
    known: Circumstances
    findings: list[Finding]


def batch_norm_facts(public: PublicModel, evidence: Evidence, form: Sent, known: Circumstances) -> BatchNormFacts:
    """What the running statistics before and after tell; the batch size is known."""
    layers = {name: layer for name, layer in public.model.named_modules() if isinstance(layer, _BatchNorm)}
    after = {name: buffers for name in layers if (buffers := _after(evidence, name, form))}
    findings: list[Finding] = []
    if not layers:
        return BatchNormFacts(None, replace(known, batch_norm=known.batch_norm or "eval"), findings)
    if not after:
        claim = "as claimed" if known.batch_norm else "as is usual"
        known = replace(known, batch_norm=known.batch_norm or "train")
        text = (
            f"No statistics of BatchNorm were sent; the client is taken to have used {_MODES[_mode(known)]}, {claim}."
        )
        return BatchNormFacts(None, known, [Finding("found", text)])
    moved = any(not torch.equal(new["running_mean"], _before(evidence, name)) for name, new in after.items())
    mode: Any = "train" if moved else "eval"
    if known.batch_norm not in (None, mode):
        text = (
            f"BatchNorm is said to have used {_MODES[_mode(known)]}, but its running statistics "
            f"{'moved' if moved else 'did not move'}: it used {_MODES[mode]}."
        )
        findings.append(Finding("doubt", text))
    known = replace(known, batch_norm=mode)
    if not moved:
        findings.append(Finding("found", f"The statistics of BatchNorm did not move: the client used {_MODES[mode]}."))
        return BatchNormFacts(None, known, findings)
    counted = [
        int(new["num_batches_tracked"] - evidence.before[f"{name}.num_batches_tracked"])
        for name, new in after.items()
        if "num_batches_tracked" in new
    ]
    if counted and counted[0] != known.steps:
        text = f"{known.steps} steps are claimed, but BatchNorm counted {counted[0]} batches: so many are assumed."
        findings.append(Finding("doubt", text))
        known = replace(known, steps=max(counted[0], known.batches))
    cumulative = any(layer.momentum is None for layer in layers.values())
    if known.steps > 1 or len(after) < len(layers) or cumulative:
        text = "The statistics of BatchNorm moved; those of a single batch do not follow from them."
        return BatchNormFacts(None, known, [*findings, Finding("found", text)])
    text = (
        "The statistics of BatchNorm were sent: with them the attacker knows mean and variance of the client's batch "
        "at every layer."
    )
    statistics = _of_batch(public, evidence, layers, after, known.batch_size or 1)
    return BatchNormFacts(statistics, known, [*findings, Finding("found", text)])


def _mode(known: Circumstances) -> str:
    return known.batch_norm or "train"


def _before(evidence: Evidence, layer: str) -> Tensor:
    return evidence.before[f"{layer}.running_mean"]


def _after(evidence: Evidence, layer: str, form: Sent) -> dict[str, Tensor]:
    """The buffers of a layer after the training; empty if they were not sent."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    sent = {name: evidence.buffers[key] for name in names if (key := f"{layer}.{name}") in evidence.buffers}
    if not {"running_mean", "running_var"} <= sent.keys() or form == "weights":
        return sent if "running_mean" in sent and "running_var" in sent else {}
    # of a difference only the count of batches, which grows, tells which side was subtracted
    sign = 1 if int(sent.get("num_batches_tracked", torch.tensor(-1))) > 0 else -1
    return {name: evidence.before[f"{layer}.{name}"] + sign * value for name, value in sent.items()}


def _of_batch(
    public: PublicModel,
    evidence: Evidence,
    layers: dict[str, _BatchNorm],
    after: dict[str, dict[str, Tensor]],
    n: int,
) -> BatchStatistics:
    """Statistics of the only batch: running ones move towards them by the layer's momentum."""
    places, found = _places(public.model, public.image_shape), {}
    for name, layer in layers.items():
        rate, count = float(layer.momentum or 0.0), n * places[name]
        mean, var = (
            (after[name][part] - (1 - rate) * evidence.before[f"{name}.{part}"]) / rate
            for part in ("running_mean", "running_var")
        )
        # running variances are unbiased, those of a batch are not
        found[name] = LayerStatistics(mean, var.clamp_min(0) * (count - 1) / count)
    return found


def _places(model: nn.Module, image_shape: tuple[int, int, int]) -> dict[str, int]:
    """Number of positions that each BatchNorm layer averages over, per image."""
    found: dict[str, int] = {}
    hooks = []

    def note(name: str, given: tuple[Any, ...]) -> None:
        found[name] = given[0][0, 0].numel()

    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            hooks.append(layer.register_forward_pre_hook(lambda _, given, name=name: note(name, given)))
    with torch.no_grad():
        model(torch.zeros(2, *image_shape))
    for hook in hooks:
        hook.remove()
    return found
