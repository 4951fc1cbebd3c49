"""Optimal Gradient Noise: noise where the gradient tells most about the images and matters least for training."""

from __future__ import annotations

from typing import Literal

import torch

from lit_recon.defenses.base import Defense, Round, Stage
from lit_recon.defenses.sensitivity import leakage, sensitivities
from lit_recon.defenses.strength import checked_finite
from lit_recon.defenses.vectors import normal_like
from lit_recon.errors import ConfigError
from lit_recon.records import Update

#: What equals that of uniform noise of the same `std`.
Match = Literal["energy", "weighted", "measured"]


class OptimalGradientNoise(Defense):
    """Adds normal noise to the mean gradient, after averaging, of variance `v_j` proportional to `n_j / |g_j|`.

    `n_j` is the sensitivity of coordinate j to the images (see `sensitivities`), `g_j` the update that arrives here.
    Among all variances with the same gradient-weighted energy `sum_j g_j^2 v_j` these leave the least Fisher trace.

    The budget is matched to uniform noise of standard deviation `std` (absolute) by

    - `weighted`: equal `sum_j g_j^2 v_j`, for which the variances are optimal: the Fisher trace falls to
      `cos^2(n, |g|)` of that of uniform noise (by Cauchy and Schwarz; where floor and cap do not bind);
    - `energy`: equal `sum_j v_j`, as in the published code. The Fisher trace is then usually *larger* than that of
      uniform noise, that is, the defense protects less by its own bound, and hurts training less;
    - `measured`: standard deviations `scale` times those of `energy`, with the scale at which the measured utility is
      equal; `matched_scale` finds it.

    Never compare the first two at equal `std`; compare on an axis of utility.

    Noise is drawn after the directions of the estimate, one `randn` per tensor. A `std` of 0 is the identity, and draws
    nothing. Coordinates that do not depend on the images get no noise; if none does, the noise is uniform. As the
    variances depend on private data, no differential privacy can be stated.

    The attacker's counterpart is the identity: he does not know the variances.

    Args:
        std: of the uniform noise with the same budget.
        match: the budget.
        scale: for `measured` only.
        directions: random directions of the estimate, or None for exact sensitivities (small batches).
        floor, cap: of the quotient `n_j / |g_j|`; the published code's. They decide where gradients are nearly zero.

    Raises:
        ConfigError: a setting out of range, `measured` without a scale, or a scale without `measured`.

    Source: [Chen2024]; its code takes 10 directions and matches the energy.
    """

    stages = (Stage.UPDATE,)

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
        self.std = checked_finite(self, "std", std)
        self.match: Match = match
        self.scale = None if scale is None else checked_finite(self, "scale", scale)
        self.directions, self.floor, self.cap = directions, floor, cap

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.std == 0:
            return update
        variance = self.variances(update, sensitivities(round_.gradient, round_.batch, self.directions, generator))
        return {name: value + variance[name].sqrt() * normal_like(value, generator) for name, value in update.items()}

    def variances(self, update: Update, sensitivity: Update) -> Update:
        """Variance of every coordinate's noise for an update and its sensitivities."""
        scores = leakage(sensitivity, update, self.floor, self.cap)
        weighted = self.match == "weighted"
        uniform, allocated = 0.0, 0.0
        for name, value in update.items():
            # squares of small gradients underflow in single precision
            weights = value.double().square() if weighted else torch.ones_like(value, dtype=torch.float64)
            uniform += float(weights.sum())
            allocated += float((weights * scores[name]).sum())
        if allocated == 0:
            return {name: torch.full_like(value, self.std**2) for name, value in update.items()}
        factor = self.std**2 * uniform / allocated * (1.0 if self.scale is None else self.scale) ** 2
        return {name: score * factor for name, score in scores.items()}


def require_quotient(owner: object, directions: int | None, floor: float, cap: float) -> None:
    """Refuse settings under which `n_j / |g_j|` could not be computed.

    Raises:
        ConfigError: less than one direction, or a floor or cap that is not positive and finite.
    """
    if directions is not None and directions < 1:
        raise ConfigError(
            f"{type(owner).__name__} needs at least 1 direction; got {directions}: the usual number is 10"
        )
    for name, value in (("floor", floor), ("cap", cap)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{type(owner).__name__} needs a positive, finite {name}; got {value:g}")
