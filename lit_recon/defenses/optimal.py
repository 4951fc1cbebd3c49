"""Noise and pruning of the coordinates whose information about the images is large relative to their size.

With `J` the Jacobian of the mean gradient `g` (p coordinates) with respect to all pixels of the batch together, the
sensitivity of coordinate j is the norm of row j, `n_j = |d g_j / d x|`. Noise of variances `v` leaves the Fisher
information `J^T diag(v)^-1 J`, whose trace is `sum_j n_j^2 / v_j`, and the van Trees inequality bounds the squared
error of any reconstruction from below by (number of pixels)^2 / (trace + prior information). Scores and estimator are
those of [Chen2024].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lit_recon.defenses.base import BatchGradient, Defense, Round, checked
from lit_recon.defenses.sparsity import SparseUpdate, lowest
from lit_recon.defenses.vectors import flatten, normal_like, unflatten
from lit_recon.errors import ConfigError
from lit_recon.noisy_release import NoisyRelease
from lit_recon.records import Batch, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian

#: Pixels in a batch up to which the exact mode, one Jacobian-vector product per pixel, is allowed.
EXACT_LIMIT = 4096


def sensitivities(
    gradient: BatchGradient, batch: Batch, directions: int | None, generator: torch.Generator | None = None
) -> Update:
    """Norms `n_j` of the rows of the Jacobian of the mean loss's gradient at the images, in the shapes of the update.

    The mean of `(J v)_j^2` over random directions `v` from N(0, I) is an unbiased estimate of `n_j^2`; with 10 of them,
    one `randn` each, the relative standard deviation of `n_j` is about 1 / sqrt(20), 22 %. The exact value, for
    `directions` of None, is the sum over all unit vectors. A `ConfigError` says that there are fewer than one
    direction, no generator for them, or too many pixels for the exact mode.
    """
    from lit_recon.models.linearization import linearized  # commands without these defenses do not load it

    update, product = linearized(lambda images: gradient(batch._replace(images=images), "autograd"), batch.images)
    total = {name: torch.zeros_like(value) for name, value in update.items()}
    for direction in _directions(batch.images, directions, generator):
        for name, part in product(direction).items():
            total[name].addcmul_(part, part)
    return {name: (value / (directions or 1)).sqrt().contiguous() for name, value in total.items()}


def leakage(sensitivity: Update, update: Update, floor: float = 1e-8, cap: float = 1e6) -> Update:
    """Scores `min(n_j / max(|g_j|, floor), cap)` of sensitivities `n` and an update `g`; `floor` is absolute.

    Coordinates with neither sensitivity nor gradient, as behind a dead ReLU, score 0.
    """
    return {name: (n / update[name].abs().clamp_min(floor)).clamp_max(cap) for name, n in sensitivity.items()}


def _directions(images: Tensor, count: int | None, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Normal random directions, or all unit vectors where `count` is None."""
    pixels = images.numel()
    if count is None:
        if pixels > EXACT_LIMIT:
            raise ConfigError(
                f"exact sensitivities take one derivative per pixel, at most {EXACT_LIMIT}; the batch has {pixels}: "
                "estimate them from 10 directions"
            )
        for pixel in range(pixels):
            yield torch.nn.functional.one_hot(torch.tensor(pixel), pixels).view(images.shape).to(images)
    elif count < 1 or generator is None:
        raise ConfigError(
            f"sensitivities are estimated from at least 1 direction and a generator; got {count} and {generator}: "
            "take 10 directions, or None for exact values"
        )
    else:
        for _ in range(count):
            yield normal_like(images, generator)


#: The quantity that is equal to that of uniform noise of the same `std`.
Match = Literal["energy", "weighted", "measured"]


class OptimalGradientNoise(Defense):
    """Adds normal noise to the mean gradient, after averaging, of variance `v_j` proportional to `n_j / |g_j|`.

    `n_j` is the sensitivity of coordinate j to the images (see `sensitivities`), `g_j` the update before this defense.
    The budget is matched to uniform noise of standard deviation `std` (absolute) by

    - `weighted`: equal `sum_j g_j^2 v_j`. These variances then leave the least Fisher trace, `cos^2(n, |g|)` of that of
      uniform noise (by Cauchy and Schwarz; where floor and cap do not bind);
    - `energy`: equal `sum_j v_j`, as in the published code. The Fisher trace is then usually *larger* than that of
      uniform noise, with less loss of utility: compare at equal utility;
    - `measured`: standard deviations `scale` times those of `energy`, with the scale from `matched_scale`.

    Noise is drawn after the directions of the estimate, one `randn` per tensor; none for a `std` of 0. Coordinates that
    do not depend on the images get no noise; if all are such, the noise is uniform. The variances depend on private
    data: no differential privacy. The attacker does not know them and leaves candidates unchanged.

    Args:
        std: standard deviation of the uniform noise with the same budget.
        match: the budget.
        scale: factor of the standard deviations, for `measured` and only there.
        directions: random directions of the estimate, or None for exact sensitivities (small batches).
        floor, cap: limits of the quotient `n_j / |g_j|`, by default those of the published code.

    Source: [Chen2024]; its code takes 10 directions and matches the energy.
    """

    neutral = (("std", 0.0),)

    def __init__(
        self,
        std: float = 0.0,
        match: Match = "weighted",
        scale: float | None = None,
        directions: int | None = 10,
        floor: float = 1e-8,
        cap: float = 1e6,
    ) -> None:
        if match not in ("energy", "weighted", "measured"):
            raise ConfigError(f"OptimalGradientNoise needs match 'energy', 'weighted' or 'measured'; got {match!r}")
        if (match == "measured") != (scale is not None):
            raise ConfigError(
                f"OptimalGradientNoise needs a scale exactly when match is 'measured'; got match={match!r} and "
                f"scale={scale}: find the scale with matched_scale, or leave it out and match 'weighted'"
            )
        require_quotient(self, directions, floor, cap)
        self.std = checked(self, "std", std)
        self.match: Match = match
        self.scale = None if scale is None else checked(self, "scale", scale)
        self.directions, self.floor, self.cap = directions, floor, cap

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.std == 0:
            return update
        variance = self.variances(update, sensitivities(round_.gradient, round_.batch, self.directions, generator))
        return {name: value + variance[name].sqrt() * normal_like(value, generator) for name, value in update.items()}

    def variances(self, update: Update, sensitivity: Update) -> Update:
        """Variance of the noise on every coordinate, for an update and its sensitivities."""
        scores = leakage(sensitivity, update, self.floor, self.cap)
        weighted = self.match == "weighted"
        uniform, allocated = 0.0, 0.0
        for name, value in update.items():
            # squares of small gradients underflow in float32
            weights = value.double().square() if weighted else torch.ones_like(value, dtype=torch.float64)
            uniform += float(weights.sum())
            allocated += float((weights * scores[name]).sum())
        if allocated == 0:
            return {name: torch.full_like(value, self.std**2) for name, value in update.items()}
        factor = self.std**2 * uniform / allocated * (1.0 if self.scale is None else self.scale) ** 2
        return {name: score * factor for name, score in scores.items()}

    def released_std(self, n_examples: int) -> float:
        if self.std:
            raise ConfigError(f"no bound is known for {self}: the variances depend on the images")
        return 0.0

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        if self.std == 0:
            return jacobian, NoisyRelease()
        sensitivity = sensitivities(round_.gradient, round_.batch, self.directions, generator)
        variances = self.variances(jacobian.update, sensitivity)
        kept = {name: value > 0 for name, value in variances.items()}
        spread = {name: torch.where(kept[name], value, 1.0).sqrt() for name, value in variances.items()}
        return jacobian, NoisyRelease(spread, kept, notes=("the information in the variances themselves is left out",))


def require_quotient(owner: object, directions: int | None, floor: float, cap: float) -> None:
    """Raise a `ConfigError` for fewer than one direction, or a floor or cap that is not positive and finite."""
    if directions is not None and directions < 1:
        raise ConfigError(
            f"{type(owner).__name__} needs at least 1 direction; got {directions}: the usual number is 10"
        )
    for name, value in (("floor", floor), ("cap", cap)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{type(owner).__name__} needs a positive, finite {name}; got {value:g}")


class OptimalGradientPruning(SparseUpdate):
    """Sets the coordinates of the mean gradient with the largest `n_j / |g_j|` to zero, globally, after averaging.

    `n_j` and `g_j` are those of `OptimalGradientNoise`. The budget is matched to `GradientPruning` of the same
    `fraction` (global) by

    - `count`: the same number of coordinates, exactly `round(fraction * p)`, as in the published code;
    - `weighted`: as many as have the same sum of `g_j^2`, greedily: magnitude pruning removes less of the gradient.

    To match a measured utility, search `fraction` with `matched_scale`. The estimate draws one `randn` per direction.

    Args:
        fraction: in [0, 1].
        match: the budget.
        directions: random directions of the estimate, or None for exact sensitivities (small batches).
        floor, cap: limits of the quotient `n_j / |g_j|`.

    Source: [Chen2024]; its code takes 10 directions and matches the count.
    """

    neutral = (("fraction", 0.0),)

    def __init__(
        self,
        fraction: float = 0.0,
        match: Literal["count", "weighted"] = "count",
        directions: int | None = 10,
        floor: float = 1e-8,
        cap: float = 1e6,
    ) -> None:
        if match not in ("count", "weighted"):
            raise ConfigError(f"OptimalGradientPruning needs match 'count' or 'weighted'; got {match!r}")
        require_quotient(self, directions, floor, cap)
        self.fraction = self.dropped = checked(self, "fraction", fraction, high=1.0)
        self.match: Literal["count", "weighted"] = match
        self.directions, self.floor, self.cap = directions, floor, cap

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.fraction == 0:
            return update
        return self.pruned(update, sensitivities(round_.gradient, round_.batch, self.directions, generator))

    def pruned(self, update: Update, sensitivity: Update) -> Update:
        """The pruned update, given the sensitivities of its coordinates."""
        return unflatten(flatten(update).masked_fill(self._leaking(update, sensitivity), 0.0), update)

    def kept(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.fraction == 0:
            return {name: torch.ones_like(value, dtype=torch.bool) for name, value in update.items()}
        sensitivity = sensitivities(round_.gradient, round_.batch, self.directions, generator)
        return unflatten(~self._leaking(update, sensitivity), update)

    def _leaking(self, update: Update, sensitivity: Update) -> Tensor:
        values, scores = flatten(update), flatten(leakage(sensitivity, update, self.floor, self.cap))
        count = round(self.fraction * len(values))
        return lowest(-scores, count) if self.match == "count" else self._within_energy(values, scores, count)

    def _within_energy(self, values: Tensor, scores: Tensor, count: int) -> Tensor:
        energy = values.double().square()
        budget = energy[lowest(energy, count)].sum()
        order = scores.argsort(descending=True, stable=True)
        # the margin covers rounding: at fraction 1 everything fits
        # of zeros alone nothing is pruned: those that change would exceed the budget
        fits = (energy[order].cumsum(0) <= budget * (1 + 1e-9)) & (budget > 0)
        return torch.zeros_like(fits).index_fill(0, order[fits], True)
