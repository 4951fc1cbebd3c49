"""One step of DP-SGD as a defense."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_recon.bounds.fisher import GaussianRelease, Jacobian, ReleasedInformation, example_clipped_information
from lit_recon.defenses.base import BatchNormMode, Defense, Round, checked
from lit_recon.defenses.clipping import clipped_examples
from lit_recon.defenses.noise import gaussian_log_likelihood, with_normal_noise
from lit_recon.defenses.release import require_separable
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Update


class DPSGD(Defense):
    """Clips every example's gradient, sums, adds N(0, (noise_multiplier * bound)^2), and divides by the batch size.

    Computed as mean of the clipped gradients plus normal numbers of standard deviation `noise_multiplier * bound / n`,
    which is the same. The bound is absolute and holds for all parameters as one vector. One draw of `randn` per tensor.
    An infinite bound without noise changes nothing; a bound of 0 freezes training.

    Formal guarantee: adding or removing one example changes the sum by at most `bound` in L2 norm, and the noise on the
    sum has `noise_multiplier` times that standard deviation. Which (epsilon, delta) follows is computed by
    `lit_recon.privacy`; it depends on how batches are sampled, and on `n` being public.

    The attacker clips the gradients of the candidate images one by one; the log-likelihood is Gaussian.

    Args:
        bound: largest norm of one example's gradient.
        noise_multiplier: standard deviation of the noise on the sum, in units of `bound`.

    Raises:
        ConfigError: a setting out of range, or noise with an infinite bound.

    Source: [Abadi2016], algorithm 1.
    """

    def __init__(self, bound: float = math.inf, noise_multiplier: float = 0.0) -> None:
        self.bound = checked(self, "bound", bound, infinite=True)
        self.noise_multiplier = checked(self, "noise_multiplier", noise_multiplier)
        if noise_multiplier > 0 and bound == math.inf:
            raise ConfigError(
                f"DPSGD scales its noise by the clipping bound: noise_multiplier={noise_multiplier:g} needs a finite "
                "bound, such as the median norm of an example's gradient; or set noise_multiplier to 0"
            )

    def prepare(self, model: Backbone, batch_norm: BatchNormMode = "eval") -> Backbone:
        require_separable(model, batch_norm, self)
        return model

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        return clipped_examples(gradients, self.bound)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        std = self.released_std(len(round_.batch.images))
        return with_normal_noise(update, std, generator)

    def simulate_per_example(self, gradients: Update) -> Update:
        return clipped_examples(gradients, self.bound)

    def log_likelihood(self, candidate: Update, observed: Update, n_examples: int) -> Tensor | None:
        std = self.released_std(n_examples)
        return gaussian_log_likelihood(candidate, observed, std) if std else None

    def released_std(self, n_examples: int) -> float:
        return self.noise_multiplier * self.bound / n_examples if self.noise_multiplier else 0.0

    def without_noise(self) -> Defense:
        return DPSGD(self.bound)

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        batch = round_.batch
        singles = [round_.gradient(batch.examples(i, i + 1)) for i in range(len(batch.images))]
        own = self.released_std(len(singles)) or std
        information, mean = example_clipped_information(jacobian, singles, self.bound, own)
        return ReleasedInformation(mean, GaussianRelease(own), information)
