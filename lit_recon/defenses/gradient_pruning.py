"""Sparsity of gradients by magnitude."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_recon.defenses.base import Defense, Round, Stage
from lit_recon.defenses.pruning import lowest
from lit_recon.defenses.strength import checked
from lit_recon.defenses.vectors import flatten, unflatten, where_observed
from lit_recon.errors import ConfigError
from lit_recon.records import Update


class GradientPruning(Defense):
    """Sets the fraction of the mean gradient's coordinates that is smallest in absolute value to zero, after averaging.

    Exactly `round(fraction * p)` of the `p` coordinates are pruned, of all parameters together (`global`) or of each
    tensor (`tensor`, weights and biases alike). No random numbers. A fraction of 0 is the identity.

    The attacker reads the mask off what he sees and applies it to his candidate.

    Args:
        fraction: in [0, 1].
        scope: what the fraction is of.

    Raises:
        ConfigError: a setting outside its range.

    Source: [Zhu2019], section 5.2 and [Liu2025], section 5, with 0.3 to 0.99, which do not say the scope; global in
        the code of [Chen2024], per tensor in that of GradAttack.
    """

    stages = (Stage.UPDATE,)

    def __init__(self, fraction: float = 0.0, scope: Literal["global", "tensor"] = "global") -> None:
        if scope not in ("global", "tensor"):
            raise ConfigError(f"GradientPruning needs scope 'global' or 'tensor'; got {scope!r}")
        self.fraction = checked(self, "fraction", fraction, high=1.0)
        self.scope: Literal["global", "tensor"] = scope

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.scope == "global":
            return unflatten(self._pruned(flatten(update)), update)
        return {name: self._pruned(value) for name, value in update.items()}

    def counterpart(self, candidate: Update, observed: Update) -> Update:
        return candidate if self.fraction == 0 else where_observed(candidate, observed)

    def _pruned(self, values: Tensor) -> Tensor:
        return values.masked_fill(lowest(values.abs(), round(self.fraction * values.numel())), 0.0)
