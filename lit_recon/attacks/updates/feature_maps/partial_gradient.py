"""One convolution behind a ReLU network's known derivatives, from the few entries of its gradient that are observed.

The gradient of a convolution's weights is a sum over places p of the derivative of the loss in the output at p, times
the input patch under the kernel at p. Once everything behind the convolution is known, so is that derivative, except
for the zeros of the ReLU behind it: it is `derivative * active` with `active` 0 or 1. The entries of the gradient are
then bilinear in two small unknowns, the input map and the active entries, of which there are far fewer than observed
entries even where 90 or 99 of 100 are hidden, while a matrix of the gradient's rank has more freedom than that.

Both are found in turn by least squares, maps at least 0 and active entries within [0, 1], around a guess. How far the
guess and the fit are off is estimated along (empirical Bayes): entries that the gradient does not determine stay at the
guess and say so by their variance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution

#: Root mean square error of the guess that is assumed first: of maps, relative to their own, and of active entries.
_MAPS, _ACTIVE = 0.5, 0.4
#: The least that is assumed of these, and of the relative error of the equations.
_LEAST, _ROUNDING = 1e-3, 1e-5
#: Alternations, and sweeps over the entries for their bounds.
_ROUNDS, _SWEEPS = 5, 3
#: Least share of the equations that counts as left over for the estimate of their error.
_LEFT = 0.2
#: Derivatives of a channel below this share of the largest count as that large: rounding.
_SMALLEST = 1e-3
#: Least ridge: equations have coefficients of about 1, and a few hundred of them add up.
_RIDGE = 1e-10
#: Groups of entries that are solved together.
_GROUPS = 16


class MapEstimate(NamedTuple):
    """Values and their variances, of equal shapes."""

    values: Tensor
    variances: Tensor

    def known(self, within: float) -> Tensor:
        """Which values have a standard deviation of at most so many root mean squares of all."""
        return self.variances <= within**2 * self.values.square().mean()


class PartialFit(NamedTuple):
    """What the observed entries tell.

    Attributes:
        maps: the input map, `(c, h, w)`, at least 0.
        active: which outputs the ReLU behind lets through, `(channels, rows, columns)` in [0, 1].
        misfit: root mean square misfit of the guess, relative to that of the observed entries; infinite without any.
        left: the same of the fit.
    """

    maps: MapEstimate
    active: MapEstimate
    misfit: float
    left: float


class _Entries(NamedTuple):
    """Observed entries of several groups: numbers `(g, m)` within the group, of which the first `counts` are real."""

    places: Tensor
    counts: Tensor

    @classmethod
    def of(cls, observed: Tensor) -> _Entries:
        """Of groups in rows `(g, entries)`."""
        counts = observed.sum(1)
        places = observed.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        return cls(places[:, : max(1, int(counts.max()))], counts)


class PartialGradient:
    """The observed entries of the gradient of a convolution's weights.

    Args:
        layer: the convolution.
        gradient: `(channels, c, rows, columns)`; zeros count as hidden.
    """

    def __init__(self, layer: Convolution, gradient: Tensor) -> None:
        self.layer = layer
        self._gradient = gradient.detach().cpu().double().flatten(2)
        self._channels, c, self._offsets = self._gradient.shape
        self._seen = observed = self._gradient != 0
        self.observed = int(observed.sum())
        positions = math.prod(layer.shape[1:])
        numbers = torch.arange(1, positions + 1, dtype=torch.float64).view(1, 1, *layer.shape[1:])
        one = Convolution(layer.name, (1, *layer.shape[1:]), 1, layer.kernel, layer.stride, layer.padding, 0, False)
        # position in the map under every offset and place, and `positions` outside the map
        under = one.patches(numbers)[0].round().long() - 1
        self._under = torch.where(under < 0, positions, under)
        self._by_input = _Entries.of(observed.transpose(0, 1).reshape(c, -1))
        self._by_output = _Entries.of(observed.reshape(self._channels, -1))

    def fit(self, derivative: Tensor, maps: Tensor, active: Tensor, sums: Tensor | None = None) -> PartialFit:
        """The input map and the active entries around a guess.

        Args:
            derivative: of the loss in the output were every entry active, `(channels, rows, columns)`.
            maps: guess of the input, `(c, h, w)`.
            active: guess of the active entries, 0 or 1, in the shape of the derivative.
            sums: sums of the derivative over the active entries of every channel, `(channels,)`, 0 where hidden.
        """
        shapes = maps.shape, active.shape
        guess, active = maps.double().flatten(1), active.double().flatten(1)
        derivative = derivative.double().flatten(1)
        size = guess.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        if self.observed == 0:
            guess, active = guess.view(shapes[0]), active.view(shapes[1])
            of_guess = MapEstimate(guess, torch.full_like(guess, float(_MAPS * size) ** 2))
            return PartialFit(of_guess, MapEstimate(active, torch.full_like(active, _ACTIVE**2)), math.inf, math.inf)
        # equations of channels with small derivatives count as much as others, since they are as exact
        scale = derivative.abs().amax(1, keepdim=True)
        scale = scale.clamp_min(_SMALLEST * float(scale.max())).clamp_min(torch.finfo(torch.float64).tiny)
        guess, derivative = guess / size, derivative / scale
        gradient = self._gradient / (size * scale[..., None])
        by_input, by_output = gradient.transpose(0, 1).flatten(1), gradient.flatten(1)
        known_sums = None if sums is None else sums.double() / scale[:, 0]
        usual = self._root_mean_square(gradient)
        first = self._misfit(derivative * active, guess, gradient)
        found, switches, error = guess, active, max(first, _ROUNDING * usual)
        of_maps, of_active = _MAPS, _ACTIVE
        for _ in range(_ROUNDS):
            rows = self._rows(derivative * switches)
            found, loose = _solved(rows, self._by_input, by_input, guess, (error / of_maps) ** 2, math.inf)
            rows = self._patches(found).flatten(0, 1)
            ridge = (error / of_active) ** 2
            switches, open_ = _solved(rows, self._by_output, by_output, active, ridge, 1.0, derivative, known_sums)
            freedom = float((1 - loose).sum() + (1 - open_).sum())
            share = max(_LEFT, 1 - freedom / self.observed)
            error = max(self._misfit(derivative * switches, found, gradient) / share**0.5, _ROUNDING * usual)
            of_maps = _moved(found - guess, loose, of_maps)
            of_active = _moved(switches - active, open_, of_active)
        last = self._misfit(derivative * switches, found, gradient)
        return PartialFit(
            MapEstimate((found * size).view(shapes[0]), (loose * (of_maps * size) ** 2).view(shapes[0])),
            MapEstimate(switches.view(shapes[1]), (open_ * of_active**2).view(shapes[1])),
            first / usual,
            last / usual,
        )

    def _root_mean_square(self, values: Tensor) -> float:
        """Of observed entries."""
        return math.sqrt(float((values.square() * self._seen).sum()) / max(1, self.observed))

    def _misfit(self, derivative: Tensor, maps: Tensor, gradient: Tensor) -> float:
        fitted = torch.einsum("op,cqp->ocq", derivative, self._patches(maps))
        return self._root_mean_square(fitted - gradient)

    def _patches(self, maps: Tensor) -> Tensor:
        """Patches `(c, offsets, places)` of a map `(c, positions)`."""
        return torch.cat([maps, maps.new_zeros(len(maps), 1)], dim=1)[:, self._under]

    def _rows(self, derivative: Tensor) -> Tensor:
        """Coefficients `(channels * offsets, positions)` of one channel of the map in the gradient's entries."""
        positions = math.prod(self.layer.shape[1:])
        rows = derivative.new_zeros(self._channels, self._offsets, positions + 1)
        index, values = torch.broadcast_tensors(self._under, derivative[:, None, :])
        rows.scatter_add_(2, index.contiguous(), values.contiguous())
        return rows[..., :positions].flatten(0, 1)


def _moved(change: Tensor, loose: Tensor, assumed: float) -> float:
    """Root mean square error of a guess that a fit changed, with the variances that are left."""
    return max(math.sqrt(float((change.square() + assumed**2 * loose).mean())), _LEAST)


def _solved(
    rows: Tensor,
    entries: _Entries,
    values: Tensor,
    guess: Tensor,
    ridge: float,
    largest: float,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Least squares around a guess within [0, largest], and the share of the guess's variance that each entry keeps.

    Args:
        rows: coefficients `(entries, unknowns)`, the same for all groups.
        entries: observed in every group.
        values: of all entries of every group, `(groups, entries)`.
        guess: `(groups, unknowns)`.
        ridge: on the distance from the guess.
        largest: upper bound.
        scale: factors of the unknowns in every group, `(groups, unknowns)`.
        sums: known sums of the scaled unknowns `(groups,)`, 0 where they are not known.
    """
    unknowns, ridge = guess.shape[1], max(ridge, _RIDGE)
    normal, target = guess.new_empty(len(guess), unknowns, unknowns), torch.empty_like(guess)
    # groups with about as many entries together: most have far fewer than the one with the most
    for some in entries.counts.argsort().split(_GROUPS):
        most = max(1, int(entries.counts[some].max()))
        places, real = entries.places[some, :most], torch.arange(most) < entries.counts[some, None]
        chosen, right = rows[places] * real[..., None], values[some].gather(1, places) * real
        if scale is not None:
            chosen = chosen * scale[some, None, :]
        if scale is not None and sums is not None:
            known = (sums[some] != 0)[:, None]
            chosen = torch.cat([chosen, (scale[some] * known)[:, None, :]], dim=1)
            right = torch.cat([right, sums[some, None]], dim=1)
        normal[some], target[some] = chosen.mT @ chosen, (chosen.mT @ right[..., None])[..., 0]
    normal.diagonal(dim1=1, dim2=2).add_(ridge)
    target += ridge * guess
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(normal))
    loose = (ridge * inverse.diagonal(dim1=1, dim2=2)).clamp(0, 1)
    return _bounded(normal, target, (inverse @ target[..., None])[..., 0], largest), loose


def _bounded(normal: Tensor, target: Tensor, start: Tensor, largest: float) -> Tensor:
    """Sweeps of coordinate descent on `x^T normal x / 2 - target^T x` for x in [0, largest]."""
    found, diagonal = start.clamp(0, largest), normal.diagonal(dim1=1, dim2=2)
    for _ in range(_SWEEPS):
        for i in range(found.shape[1]):
            slope = target[:, i] - (normal[:, i] * found).sum(1)
            found[:, i] = (found[:, i] + slope / diagonal[:, i]).clamp(0, largest)
    return found
