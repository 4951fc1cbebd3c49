"""Defenses at equal cost: what the strongest attack still finds, and how sure the ranking is.

The strengths of a defense are points, cost in accuracy against the metric of the strongest attack, in the order of
the grid and beginning at no defense. Straight lines join them, so that defenses are compared at a cost of exactly so
much and not at the nearest strength of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Share of the draws inside an interval.
CONFIDENCE = 0.9
_DRAWS = 4000
_ROUNDING = 1e-9  # of losses that are differences of accuracies

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Strength:
    """A defense at one strength.

    Attributes:
        value: the strength; None is no defense.
        losses: of accuracy, in [0, 1], of each training against the one without a defense and with the same seed.
        scores: by attack the metric of every batch, larger for worse reconstructions.
        is_last: the grid has no larger strength, or only such as no attack is applicable at.
    """

    value: float | None
    losses: Sequence[float]
    scores: Mapping[str, Sequence[float]]
    is_last: bool = True

    @property
    def strongest(self) -> float:
        """The mean metric of the strongest attack."""
        return float(np.mean(self._strongest))

    @property
    def n_batches(self) -> int:
        """Batches that the strongest attack was measured on."""
        return len(self._strongest)

    @property
    def _strongest(self) -> Sequence[float]:
        return min(self.scores.values(), key=lambda values: float(np.mean(values)))


@dataclass(frozen=True)
class Protection:
    """What a defense leaves the strongest attack where it may cost at most so much.

    Attributes:
        value: the metric, larger for worse reconstructions.
        interval: 90 % of the draws; None where the metric is infinite, or a strongest attack has a single batch.
        strengths: the one that protects best within the limit, or the two that it is between.
        ends: the largest strength of the grid costs less than the limit, and a larger one may protect better.
        best: share of the draws in which this defense protects best of all.
    """

    value: float
    interval: tuple[float, float] | None
    strengths: tuple[float | None, ...]
    ends: bool
    best: float


def rows_under(defense: str, strength: float | None, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of a table under a defense at one strength; those without a defense where the strength is None."""
    same = [row for row in rows if row.get("strength") == strength]
    return same if strength is None else [row for row in same if row["defense"] == defense]


def strengths_of(
    defenses: Mapping[str, Sequence[float]],
    trainings: Sequence[Mapping[str, Any]],
    batches: Sequence[Mapping[str, Any]],
    sign: int,
    stopped: Collection[tuple[str, float | None]] = (),
    guess: Sequence[float] = (),
) -> dict[str, list[Strength]]:
    """The strengths of every defense that rows of `utility.csv` and of `batches.csv` have, after no defense.

    Args:
        defenses: the strengths of the grid, in its order.
        trainings, batches: the rows; those without a defense have no `strength`.
        sign: -1 where larger metrics are better reconstructions.
        stopped: defenses and strengths at which no attack is applicable. They count as an attack that returns the
            mean public image, and are left out without its metric.
        guess: the metric of the mean public image, by batch.
    """
    plain = {row["repetition"]: row["accuracy"] for row in trainings if row.get("strength") is None}

    def measured(name: str, value: float | None) -> Strength | None:
        own, attacked = (rows_under(name, value, rows) for rows in (trainings, batches))
        losses = [plain[row["repetition"]] - row["accuracy"] for row in own if row["repetition"] in plain]
        scores: dict[str, list[float]] = {}
        for row in attacked:  # attackers who do not know the defense are others than those who do
            scores.setdefault(f"{row['attack']}, {row.get('aware')}", []).append(sign * row["value"])
        if guess and (name, value) in stopped:
            scores = {"mean public image": [sign * one for one in guess]}
        strengths = [None, *defenses[name]]
        larger = strengths[strengths.index(value) + 1 :]
        is_last = len(strengths) > 1 and all((name, one) in stopped for one in larger)
        return Strength(value, losses, scores, is_last) if losses and scores else None

    return {
        name: [found for value in (None, *values) if (found := measured(name, value)) is not None]
        for name, values in defenses.items()
    }


def compare(defenses: Mapping[str, Sequence[Strength]], limit: float, seed: int = 0) -> dict[str, Protection]:
    """What every defense leaves the strongest attack at a cost of at most `limit` of accuracy, in [0, 1].

    Defenses begin with their strength None, no defense; those without it are left out. The means of all batches are
    drawn from Student's distribution around the measured ones, with one draw per batch for all attacks and defenses,
    which attack the same images; costs from Student's distribution with the spread of seeds within all
    strengths. In every draw the strongest attack is found anew. Where no strength has two trainings, costs are taken
    as exact. Where an attack has a single batch, so is its metric; no interval is given where that decides a value.
    """
    known = {name: points for name, points in defenses.items() if points and points[0].value is None}
    if not known:
        return {}
    draws = _Draws([one for points in known.values() for one in points], np.random.default_rng(seed))
    means = {name: draws.line(points, exact=True).within(limit) for name, points in known.items()}
    drawn = {name: draws.line(points).within(limit)[0] for name, points in known.items()}
    table = np.stack([*drawn.values()])  # (defenses, draws)
    winners = table == table.max(axis=0)
    shares = dict(zip(known, (winners / winners.sum(axis=0)).mean(axis=1), strict=True))
    ends = {name: [points[end(means[name][1][0])] for end in (math.floor, math.ceil)] for name, points in known.items()}
    has_spread = all(one.n_batches > 1 for pair in ends.values() for one in pair)
    found = {}
    for name, points in known.items():
        (value,), (place,) = means[name]
        interval = None
        if has_spread and np.isfinite(drawn[name]).all():
            low, high = np.quantile(drawn[name], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
            interval = float(low), float(high)
        found[name] = Protection(
            float(value),
            interval,
            tuple(dict.fromkeys(one.value for one in ends[name])),
            bool(place == len(points) - 1) and points[-1].is_last,
            float(shares[name]),
        )
    return found


class _Draws:
    """Draws of the means of batches and of losses of accuracy, the same for every batch wherever it is attacked."""

    def __init__(self, points: Sequence[Strength], generator: np.random.Generator) -> None:
        self._generator = generator
        counts = {len(values) for one in points for values in one.scores.values()}
        self._factors = {count: self._of_batches(count) for count in sorted(counts) if count > 1}
        own = [np.asarray(one.losses) for one in {id(one): one for one in points}.values() if one.value is not None]
        self._freedom = sum(len(losses) - 1 for losses in own)
        squares = sum(float(((losses - losses.mean()) ** 2).sum()) for losses in own)
        self._spread = math.sqrt(squares / self._freedom) if self._freedom else 0.0
        self._scale = self._student(self._freedom) if self._freedom else np.ones(_DRAWS)

    def line(self, points: Sequence[Strength], exact: bool = False) -> _Line:
        """The strengths of one defense, in draws or with the measured means."""
        count = 1 if exact else _DRAWS
        losses, scores = np.zeros((len(points), count)), np.zeros((len(points), count))
        for number, one in enumerate(points):
            means = [np.full(count, np.mean(values)) for values in one.scores.values()]
            if not exact:
                means = [mean + self._noise(values) for mean, values in zip(means, one.scores.values(), strict=True)]
            scores[number] = np.min(means, axis=0)
            if one.value is not None:
                noise = 0.0 if exact else self._generator.standard_normal(count) * self._scale * self._spread
                losses[number] = np.mean(one.losses) + noise / math.sqrt(len(one.losses))
        return _Line(losses, scores)

    def _noise(self, values: Sequence[float]) -> Array | float:
        own = np.asarray(values, dtype=np.float64)
        if len(own) < 2 or not np.isfinite(own).all():  # an infinite mean is infinite in every draw
            return 0.0
        noise: Array = self._factors[len(own)] @ (own - own.mean())
        return noise

    def _of_batches(self, count: int) -> Array:
        normal = self._generator.standard_normal((_DRAWS, count)) / math.sqrt(count * (count - 1))
        scaled: Array = normal * self._student(count - 1)[:, None]
        return scaled

    def _student(self, freedom: int) -> Array:
        return np.sqrt(freedom / self._generator.chisquare(freedom, _DRAWS))


@dataclass(frozen=True)
class _Line:
    """Points `(strengths, draws)` that are joined by straight lines."""

    losses: Array
    scores: Array

    def within(self, limit: float) -> tuple[Array, Array]:
        """The largest metric where the loss is at most `limit`, and its place, such as 1.5 between points 1 and 2."""
        best, place = self.scores[0].copy(), np.zeros(self.scores.shape[1])
        inside = self.losses <= limit + _ROUNDING
        for before, after in pairwise(range(len(self.losses))):
            step = self.losses[after] - self.losses[before]
            crosses = inside[before] != inside[after]
            share = np.where(crosses, (limit - self.losses[before]) / np.where(crosses, step, 1.0), 1.0)
            share = share.clip(0, 1)  # a loss within rounding of the limit is inside, and may be beyond it
            value = _between(self.scores[before], self.scores[after], share)
            better = (crosses | inside[after]) & (value > best)
            best, place = np.where(better, value, best), np.where(better, before + share, place)
            ended = inside[after] & (self.scores[after] > best)
            best, place = np.where(ended, self.scores[after], best), np.where(ended, float(after), place)
        return best, place


def _between(start: Array, end: Array, share: Array) -> Array:
    """The place at a share of the way between two points; from an infinite start on all but the end is infinite."""
    with np.errstate(invalid="ignore"):  # a difference of infinities
        place = start + share * (end - start)
    place = np.where(np.isfinite(start), place, start)
    return np.where(share <= 0, start, np.where(share >= 1, end, place))
