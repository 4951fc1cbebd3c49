"""Clipping of every example's own gradient."""

from __future__ import annotations

import math

import torch

from lit_recon.defenses.base import BatchNormMode, Defense, Stage
from lit_recon.defenses.clipping import clipped_examples
from lit_recon.defenses.per_example import require_separable
from lit_recon.defenses.strength import checked
from lit_recon.models import Backbone
from lit_recon.records import Update


class PerExampleClipping(Defense):
    """Scales each example's gradient to an L2 norm of at most `bound`, over all parameters, before averaging.

    The bound is absolute. No random numbers. An infinite bound is the identity, a bound of 0 freezes training.

    The attacker clips the gradients of his candidates one by one.

    Args:
        bound: largest norm of one example's gradient.

    Source: [Abadi2016], without the noise.
    """

    stages = (Stage.PER_EXAMPLE,)

    def __init__(self, bound: float = math.inf) -> None:
        self.bound = checked(self, "bound", bound)

    def prepare(self, model: Backbone, batch_norm: BatchNormMode = "eval") -> Backbone:
        require_separable(model, batch_norm, self)
        return model

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        return clipped_examples(gradients, self.bound)

    def counterpart_per_example(self, gradients: Update) -> Update:
        return clipped_examples(gradients, self.bound)
