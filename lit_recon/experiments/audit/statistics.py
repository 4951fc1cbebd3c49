"""Buffers of BatchNorm: how the layers ran, steps counted, mean and variance of the batch, and of its pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lit_recon.clients.record import Circumstances, Sent
from lit_recon.defenses import Defense
from lit_recon.experiments.audit.evidence import (
    Evidence,
    Finding,
    listed,
    lowest_precision,
    spacing_in,
    weights_precision,
)
from lit_recon.models.classifiers.foreign import PublicModel
from lit_recon.records import BatchStatistics, LayerStatistics
from lit_recon.solving import least_squares

#: Correlation of neighboring pixels and of colors in photographs; digits have less.
_NEIGHBORS, _COLORS = 0.95, 0.9
#: Misfit of the first layer's means, relative to its outputs' root mean square, that no pixel means explain.
_MISFIT = 0.2
#: Standard deviations of pixels in [0, 1] that sets of images have: CIFAR-10 0.25, MNIST 0.31. Pixels of which one half
#: is black, the other white, have 0.5.
_LEAST, _LARGEST = 0.06, 0.45
#: Part of running statistics that may still be that of a new layer; layers with cumulative means have no such part.
_FORGOTTEN = 0.05
#: How far means may lie outside [0, 1].
_OUTSIDE = 0.1
#: Errors of rounding above which statistics of the batch are not known: of means in standard deviations of the layer's
#: inputs, of variances relative to them.
_BLURRED = 0.01
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
    running = {f"{name} {part}": new[part] for name, new in after.items() for part in ("running_mean", "running_var")}
    precision = lowest_precision(running) if form == "weights" else weights_precision(evidence, form)
    moved = {name for name, new in after.items() if _moved(_before(evidence, name), new["running_mean"], precision)}
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
    if counted and max(counted) != known.steps:  # layers that are frozen or not used count none
        text = f"{known.steps} steps are claimed, but BatchNorm counted {max(counted)} batches: so many are assumed."
        findings.append(Finding("doubt", text))
        known = replace(known, steps=max(*counted, known.batches))
    used = {call.name for call in _calls(public, (_BatchNorm,))}
    still = [name for name in after if name in used - moved and layers[name].momentum != 0]
    if still:
        text = (
            f"BatchNorm used the statistics of the batch, but its running ones in {listed(still)}: the attacks "
            "simulate those of the batch in every layer, and are given none."
        )
        return BatchNormFacts(None, known, [*findings, Finding("doubt", text)])
    cumulative = any(layer.momentum is None for layer in layers.values())
    if known.steps > 1 or len(after) < len(layers) or cumulative:
        text = "The statistics of BatchNorm moved; those of a single batch do not follow from them."
        return BatchNormFacts(None, known, [*findings, Finding("found", text)])
    statistics = _of_batch(public, evidence, layers, after, known.batch_size or 1)
    errors = {name: _error(layers[name], after[name], found, precision) for name, found in statistics.items()}
    blurred = [name for name, error in errors.items() if error > _BLURRED]
    if blurred:
        text = (
            f"The statistics of BatchNorm moved, but those of the batch do not follow in {listed(blurred)}, so few "
            "digits did rounding leave: the attacks are given none."
        )
        return BatchNormFacts(None, known, [*findings, Finding("found", text)])
    text = (
        "The statistics of BatchNorm were sent: with them the attacker knows mean and variance of the client's batch "
        "at every layer."
    )
    return BatchNormFacts(statistics, known, [*findings, Finding("found", text)])


def normalization_finding(public: PublicModel) -> Finding | None:
    """Whether pixels in [0, 1] under the given normalization fit the first BatchNorm layer; the weights are loaded.

    The running means of the outputs of a convolution are its filters' sums times the mean pixel, the running variances
    are sums over pairs of pixels of the filter, whose covariances are the variance of a pixel times a correlation.

    Returns:
        None if the first layer is no convolution with BatchNorm behind it, or its statistics are still those that a new
        layer begins with.
    """
    first = _first_layers(public)
    if first is None:
        return None
    convolution, norm = first
    weight = convolution.weight.detach().double()
    mean, var = (value.detach().double() for value in (norm.running_mean, norm.running_var) if value is not None)
    count = 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)
    if count == 0 or (norm.momentum is not None and (1 - norm.momentum) ** count > _FORGOTTEN):
        return None
    if convolution.bias is not None:
        mean = mean - convolution.bias.detach().double()
    sums = weight.sum(dim=(2, 3))
    pixel = least_squares(sums, mean)
    if float((sums @ pixel - mean).norm()) > _MISFIT * float((mean.square() + var).sum().sqrt()):
        return None
    shift, scale = (value.flatten().double() for value in public.normalization.tensors(mean))
    spread = float((var.sum() / _filtered(weight).sum()).sqrt())
    means, spreads = pixel * scale + shift, spread * scale
    told = (
        f"The statistics of the first BatchNorm layer are those of pixels with mean {_range(means)} and standard "
        f"deviation {_range(spreads)}"
    )
    possible = float(means.min()) > -_OUTSIDE and float(means.max()) < 1 + _OUTSIDE
    if possible and float(spreads.min()) > _LEAST and float(spreads.max()) < _LARGEST:
        return Finding("fits", f"{told}, as images in [0, 1] under the given normalization can have.")
    return Finding(
        "doubt",
        f"{told} if the given normalization is right, which images in [0, 1] hardly have: give the normalization that "
        "the client applies to its images.",
    )


def dropout_finding(public: PublicModel, defense: Defense | None = None) -> Finding | None:
    """That masks of dropout are not known, if the model has such layers and no told defense simulates them."""
    if defense is not None and defense.drops_inputs:
        return None
    layers = public.model.named_modules()
    active = [name for name, layer in layers if isinstance(layer, _DropoutNd) and layer.p > 0]
    if not active:
        return None
    return Finding(
        "open",
        f"The attacks simulate the client without dropout ({listed(active)}): if it was on, its masks are not known, "
        "and images explain the update less well. If it drops inputs of linear layers, give NetworkDropout as defense.",
    )


def _range(values: Tensor) -> str:
    low, high = (f"{float(value):.2f}" for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def _filtered(weight: Tensor) -> Tensor:
    """Variance of the outputs of filters `(o, c, h, w)` on pixels of variance one, correlated as in photographs."""
    _, channels, height, width = weight.shape
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).double()
    near = _NEIGHBORS ** torch.cdist(places, places)
    colors = torch.full((channels, channels), _COLORS, dtype=weight.dtype).fill_diagonal_(1)
    flat = weight.flatten(2)
    return torch.einsum("oci,cd,ij,odj->o", flat, colors, near, flat)


def _first_layers(public: PublicModel) -> tuple[nn.Conv2d, _BatchNorm] | None:
    """The convolution that takes the images, and the BatchNorm layer that takes its outputs."""
    called = _calls(public, (nn.Conv2d, _BatchNorm))
    if len(called) < 2:
        return None
    (_, convolution, images, maps), (_, norm, given, _) = called[:2]
    fits = isinstance(convolution, nn.Conv2d) and convolution.groups == 1 and images.shape[1:] == public.image_shape
    if fits and isinstance(norm, _BatchNorm) and given is maps and norm.running_mean is not None:
        assert isinstance(convolution, nn.Conv2d)
        return convolution, norm
    return None


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
    # positions that each layer averages over, per image
    places, found = {call.name: call.given[0, 0].numel() for call in _calls(public, (_BatchNorm,))}, {}
    for name, layer in layers.items():
        if name not in places or not layer.momentum:  # the forward pass does not use it, or nothing moves it
            continue
        rate, count = float(layer.momentum), n * places[name]
        mean, var = (
            (after[name][part] - (1 - rate) * evidence.before[f"{name}.{part}"]) / rate
            for part in ("running_mean", "running_var")
        )
        # running variances are unbiased, those of a batch are not
        own = layer.running_mean if layer.running_mean is not None else mean
        found[name] = LayerStatistics(mean.to(own.dtype), (var.clamp_min(0) * (count - 1) / count).to(own.dtype))
    return found


def _rounding(values: Tensor, precision: torch.dtype) -> Tensor:
    """The largest errors of rounding to a precision."""
    kind = torch.finfo(precision)
    return 0.5 * spacing_in(values, precision).clamp_min(kind.smallest_normal * kind.eps)


def _moved(before: Tensor, after: Tensor, precision: torch.dtype) -> bool:
    """Whether values changed by more than rounding to the precision of what was sent changes them."""
    return bool(((after - before).abs() > _rounding(before, precision)).any())


def _error(layer: _BatchNorm, after: dict[str, Tensor], found: LayerStatistics, precision: torch.dtype) -> float:
    """How large errors of the batch's statistics may be for the rounding of the running ones, which momentum enlarges.

    Returns:
        That of the means in standard deviations, or that of the variances in variances, whichever is larger.
    """
    mean, var = (
        _rounding(after[part], precision) / float(layer.momentum or 1) for part in ("running_mean", "running_var")
    )
    own = found.var + layer.eps
    return float(torch.maximum(mean.norm() / own.sum().sqrt(), var.norm() / own.norm()))


class _Call(NamedTuple):
    """A layer in a forward pass: its name, what it was given, and what it returned."""

    name: str
    layer: nn.Module
    given: Tensor
    returned: Tensor


def _calls(public: PublicModel, kinds: tuple[type[nn.Module], ...]) -> list[_Call]:
    """The calls of layers of some kinds in a forward pass, in their order."""
    found: list[_Call] = []
    hooks = [
        layer.register_forward_hook(
            lambda layer, given, returned, name=name: found.append(_Call(name, layer, given[0], returned))
        )
        for name, layer in public.model.named_modules()
        if isinstance(layer, kinds)
    ]
    like = next(value for value in public.model.parameters() if value.is_floating_point())
    with torch.no_grad():
        public.model(like.new_zeros(2, *public.image_shape))
    for hook in hooks:
        hook.remove()
    return found
