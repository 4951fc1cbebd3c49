"""Recovery of a convolution's input maps, one per image, from its weight gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.completion import CompletedMatrix, complete
from lit_recon.attacks.updates.feature_maps.convolutions import (
    GAP,
    Convolution,
    PatchProjection,
    PatchSpan,
    covers_everything,
    defense_hides,
    find_convolutions,
    hidden_entries,
    patch_span,
    without_constants,
)
from lit_recon.attacks.updates.feature_maps.input_map import centered
from lit_recon.attacks.updates.feature_maps.observed_rows import without_censored
from lit_recon.attacks.updates.feature_maps.strided import strided_maps
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Observation
from lit_recon.solving import leading_eigenspace

#: Rows shorter than this, relative to the longest, count as zero.
_SHORT = 1e-3
#: Entries of a map below this multiple of the absolute value of its lowest entry count as zero.
_MOVED = 2.0
#: Number of rows that are compared with all others.
_CANDIDATES = 3000
#: Smallest number of parallel rows that identifies a map.
_ENOUGH = 4
#: Cosine above which two images have the same map.
_SAME_MAP = 0.999


class Separated(NamedTuple):
    """Maps `(n, N)` of unit norm, the share of their norm below zero, and the least `support` of a map."""

    maps: Tensor
    negative: float
    support: int


def separate(basis: Tensor, tolerance: float = 1e-4, seed: int = 0) -> Separated | None:
    """Non-negative maps, up to order and scale, from a basis `(N, n)` of their span; None if they are not separable.

    Args:
        basis: orthonormal columns.
        tolerance: sine of the angle below which two rows are parallel.
        seed: of the rows that are compared with all others.

    >>> maps = torch.tensor([[1.0, 0, 2, 3, 0, 1, 0, 5, 3], [0, 1.0, 2, 0, 3, 0, 2, 1, 4]], dtype=torch.float64)
    >>> found = separate(torch.linalg.qr(maps.T)[0], seed=1)
    >>> sorted((found.maps / found.maps.amax(1, keepdim=True) > 1e-9).sum(1).tolist())
    [6, 6]
    """
    n = basis.shape[1]
    norms = basis.norm(dim=1)
    long = norms > _SHORT * norms.max()
    rows = basis[long] / norms[long, None]
    generator = torch.Generator().manual_seed(seed)
    candidates = rows[torch.randperm(len(rows), generator=generator)[:_CANDIDATES]]
    counts = torch.cat([_parallel(part, rows, tolerance) for part in candidates.split(500)])
    directions: list[Tensor] = []
    support: list[int] = []
    for i in counts.argsort(descending=True, stable=True).tolist():
        if len(directions) == n or counts[i] < min(_ENOUGH, 1 + len(rows) // (4 * n)):
            break
        if all(float(_sine(candidates[i], other)) > 10 * tolerance for other in directions):
            directions.append(candidates[i])
            support.append(int(counts[i]))
    if len(directions) < n:
        return None
    rays = torch.stack(directions)
    if torch.linalg.svdvals(rays)[-1] < 1e-6:
        return None
    maps = torch.linalg.solve(rays.T, basis.T)
    for _ in range(2):
        maps = torch.stack([_sharpened(basis, one) for one in maps])
    return Separated(maps, float(maps.clamp_max(0).norm(dim=1).max()), min(support))


def _sharpened(basis: Tensor, one: Tensor) -> Tensor:
    """The map in the span with the least norm on the near-zero entries of `one`."""
    # maps are non-negative: negative entries show the size of rounding and noise
    vanishing = basis[one <= _MOVED * float(-one.min())]
    if len(vanishing) < 4 * basis.shape[1]:
        return torch.nn.functional.normalize(one, dim=0)
    _, vectors = torch.linalg.eigh(vanishing.T @ vanishing)
    sharper = basis @ vectors[:, 0]
    return torch.nn.functional.normalize(sharper * torch.sign(sharper @ one), dim=0)


def _parallel(candidates: Tensor, rows: Tensor, tolerance: float) -> Tensor:
    """Number of rows parallel to each candidate; all of unit norm."""
    # 1 - cos = sin^2 / 2 for small angles
    least = 1 - tolerance**2 / 2 - 4 * torch.finfo(rows.dtype).eps
    return (candidates @ rows.T > least).sum(dim=1)


def _sine(one: Tensor, other: Tensor) -> Tensor:
    sine: Tensor = (one - (one @ other) * other).norm()
    return sine


#: Largest mean squared share of a map's patches outside the span for it to count as inside.
OUTSIDE = 1e-4
#: The same where entries of the gradient are completed; measured 1e-13 to 1e-9 where the completion is right.
OUTSIDE_COMPLETED = 1e-6
#: Largest share of a separated map's norm below zero for it to count as non-negative.
NEGATIVE = 1e-2
#: Ratio of map entries to pixels above which maps of earlier layers are not worth their cost.
ENOUGH = 4
#: Angles between rows that count as parallel, tried in turn: for rounding, then for noise.
TOLERANCES = (1e-4, 1e-3, 1e-2)
Completion = Literal["always", "several", "never"]


@dataclass(frozen=True)
class RecoveredMaps:
    """Recovered input maps of a convolution.

    Attributes:
        convolution: the layer.
        maps: `(n, c, h, w)` of unit norm, in arbitrary order; float64.
        outside: mean squared share of their patches outside the gradient's row space; rounding if exact.
        next_outside: the same for the best other map; a larger gap to `outside` is stronger evidence.
        negative: greatest share of a map's norm below zero; rounding if exact.
        support: least number, over maps, of entries at which only that map is nonzero.
        covered: `(c, h, w)` bool, entries of the maps that are recovered; the others are zero. None: all.
        completion: of the gradient, where entries of it are hidden.
        others: maps of further layers, where not all entries are covered; each in an order of its own.
        separated: whether the maps are those of single images; otherwise they are an orthonormal basis of their span.
    """

    convolution: Convolution
    maps: Tensor
    outside: float
    next_outside: float
    negative: float
    support: int
    covered: Tensor | None = None
    completion: CompletedMatrix | None = None
    others: tuple[RecoveredMaps, ...] = ()
    separated: bool = True

    @property
    def cover(self) -> Tensor:
        """`covered`, all true where it is None."""
        return torch.ones(self.maps.shape[1:], dtype=torch.bool) if self.covered is None else self.covered


class MapRecovery:
    """Exact input maps of one convolution, for every example of a batch, from one released gradient.

    The row space of the weight gradient is the span of the batch's patches; the maps all of whose patches lie in it
    form the span of the batch's maps; after a ReLU the maps are found in their span by non-negativity and by entries
    where a single one is nonzero. It holds for any loss and BatchNorm mode, if the convolution has more output channels
    than the batch has patches (ResNet-18 on 32x32 images: batches of 4 in the third stage, of 31 in the fourth).

    A result is returned only with a certificate: as many maps as examples lie in the span, the next one clearly does
    not, and the separated maps are not negative. Behind a smooth activation their span alone is returned.

    Pruning and dropping hide entries of the gradient and leave its rank as it is; so does clipping of single entries,
    if it is known. Where no convolution determines maps and gradients have zeros, these count as hidden, the matrices
    are completed, and the maps of all convolutions whose certificates hold are returned, on the entries that the
    completed columns cover.

    Args:
        layers: names of convolutions to try, in this order; default: all that qualify, in forward order, those last of
            which a batch has as many patches as channels.
        seed: of the iterations' first block.
        completion: of gradients with hidden entries: for any batch, for batches of `several` images, or never; the
            images of single ones are found sooner from their patches, see `PatchMatching`.
    """

    def __init__(self, layers: list[str] | None = None, seed: int = 0, completion: Completion = "always") -> None:
        if layers is not None and not layers:
            raise ConfigError("MapRecovery needs at least one layer, or null for all that qualify")
        if completion not in get_args(Completion):
            raise ConfigError(f"MapRecovery completes one of {get_args(Completion)}; got {completion!r}")
        self.layers, self.seed, self.completion = layers, seed, completion

    def __call__(self, observation: Observation) -> RecoveredMaps:
        """The maps of the first convolution whose certificate holds, or of all where entries are hidden.

        Raises:
            UnsupportedModelError: no convolution qualifies for this batch size, or no certificate holds; says
                why for each.
            ConfigError: a requested layer is not a plain convolution of the model.
        """
        n, observation = observation.n_examples, without_censored(observation)
        reasons: list[tuple[str, str]] = []
        partly: list[tuple[int, str]] = []
        candidates = self._candidates(observation)
        completes = self.completion == "always" or (self.completion == "several" and n > 1)

        def full(convolution: Convolution) -> bool:
            """Whether no singular value is left to show the rank, and the smallest ones spoil the span, of a batch."""
            return n * convolution.places == convolution.channels and n > 1 and not centered(observation)

        numbers = [*range(len(candidates))]
        if self.layers is None:  # separated maps of later layers are followed towards the images; a span would not be
            numbers.sort(key=lambda i: candidates[i].sparse and full(candidates[i]))
        for i in numbers:
            convolution, hidden = candidates[i], "entries of its gradient are hidden, as many patches as channels"
            reason = unfit(convolution, n)
            if reason is None:
                gradient = observation.update[f"{convolution.name}.weight"].detach().cpu().double()
                known = full(convolution) and defense_hides(observation, f"{convolution.name}.weight")
                found = hidden if known else recover_maps(convolution, gradient, n, self.seed)
                if isinstance(found, RecoveredMaps):
                    return _closer(observation, candidates[i - 1], found) if i > 0 and found.separated else found
                reason = found
                if completes and hidden_entries(gradient.flatten(1)).any():
                    partly.append((i, reason))
                    continue
            reasons.append((convolution.name, reason))
        completed = []
        for i, reason in sorted(partly):
            convolution = candidates[i]
            gradient = observation.update[f"{convolution.name}.weight"].detach().cpu().double()
            found = complete_maps(convolution, gradient, gradient != 0, n, centered(observation), self.seed)
            if isinstance(found, RecoveredMaps):
                completed.append(found)
            else:
                reasons.append((convolution.name, f"{reason}; if its zeros are hidden entries, {found}"))
        if completed:
            return replace(completed[0], others=tuple(completed[1:]))
        raise UnsupportedModelError(
            f"no convolution determines the maps of a batch of {n} ({_listed(reasons) or 'the model has none'}): "
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


def _listed(reasons: list[tuple[str, str]]) -> str:
    """Layers and reasons in one line, layers with the same reason together."""
    layers: dict[str, list[str]] = {}
    for name, reason in reasons:
        layers.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in layers.items())


def unfit(convolution: Convolution, n_examples: int) -> str | None:
    """Why this convolution does not determine maps of `n_examples` examples; None if it may."""
    if not convolution.holds(n_examples):
        most = min(convolution.channels, convolution.patch_size - 1) // convolution.places
        return f"{convolution.places} places and {convolution.channels} channels allow batches of {most}"
    if not convolution.every_step or not convolution.overlaps:
        return "its kernel skips entries"
    return None if covers_everything(convolution) else "its kernel does not reach every entry"


def recover_maps(convolution: Convolution, gradient: Tensor, n_examples: int, seed: int = 0) -> RecoveredMaps | str:
    """The maps, or why they cannot be recovered.

    Args:
        convolution: suitable for `n_examples`, see `unfit`.
        gradient: of its weights, float64.
        n_examples: batch size `n`.
        seed: of the iteration's first block.
    """
    if not gradient.any():
        return "its gradient is zero"
    span = patch_span(gradient, convolution.places * n_examples)
    if span.gap < GAP:
        patches = convolution.places * n_examples
        return f"its gradient lacks the rank of {patches} patches (singular values fall {span.gap:.2g} fold there)"
    return _maps_in(convolution, span, n_examples, OUTSIDE, seed)


def complete_maps(
    convolution: Convolution, gradient: Tensor, observed: Tensor, n_examples: int, centered: bool, seed: int = 0
) -> RecoveredMaps | str:
    """The maps from a gradient of which some entries are hidden, or why they cannot be recovered.

    Args:
        convolution: suitable for `n_examples`, see `unfit`.
        gradient: of its weights, float64; ignored where it is not observed.
        observed: bool, of the same shape.
        n_examples: batch size `n`.
        centered: whether BatchNorm uses statistics of the batch; behind such a layer the rank is one less.
        seed: of the entries that are left out of the fit, and of the iteration's first block.
    """
    patches, reason = convolution.places * n_examples, ""
    if not (observed & (gradient != 0)).any():
        return "its gradient is zero"
    for rank in (patches - 1, patches) if centered and patches > 1 else (patches,):
        found = complete(gradient.flatten(1), observed.flatten(1), rank, seed)
        if isinstance(found, CompletedMatrix):
            span = PatchSpan(found.basis, found.gap, rank < patches, found.known)
            maps = _maps_in(convolution, without_constants(convolution, span), n_examples, OUTSIDE_COMPLETED, seed)
            return maps if isinstance(maps, str) else replace(maps, completion=found)
        reason = reason or found
    return reason


def _maps_in(
    convolution: Convolution, span: PatchSpan, n_examples: int, largest: float, seed: int
) -> RecoveredMaps | str:
    """The maps with all patches in a span, up to a share `largest`, or why there are none."""
    projection = PatchProjection(convolution, span)
    covered = projection.covered
    space = leading_eigenspace(
        projection, math.prod(convolution.shape), n_examples + 1, n_examples, 1 - largest, seed=seed
    )
    # the eigenvalue that follows has not converged
    outside, following = (1 - space.values[-2:] - space.residuals[-2:] * torch.tensor([0, 1])).clamp_min(0).tolist()
    # a share below the rounding of double precision is no evidence of a gap
    if outside > largest or following < GAP * max(outside, 1e-12):
        return f"no {n_examples} maps have their patches in its gradient ({outside:.1g} outside, next {following:.1g})"
    basis = torch.linalg.qr(projection.maps(space.vectors[:n_examples])[:, covered].T)[0]
    for tolerance in TOLERANCES if convolution.sparse else ():
        single = separate(basis, tolerance, seed)
        if single is not None and single.negative < NEGATIVE:
            maps = basis.new_zeros(n_examples, *convolution.shape)
            maps[:, covered] = single.maps
            everywhere = None if span.known is None else covered
            return RecoveredMaps(convolution, maps, outside, following, single.negative, single.support, everywhere)
    if convolution.sparse or span.known is not None:
        return "the maps of the batch cannot be separated"
    maps = basis.T.reshape(n_examples, *convolution.shape)
    return RecoveredMaps(convolution, maps, outside, following, math.nan, 0, separated=False)


def _closer(observation: Observation, before: Convolution, found: RecoveredMaps) -> RecoveredMaps:
    """Maps before the previous convolution if it is strided and they can be recovered; else `found`."""
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


def assigned(maps: Tensor, others: Tensor) -> Tensor:
    """The permutation `(n,)` of `others` `(n, d)` that brings them closest to `maps` `(n, d)`."""
    from scipy.optimize import linear_sum_assignment

    cosines = maps @ others.T
    return torch.as_tensor(linear_sum_assignment(-cosines.cpu().numpy())[1], device=maps.device)


def each_once(maps: Tensor, inside: Tensor) -> Tensor:
    """Of maps `(n, d)` of unit norm those `inside` a span, `(n,)` bool, but for repetitions of an earlier one."""
    once = inside.clone()
    for i in range(1, len(maps)):
        once[i] &= not (once[:i] & (maps[:i] @ maps[i] > _SAME_MAP)).any()
    return once
