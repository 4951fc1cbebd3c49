"""Laplace noise on gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_recon.defenses.base import Defense, Round, Stage
from lit_recon.defenses.strength import checked_finite
from lit_recon.defenses.vectors import size, uniform_like
from lit_recon.records import Update


class LaplaceNoise(Defense):
    """Adds independent Laplace numbers of mean 0 to every coordinate of the mean gradient, after averaging.

    `scale` is absolute: the mean of |noise|, so that the standard deviation is `sqrt(2) scale`. It is no epsilon: more
    is more noise. One draw of `rand` per tensor, through the inverse of the distribution function. A scale of 0 is the
    identity.

    The attacker's counterpart is the identity, and the log-likelihood, an L1 distance.

    Args:
        scale: mean absolute noise of a coordinate.

    Source: [Zhu2019], section 5.1.
    """

    stages = (Stage.UPDATE,)

    def __init__(self, scale: float = 0.0) -> None:
        self.scale = checked_finite(self, "scale", scale)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.scale == 0:
            return update
        return {name: value + self.scale * _standard_laplace(value, generator) for name, value in update.items()}

    def log_likelihood(self, candidate: Update, observed: Update, n_examples: int) -> Tensor | None:
        if self.scale == 0:
            return None
        distance = torch.stack([(value - observed[name]).abs().sum() for name, value in candidate.items()]).sum()
        return -distance / self.scale - size(observed) * math.log(2 * self.scale)


def _standard_laplace(like: Tensor, generator: torch.Generator) -> Tensor:
    centered = uniform_like(like, generator) - 0.5
    # 1 - 2 |u| is at least one unit of rounding: the logarithm stays finite
    tail = (1 - 2 * centered.abs()).clamp_min(torch.finfo(like.dtype).eps / 2)
    return -centered.sign() * tail.log()
