"""Input maps of a strided convolution, with the help of the known input maps of the next convolution.

A strided kernel has the same patches for a map and for the map shifted by whole strides, except at the border: for
every map of the batch the row space of the gradient also contains all shifted ones. Which combination of them is the
map follows from the known maps of the next convolution: between the two are a fixed scale and shift per channel and a
ReLU, which is the identity wherever the next maps are not zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import (
    GAP,
    Convolution,
    PatchProjection,
    covers_everything,
    patch_span,
)
from lit_recon.attacks.updates.feature_maps.input_map import centered
from lit_recon.clients.gradient import pure_copy
from lit_recon.records import Observation
from lit_recon.solving import least_squares

#: Largest number of unknowns of the eigenproblem, places squared times examples: seconds below, minutes above.
_LARGEST = 8192
#: Largest relative residual at which the next convolution's maps count as explained.
_EXPLAINED = 1e-3
#: Entries of a map above this multiple of the absolute value of its lowest entry are certainly not zero.
_ACTIVE = 10.0


class Between(NamedTuple):
    """Operation between two convolutions: `relu(scale * output + shift)`, both `(channels,)`."""

    scale: Tensor
    shift: Tensor


class StridedMaps(NamedTuple):
    """Maps `(n, c, h, w)` of unit norm, share of their patches `outside`, relative `residual` at the next layer."""

    maps: Tensor
    outside: float
    residual: float


def standing_between(observation: Observation, before: Convolution, behind: Convolution) -> Between | None:
    """Scale and shift between two convolutions, from noise images; None for other operations, or statistics of a batch.

    Args:
        observation: of the public model.
        before: its output is scaled, shifted and rectified.
        behind: the next convolution.
    """
    if centered(observation) or before.channels != behind.shape[0]:
        return None
    model = pure_copy(observation.model, "eval")
    seen: dict[str, Tensor] = {}

    def note_output(_: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
        seen["output"] = returned

    def note_input(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen["input"] = given[0]

    model.get_submodule(before.name).register_forward_hook(note_output)
    model.get_submodule(behind.name).register_forward_pre_hook(note_input)
    like = next(iter(observation.parameters.values()))
    images = torch.rand(16, *observation.image_shape, generator=torch.Generator().manual_seed(1)).to(like)
    with torch.no_grad():
        torch.func.functional_call(model, {**observation.parameters, **observation.buffers}, (images,))
    output, given = (seen[name].double().cpu().transpose(0, 1).flatten(1) for name in ("output", "input"))
    if output.shape != given.shape:
        return None
    active = (given > 0).double()
    counts = active.sum(1).clamp_min(1)
    means = (active * output).sum(1) / counts, (active * given).sum(1) / counts
    around = active * (output - means[0][:, None]), active * (given - means[1][:, None])
    spread = around[0].square().sum(1)
    known = spread > 1e-12 * spread.max()  # a channel that noise never activates is unknown and left out
    scale = torch.where(known, (around[0] * around[1]).sum(1) / spread.clamp_min(1e-300), torch.nan)
    shift = means[1] - scale * means[0]
    told = torch.relu(scale[:, None] * output + shift[:, None])[known]
    if not known.any() or float((told - given[known]).norm()) > 1e-4 * float(given[known].norm()):
        return None
    return Between(scale, shift)


def strided_maps(
    observation: Observation, before: Convolution, behind: Convolution, maps: Tensor
) -> StridedMaps | None:
    """Input maps of a strided convolution, in the order of the next one's known maps; None if not determined.

    Args:
        observation: of the victim, in evaluation mode.
        before: the strided convolution.
        behind: the next convolution.
        maps: of the next convolution, `(n, c, h, w)` up to scale.
    """
    n = len(maps)
    fits = before.holds(n) and before.overlaps and before.sparse and covers_everything(before)
    between = standing_between(observation, before, behind) if fits else None
    if between is None or before.places**2 * n > _LARGEST:
        return None
    gradient = observation.update[f"{before.name}.weight"].detach().cpu().double()
    span = patch_span(gradient, before.places * n)
    if span.gap < GAP or span.differences:
        return None
    projection = PatchProjection(before, span)
    factor = projection.dense()
    values, vectors = torch.linalg.eigh(factor @ factor.T)
    inside = vectors[:, -before.places * n :]  # every map with every shift
    outside = float((1 - values[-before.places * n]).clamp_min(0))
    basis = projection.maps(inside.T @ factor)
    weight = observation.parameters[f"{before.name}.weight"].detach().cpu().double()
    images = nn.functional.conv2d(basis, weight, stride=before.stride, padding=before.padding)
    found, residuals = [], []
    for one in maps.cpu():
        mixture, residual = _explaining(images, between, one)
        found.append(torch.einsum("k,kchw->chw", mixture, basis))
        residuals.append(residual)
    if max(residuals) > _EXPLAINED:
        return None
    stacked = torch.stack(found)
    return StridedMaps(nn.functional.normalize(stacked.flatten(1)).view_as(stacked), outside, max(residuals))


def _explaining(images: Tensor, between: Between, one: Tensor) -> tuple[Tensor, float]:
    """Coefficients `(k,)` of the convolved basis `(k, c, h, w)` that give a map `(c, h, w)`, and the residual.

    The scale of the map is one more unknown: scale * mixture + shift = size * map where it is active.
    """
    active = (one > _ACTIVE * float(-one.min().clamp_max(-1e-9))) & ~torch.isnan(between.scale)[:, None, None]
    scaled = (images * between.scale[:, None, None])[:, active]
    shifts = between.shift[:, None, None].expand_as(one)[active]
    system = torch.cat([scaled, -one[active][None]]).T
    solved = least_squares(system, -shifts[:, None])[:, 0]
    residual = (system @ solved + shifts).norm() / shifts.norm()
    size = float(solved[-1])
    return solved[:-1], float(residual) if size > 0 else float("inf")
