"""Matching where the client let something through: coordinates that it zeroed are left out on both sides."""

from __future__ import annotations

from torch import Tensor

from lit_recon.defenses.vectors import where_observed
from lit_recon.inversion.objectives import Objective, Target
from lit_recon.records import Update


class Observed(Objective):
    """An objective over the coordinates alone whose observed value is not exactly zero.

    A client that prunes, or drops, coordinates of its update tells by the zeros which ones. An attacker who knows the
    defense simulates it anyway (`knowledge.defense`); this is for one who was not told. Without such a defense it costs
    information: behind a ReLU, true gradients are zero too, and candidates should be so.

    Args:
        objective: distance between updates.

    Source: the code of [Jeon2021]: the mask of a sparse gradient, read off the gradient itself.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, candidate: Update, target: Target) -> Tensor:
        return self.objective(where_observed(candidate, target.update), target)
