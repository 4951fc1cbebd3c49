"""Rows of an imprint block's gradient: which bins contain images, and their contributions.

The gradient rows of a block with ReLU are a step function of the bin: row i sums over all images above edge i, so rows
without an image between them are equal. The step function is fitted by least squares: rows between two steps are
averaged, which reduces noise, and coordinates that a defense has dropped are taken from the rows that still have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Rounding error of a float32 row, relative to the longest.
ROUNDING = 5e-6
#: Share of zeros below which they count as values: a pixel may equal the data's mean.
FEW_ZEROS = 0.01


@dataclass(frozen=True)
class Hits:
    """Contributions of images to the gradient, one row per bin with images, the largest first.

    Attributes:
        bins: `(j,)`, indices.
        rows: `(j, d + 1)`: gradient of the weights and, last, of the bias; 0 where unknown.
        known: `(j, d + 1)`.
        noise: `(j,)`: standard deviation of the noise on one coordinate of a row.
    """

    bins: Tensor
    rows: Tensor
    known: Tensor
    noise: Tensor


def separate_rows(rows: Tensor, n: int) -> Hits:
    """Hits in a sparse block, where each row `(k, d + 1)` sums over the images of one bin; at most the batch size `n`.

    If fewer than half of the bins can be hit, the median row is noise.
    """
    known, size = _known(rows), rows.square().sum(dim=1)
    power = size / known.sum(dim=1).clamp(min=1)
    variance = float(power.median()) if len(rows) > 2 * n else 0.0
    floor = torch.maximum(variance * _chance(known.sum(dim=1)), ROUNDING**2 * size.max())
    order = size.argsort(descending=True)[:n]
    order = order[size[order] > floor[order]]
    return Hits(order, rows[order], known[order], torch.full((len(order),), variance, dtype=rows.dtype).sqrt())


def step_rows(rows: Tensor, n: int) -> Hits:
    """Hits in a block with ReLU, from its rows `(m, d + 1)`.

    Up to twice the batch size `n` of steps are searched: an image that moves between bins during local steps leaves
    more than one.
    """
    known = _known(rows)
    starts = _best_starts(_costs(rows, known), min(len(rows) - 1, 2 * n))
    steps = _significant(_Steps(rows, known, starts))
    order = steps.size.argsort(descending=True)
    bins = torch.tensor(steps.starts[1:], dtype=torch.int64) - 1
    return Hits(bins[order], steps.heights[order], steps.known[order], steps.noise[order])


class _Steps:
    """A fitted step function: rows between two starts share their mean over known entries.

    Attributes:
        heights: `(j, d + 1)`: mean before minus mean after each step; 0 where not `known`.
        size: `(j,)`: squared length of the heights.
        noise: `(j,)`: standard deviation of the noise on a height.
        margin: `(j,)`: squared length over the largest one expected from noise and rounding.
    """

    def __init__(self, rows: Tensor, known: Tensor, starts: list[int]) -> None:
        self.rows, self.entries, self.starts = rows, known, starts
        means, counts, residual, freedom, left = [], [], 0.0, 0, torch.zeros_like(rows)
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            values, entries = rows[start:stop], known[start:stop]
            count = entries.sum(dim=0)
            mean = (values * entries).sum(dim=0) / count.clamp(min=1)
            means.append(mean)
            counts.append(count)
            if values.any():  # rows without images have no noise, unless it was added
                left[start:stop] = (values - mean) * entries
                residual += float(left[start:stop].square().sum())
                freedom += int((count - 1).clamp(min=0).sum())
        mean, count = torch.stack(means), torch.stack(counts)
        self.known = (count[1:] > 0) & (count[:-1] > 0)
        self.heights = torch.where(self.known, mean[:-1] - mean[1:], 0.0)
        self.size = self.heights.square().sum(dim=1)
        rate = count.double().mean(dim=1).clamp(min=1)
        variance = (residual / max(freedom, 1)) * (1 / rate[1:] + 1 / rate[:-1])
        self.noise = variance.sqrt()
        segment = torch.zeros(len(rows), dtype=torch.int64)
        segment[starts[1:]] = 1
        chance = _chance(self.known.sum(dim=1), _effective_dimensions(left, segment.cumsum(dim=0)))
        floor = variance * chance + (ROUNDING * mean.norm(dim=1).max()).square()
        self.margin = self.size / floor.clamp(min=torch.finfo(rows.dtype).tiny)


def _known(rows: Tensor) -> Tensor:
    """Known entries: zeros count as dropped by a defense, except in rows without images."""
    zero = rows == 0
    reached = ~zero.all(dim=1, keepdim=True)
    lost = zero & reached
    return ~lost if lost.sum() > FEW_ZEROS * reached.sum() * rows.shape[1] else torch.ones_like(zero)


def _chance(freedom: Tensor, dimensions: float = math.inf) -> Tensor:
    """Six standard deviations above the mean squared length of noise with variance 1 on `freedom` coordinates.

    The noise has `dimensions` independent components.
    """
    return freedom * (1 + 6 * (2 / freedom.double().clamp(min=1, max=dimensions)).sqrt())


def _effective_dimensions(noise: Tensor, segment: Tensor) -> float:
    """Effective dimension of noise rows `(m, d)`: (tr S)^2 / tr S^2 of their covariance S, at least 1.

    White noise has dimension `d`. Rounding of a derivative changes a row along an image, in one dimension, so its
    squared length exceeds the mean by far more. Rows of one segment `(m,)` share a fitted mean and are not compared.
    """
    inner = noise @ noise.T
    lengths = inner.diagonal()[:, None] * inner.diagonal()[None, :]
    apart = (segment[:, None] != segment[None, :]) & (lengths > 0)
    if not apart.any():
        return math.inf
    likeness = inner[apart].square().mean().clamp(min=torch.finfo(noise.dtype).tiny)
    return max(1.0, float(lengths[apart].mean() / likeness))


def _costs(rows: Tensor, known: Tensor) -> Tensor:
    """`(m, m + 1)`: squared error of the mean of rows i to j - 1, over known entries; infinite if there are none.

    Segments grow by one row at a time with Welford's update, since differences of sums lose small steps to rounding.
    """
    m = len(rows)
    costs = torch.full((m, m + 1), torch.inf, dtype=rows.dtype)
    means, counts = torch.zeros_like(rows), torch.zeros_like(rows)
    error = torch.zeros(m, dtype=rows.dtype)
    everything = bool(known.all())
    for j in range(m):
        started = slice(0, j + 1)
        deviation = rows[j] - means[started]
        if everything:
            # segment i has j - i rows
            had = torch.arange(j, -1, -1, dtype=rows.dtype)
            error[started] += had / (had + 1) * deviation.square().sum(dim=1)
            means[started] += deviation / (had + 1)[:, None]
        else:
            here = known[j].to(rows.dtype)
            deviation = deviation * here
            after = counts[started] + here
            error[started] += (deviation.square() * counts[started] / after.clamp(min=1)).sum(dim=1)
            means[started] += deviation / after.clamp(min=1)
            counts[started] = after
        costs[started, j + 1] = error[started]
    return costs


def _best_starts(costs: Tensor, n_steps: int) -> list[int]:
    """Starts of the `n_steps + 1` segments of least total cost, by dynamic programming."""
    best = costs[0].clone()
    choices = []
    for _ in range(n_steps):
        total = best[:-1, None] + costs
        best, choice = total.min(dim=0)
        choices.append(choice)
    starts, end = [], costs.shape[1] - 1
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return [0, *reversed(starts)]


def _significant(steps: _Steps) -> _Steps:
    """The steps above noise and rounding; the least one is dropped until all are."""
    while len(steps.starts) > 1:
        least = int(steps.margin.argmin())
        if steps.margin[least] > 1:
            break
        steps = _Steps(steps.rows, steps.entries, steps.starts[: least + 1] + steps.starts[least + 2 :])
    return steps


#: Variance of the mean over variance at the lowest frequency: sets the spectrum's height at frequency zero.
LOWEST_SQUARED_FREQUENCY = 0.3


def cosine_basis(size: int) -> Tensor:
    """Orthonormal DCT-II matrix `(size, size)` in double precision, one frequency per row."""
    places = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (places[None, :] + 0.5) * places[:, None]) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def spectrum(height: int, width: int) -> Tensor:
    """Expected squared cosine coefficients `(h, w)` of a photograph of pixel variance 1: 1 / frequency squared.

    Source: Field, Relations between the statistics of natural images and the response properties of cortical cells,
        JOSA A 1987.
    """
    squared = torch.arange(height).double()[:, None] ** 2 + torch.arange(width).double()[None, :] ** 2
    power = 1 / squared.clamp(min=LOWEST_SQUARED_FREQUENCY)
    return power * (height * width / power.sum())


def wiener(images: Tensor, noise: Tensor) -> Tensor:
    """The posterior mean of normalized images `(n, c, h, w)` under white noise, given the `spectrum` of photographs.

    `noise` `(n,)` are standard deviations, with the pixels' about 1; 0 leaves an image unchanged.
    """
    height, width = images.shape[-2:]
    down, across = (cosine_basis(size).to(images) for size in (height, width))
    power = spectrum(height, width).to(images)
    gain = power / (power + noise.square()[:, None, None])
    coefficients: Tensor = down @ images @ across.T
    restored: Tensor = down.T @ (coefficients * gain[:, None]) @ across
    return torch.where((noise > 0)[:, None, None, None], restored, images)


#: Iterations of `filled`; each extends the influence of a known pixel by one pixel.
_FILLING = 200


def filled(images: Tensor, known: Tensor) -> Tensor:
    """Images `(n, c, h, w)` with unknown pixels set to the mean of their four neighbours, the smoothest solution.

    A channel without a known pixel becomes 0.
    """
    if known.all():
        return images
    count = known.sum(dim=(2, 3), keepdim=True).clamp(min=1)
    result = torch.where(known, images, torch.where(known, images, 0.0).sum(dim=(2, 3), keepdim=True) / count)
    for _ in range(_FILLING):
        padded = torch.nn.functional.pad(result, (1, 1, 1, 1), mode="replicate")
        around = padded[..., 1:-1, :-2] + padded[..., 1:-1, 2:] + padded[..., :-2, 1:-1] + padded[..., 2:, 1:-1]
        result = torch.where(known, images, around / 4)
    return result
