"""Optimal Gradient Pruning: drop the coordinates that tell most about the images and matter least for training."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_recon.defenses.base import Defense, Round, Stage
from lit_recon.defenses.optimal_noise import require_quotient
from lit_recon.defenses.pruning import lowest
from lit_recon.defenses.sensitivity import leakage, sensitivities
from lit_recon.defenses.strength import checked
from lit_recon.defenses.vectors import flatten, unflatten, where_observed
from lit_recon.errors import ConfigError
from lit_recon.records import Update


class OptimalGradientPruning(Defense):
    """Sets the coordinates of the mean gradient with the largest `n_j / |g_j|` to zero, globally, after averaging.

    `n_j` is the sensitivity of coordinate j to the images (see `sensitivities`), `g_j` the update that arrives here.
    The budget is matched to `GradientPruning` of the same `fraction` (global) by

    - `count`: the same number of coordinates, exactly `round(fraction * p)`, as in the published code;
    - `weighted`: as many as fit into the same gradient energy, `sum of g_j^2 over the pruned coordinates`: the greedy
      solution of the knapsack that this defense is derived from.

    To match a measured utility, search `fraction` with `matched_scale`. Compare on an axis of utility: pruning the
    same number of coordinates as magnitude pruning costs more of the gradient.

    The estimate draws one `randn` per direction. A fraction of 0 is the identity, and draws nothing.

    The attacker reads the mask off what he sees and applies it to his candidate.

    Args:
        fraction: in [0, 1].
        match: the budget.
        directions: random directions of the estimate, or None for exact sensitivities (small batches).
        floor, cap: of the quotient `n_j / |g_j|`.

    Raises:
        ConfigError: a setting out of range.

    Source: [Chen2024]; its code takes 10 directions and matches the count.
    """

    stages = (Stage.UPDATE,)

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
        self.fraction = checked(self, "fraction", fraction, high=1.0)
        self.match: Literal["count", "weighted"] = match
        self.directions, self.floor, self.cap = directions, floor, cap

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.fraction == 0:
            return update
        return self.pruned(update, sensitivities(round_.gradient, round_.batch, self.directions, generator))

    def pruned(self, update: Update, sensitivity: Update) -> Update:
        """The pruned update, given its sensitivities."""
        values, scores = flatten(update), flatten(leakage(sensitivity, update, self.floor, self.cap))
        count = round(self.fraction * len(values))
        mask = lowest(-scores, count) if self.match == "count" else self._within_energy(values, scores, count)
        return unflatten(values.masked_fill(mask, 0.0), update)

    def counterpart(self, candidate: Update, observed: Update) -> Update:
        return candidate if self.fraction == 0 else where_observed(candidate, observed)

    def _within_energy(self, values: Tensor, scores: Tensor, count: int) -> Tensor:
        energy = values.double().square()
        budget = energy[lowest(energy, count)].sum()
        order = scores.argsort(descending=True, stable=True)
        # a margin for rounding: at fraction 1 everything fits
        fits = energy[order].cumsum(0) <= budget * (1 + 1e-9)
        return torch.zeros_like(fits).index_fill(0, order[fits], True)
