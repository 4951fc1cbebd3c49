"""Random sparsity of gradients."""

from __future__ import annotations

import torch

from lit_recon.defenses.base import Defense, Round, Stage
from lit_recon.defenses.strength import checked
from lit_recon.defenses.vectors import uniform_like, where_observed
from lit_recon.errors import ConfigError
from lit_recon.records import Update


class GradientDropout(Defense):
    """Sets every coordinate of the mean gradient to zero with probability `rate`, independently, after averaging.

    The coordinates that stay are as they were, unless `rescale` divides them by `1 - rate`, which makes the gradient
    unbiased and leaves its direction alone. One draw of `rand` per tensor. A rate of 0 is the identity.

    The attacker reads the mask off what he sees and applies it, and the factor, to his candidate.

    Args:
        rate: probability that a coordinate is dropped, in [0, 1].
        rescale: keep the expectation.

    Raises:
        ConfigError: a rate outside its range, or nothing left to rescale.

    Source: [Liu2025], section 5 ("randomly dropout the entries of the gradient"), with 0.3 to 0.9.
    """

    stages = (Stage.UPDATE,)

    def __init__(self, rate: float = 0.0, rescale: bool = False) -> None:
        self.rate, self.rescale = checked(self, "rate", rate, high=1.0), rescale
        if rescale and rate == 1:
            raise ConfigError("GradientDropout drops everything at rate 1 and cannot rescale: set rescale to false")

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.rate == 0:
            return update
        kept = {name: uniform_like(value, generator) >= self.rate for name, value in update.items()}
        return self._scaled({name: torch.where(kept[name], value, 0.0) for name, value in update.items()})

    def counterpart(self, candidate: Update, observed: Update) -> Update:
        return candidate if self.rate == 0 else self._scaled(where_observed(candidate, observed))

    def _scaled(self, values: Update) -> Update:
        return {name: value / (1 - self.rate) for name, value in values.items()} if self.rescale else values
