"""The mechanism of DP-SGD."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_recon.defenses.base import BatchNormMode, Defense, Round, Stage, checked, checked_finite
from lit_recon.defenses.clipping import clipped_examples
from lit_recon.defenses.noise import gaussian_log_likelihood
from lit_recon.defenses.release import require_separable
from lit_recon.defenses.vectors import normal_like
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Update


class DPSGD(Defense):
    """Clips every example's gradient, sums, adds N(0, (noise_multiplier * bound)^2), and divides by the batch size.

    Computed as mean of the clipped gradients plus normal numbers of standard deviation `noise_multiplier * bound / n`,
    which is the same. The bound is absolute and holds for all parameters as one vector. One draw of `randn` per tensor.
    An infinite bound without noise is the identity; a bound of 0 freezes training.

    Formal guarantee: adding or removing one example changes the sum by at most `bound` in L2 norm, and the noise on the
    sum has `noise_multiplier` times that. What (epsilon, delta) follows is the accountant's to say; it depends on how
    batches are sampled, and on `n` being public.

    The attacker clips the gradients of his candidates one by one, and has a Gaussian log-likelihood.

    Args:
        bound: largest norm of one example's gradient.
        noise_multiplier: standard deviation of the noise on the sum, in units of `bound`.

    Raises:
        ConfigError: a setting out of range, or noise with an infinite bound.

    Source: [Abadi2016], algorithm 1.
    """

    stages = (Stage.PER_EXAMPLE, Stage.UPDATE)

    def __init__(self, bound: float = math.inf, noise_multiplier: float = 0.0) -> None:
        self.bound = checked(self, "bound", bound)
        self.noise_multiplier = checked_finite(self, "noise_multiplier", noise_multiplier)
        if noise_multiplier > 0 and bound == math.inf:
            raise ConfigError(
                f"DPSGD scales its noise by the clipping bound: noise_multiplier={noise_multiplier:g} needs a finite "
                "bound, such as the median norm of an example's gradient; or set noise_multiplier to 0"
            )

    def std(self, n_examples: int) -> float:
        """Standard deviation of the noise on one coordinate of the released mean."""
        return self.noise_multiplier * self.bound / n_examples if self.noise_multiplier else 0.0

    def prepare(self, model: Backbone, batch_norm: BatchNormMode = "eval") -> Backbone:
        require_separable(model, batch_norm, self)
        return model

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        return clipped_examples(gradients, self.bound)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        std = self.std(len(round_.batch.images))
        if std == 0:
            return update
        return {name: value + std * normal_like(value, generator) for name, value in update.items()}

    def simulate_per_example(self, gradients: Update) -> Update:
        return clipped_examples(gradients, self.bound)

    def log_likelihood(self, candidate: Update, observed: Update, n_examples: int) -> Tensor | None:
        std = self.std(n_examples)
        return gaussian_log_likelihood(candidate, observed, std) if std else None
