"""Clipping of gradients to a largest L2 norm, alone or with the noise of DP-SGD.

For finite gradients the norm of the result is at most the bound (up to rounding), and a gradient within the bound is
returned bit for bit. An infinite bound changes nothing; a bound of 0 gives zero, which freezes training.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_recon.defenses.base import Defense, Round, checked
from lit_recon.defenses.noise import with_normal_noise
from lit_recon.defenses.release import require_separable
from lit_recon.defenses.vectors import squared_norm
from lit_recon.errors import ConfigError
from lit_recon.noisy_release import NoisyRelease
from lit_recon.records import BatchNormMode, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian


def clipped(update: Update, bound: float) -> Update:
    """The update, scaled as a whole to an L2 norm of at most `bound`."""
    factor = clip_factors(squared_norm(update), bound)
    return {name: value * factor for name, value in update.items()}


def clipped_like(update: Update, other: Update) -> Update:
    """The update, scaled as a whole to an L2 norm of at most that of the other."""
    factor = clip_factors(squared_norm(update), squared_norm(other).sqrt())
    return {name: value * factor for name, value in update.items()}


def clipped_examples(gradients: Update, bound: float) -> Update:
    """Gradients `(n, ...)` of single examples, each scaled as a whole to an L2 norm of at most `bound`."""
    squared = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0)
    factors = clip_factors(squared, bound)
    return {name: value * factors.view(-1, *[1] * (value.dim() - 1)) for name, value in gradients.items()}


def clip_factors(squared: Tensor, bound: float | Tensor) -> Tensor:
    """The factors, at most 1, that clip gradients of the given squared norms; elementwise."""
    if not isinstance(bound, Tensor) and bound == math.inf:
        return torch.ones_like(squared)  # the unused quotient has a derivative too: 0 times infinity
    # finite derivative at a norm of zero
    norm = squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
    return torch.where(norm > bound, bound / norm, 1.0)


class GradientClipping(Defense):
    """Scales the mean gradient to an L2 norm of at most `bound`, over all parameters as one vector, after averaging.

    No differential privacy: one example can still determine the direction. The attacker clips a candidate's gradient.

    Args:
        bound: largest norm of the released gradient, absolute.

    Source: [Liu2025], section 5, bounds 2, 4 and 8.
    """

    neutral = (("bound", math.inf),)

    def __init__(self, bound: float = math.inf) -> None:
        self.bound = checked(self, "bound", bound, infinite=True)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return clipped(update, self.bound)

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return clipped(candidate, self.bound)

    def largest_hidden(self, observed: Update) -> dict[str, float]:
        return dict.fromkeys(observed, 0.0)

    def require_shares(self) -> None:
        return  # clips any client's candidate update, whatever is observed

    def released_std(self, n_examples: int) -> float:
        return 0.0

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        return jacobian, NoisyRelease(bound=self.bound)


class _ClippedExamples(Defense, ABC):
    """Each example's gradient is scaled to an L2 norm of at most `bound` before the mean is taken."""

    neutral = (("bound", math.inf),)
    bound: float

    def prepare(self, model: nn.Module, batch_norm: BatchNormMode = "eval") -> nn.Module:
        require_separable(model, batch_norm, self)
        return model

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        return clipped_examples(gradients, self.bound)

    def example_factors(self, squared_norms: Tensor) -> Tensor:
        return clip_factors(squared_norms, self.bound)

    def simulate_per_example(self, gradients: Update) -> Update:
        return clipped_examples(gradients, self.bound)

    @abstractmethod
    def released_std(self, n_examples: int) -> float: ...

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        singles = round_.single_gradients()
        mean = jacobian.after_clipped_examples(singles, self.bound)
        return mean, NoisyRelease(self.released_std(len(singles)) or None)


class PerExampleClipping(_ClippedExamples):
    """Scales each example's gradient to an L2 norm of at most `bound`, over all parameters, before averaging.

    The attacker clips the gradients of the candidate images one by one. Source: [Abadi2016], without the noise.

    Args:
        bound: largest norm of one example's gradient, absolute.
    """

    def __init__(self, bound: float = math.inf) -> None:
        self.bound = checked(self, "bound", bound, infinite=True)

    def largest_hidden(self, observed: Update) -> dict[str, float]:
        return dict.fromkeys(observed, 0.0)

    def released_std(self, n_examples: int) -> float:
        return 0.0


class DPSGD(_ClippedExamples):
    """Clips every example's gradient, sums, adds N(0, (noise_multiplier * bound)^2), and divides by the batch size.

    Computed as the mean of the clipped gradients plus normal noise, one `randn` per tensor, of standard deviation
    `noise_multiplier * bound / n`. Adding or removing one example changes the sum by at most `bound` in L2 norm;
    `lit_recon.privacy` computes the resulting (epsilon, delta), which depends on how batches are sampled, and on `n`
    being public.

    Args:
        bound: largest norm of one example's gradient, over all parameters, absolute; finite if there is noise.
        noise_multiplier: standard deviation of the noise on the sum, in units of `bound`.

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

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return with_normal_noise(update, self.released_std(len(round_.batch.images)), generator)

    def released_std(self, n_examples: int) -> float:
        return self.noise_multiplier * self.bound / n_examples if self.noise_multiplier else 0.0

    def without_noise(self) -> Defense:
        return DPSGD(self.bound)
