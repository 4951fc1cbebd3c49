"""Clipping of the whole gradient."""

from __future__ import annotations

import math

import torch

from lit_recon.defenses.base import Defense, Round, Stage
from lit_recon.defenses.clipping import clipped
from lit_recon.defenses.strength import checked
from lit_recon.records import Update


class GradientClipping(Defense):
    """Scales the mean gradient to an L2 norm of at most `bound`, over all parameters as one vector, after averaging.

    The bound is absolute. No random numbers. An infinite bound is the identity, a bound of 0 freezes training.
    It gives no differential privacy, as one example may still decide the direction: see `PerExampleClipping`.

    The attacker clips a candidate's gradient by the same rule; for a cosine objective that changes nothing.

    Args:
        bound: largest norm of the released gradient.

    Source: [Liu2025], section 5, bounds 2, 4 and 8.
    """

    stages = (Stage.UPDATE,)

    def __init__(self, bound: float = math.inf) -> None:
        self.bound = checked(self, "bound", bound)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return clipped(update, self.bound)

    def counterpart(self, candidate: Update, observed: Update) -> Update:
        return clipped(candidate, self.bound)
