"""The maps that entered a convolution, one per example of the batch, computed from the convolution's gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import (
    GAP,
    Convolution,
    PatchProjection,
    covers_everything,
    find_convolutions,
    patch_span,
)
from lit_recon.attacks.updates.feature_maps.separation import Separated, leading_eigenspace, separate
from lit_recon.attacks.updates.feature_maps.strided import strided_maps
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Observation

#: Mean squared share of a map's patches outside their span, up to which it counts as inside.
OUTSIDE = 1e-4
#: Share of a separated map's norm below zero, up to which it counts as non-negative.
NEGATIVE = 1e-2
#: Numbers in a map for every number in an image, from which on maps nearer to the image are not worth their cost.
ENOUGH = 4
#: Angles between rows that count as none, tried in turn: rounding, then what noise leaves.
TOLERANCES = (1e-4, 1e-3, 1e-2)


@dataclass(frozen=True)
class RecoveredMaps:
    """Maps that entered a convolution.

    Attributes:
        convolution: which one.
        maps: `(n, c, h, w)` of unit norm, in an order of their own; float64.
        outside: mean squared share of their patches outside the gradient's row space; rounding where they are exact.
        next_outside: the same of the best other map; the further above `outside`, the surer.
        negative: greatest share of a map's norm below zero; rounding where they are exact.
        support: entries at which the rarest map was seen alone.
    """

    convolution: Convolution
    maps: Tensor
    outside: float
    next_outside: float
    negative: float
    support: int


class MapRecovery:
    """Exact input maps of one convolution, for every example of a batch, from one released gradient.

    Three steps, none of which looks at labels, at the other layers or at images: the row space of the weight gradient
    is spanned by the batch's patches; the maps all of whose patches lie in it form the span of the batch's maps; behind
    a ReLU these are found in it as the non-negative maps with entries of their own. It holds for any loss and for
    BatchNorm in either mode, as long as the convolution has more output channels than the batch has patches
    (ResNet-18 on 32x32 images: batches of 4 in the third stage, of 31 in the fourth).

    A result is returned only with a certificate: as many maps as examples lie in the span, the next one clearly does
    not, and the separated maps are not negative.

    Args:
        layers: names of convolutions to try, in this order; default: all that qualify, from the image on.
        seed: of the iterations' first block.
    """

    def __init__(self, layers: list[str] | None = None, seed: int = 0) -> None:
        if layers is not None and not layers:
            raise ConfigError("MapRecovery needs at least one layer, or null for all that qualify")
        self.layers, self.seed = layers, seed

    def __call__(self, observation: Observation) -> RecoveredMaps:
        """The maps of the first convolution whose certificate holds.

        Raises:
            UnsupportedModelError: no convolution qualifies for a batch of this size, or none gave its maps away; says
                why for each.
            ConfigError: a layer that was asked for is not a plain convolution of the model.
        """
        n = observation.n_examples
        reasons: list[str] = []
        candidates = self._candidates(observation)
        for i, convolution in enumerate(candidates):
            reason = unfit(convolution, n)
            if reason is None:
                gradient = observation.update[f"{convolution.name}.weight"].detach().cpu().double()
                found = recover_maps(convolution, gradient, n, self.seed)
                if isinstance(found, RecoveredMaps):
                    return _closer(observation, candidates[i - 1], found) if i > 0 else found
                reason = found
            reasons.append(f"{convolution.name}: {reason}")
        raise UnsupportedModelError(
            f"no convolution gives the maps of a batch of {n} away ({'; '.join(reasons) or 'the model has none'}): "
            "attack smaller batches, or match gradients instead"
        )

    def _candidates(self, observation: Observation) -> list[Convolution]:
        known = {convolution.name: convolution for convolution in find_convolutions(observation)}
        if self.layers is None:
            return list(known.values())
        missing = [name for name in self.layers if name not in known]
        if missing:
            raise ConfigError(f"{missing[0]!r} is no plain convolution of the model; there are {', '.join(known)}")
        return [known[name] for name in self.layers]


def unfit(convolution: Convolution, n_examples: int) -> str | None:
    """Why maps of so many examples cannot be had from this convolution; None if they can."""
    if not convolution.holds(n_examples):
        most = min(convolution.channels, convolution.patch_size - 1) // convolution.places
        return f"{convolution.places} places and {convolution.channels} channels allow batches of {most}"
    if not convolution.every_step or not convolution.overlaps:
        return "its kernel skips entries"
    if not convolution.sparse:
        return "its input is not that of a ReLU"
    return None if covers_everything(convolution) else "its kernel does not reach every entry"


def recover_maps(convolution: Convolution, gradient: Tensor, n_examples: int, seed: int = 0) -> RecoveredMaps | str:
    """The maps, or why there are none.

    Args:
        convolution: fit for so many examples, see `unfit`.
        gradient: of its weights, float64.
        n_examples: batch size `n`.
        seed: of the iteration's first block.
    """
    if not gradient.any():
        return "its gradient is zero"
    span = patch_span(gradient, convolution.places * n_examples)
    if span.gap < GAP:
        patches = convolution.places * n_examples
        return f"its gradient has not the rank of {patches} patches (singular values fall {span.gap:.2g} fold there)"
    projection = PatchProjection(convolution, span)
    space = leading_eigenspace(projection, math.prod(convolution.shape), n_examples + 1, seed=seed)
    outside, following = (1 - space.values[-2:]).clamp_min(0).tolist()
    if outside > OUTSIDE or following < GAP * outside:
        return f"no {n_examples} maps have their patches in its gradient ({outside:.1g} outside, next {following:.1g})"
    basis = torch.linalg.qr(projection.maps(space.vectors[:n_examples]).flatten(1).T)[0]
    for tolerance in TOLERANCES:
        single = separate(basis, tolerance, seed)
        if single is not None and single.negative < NEGATIVE:
            return _recovered(convolution, single, outside, following)
    return "the maps of the batch cannot be told apart"


def _closer(observation: Observation, before: Convolution, found: RecoveredMaps) -> RecoveredMaps:
    """The maps before the previous convolution, which has to be one in steps; else those that were found."""
    enough = math.prod(found.convolution.shape) >= ENOUGH * math.prod(observation.image_shape)
    if before.every_step or enough:
        return found
    strided = strided_maps(observation, before, found.convolution, found.maps)
    if strided is None or strided.outside > OUTSIDE:
        return found
    negative = float(strided.maps.flatten(1).clamp_max(0).norm(dim=1).max())
    if negative > NEGATIVE:
        return found
    return replace(found, convolution=before, maps=strided.maps, outside=strided.outside, negative=negative)


def _recovered(convolution: Convolution, single: Separated, outside: float, following: float) -> RecoveredMaps:
    maps = single.maps.view(-1, *convolution.shape)
    return RecoveredMaps(convolution, maps, outside, following, single.negative, single.support)
