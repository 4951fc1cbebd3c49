"""Gaussian noise on gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_recon.defenses.base import BatchNormMode, Defense, Round, Stage, checked_finite
from lit_recon.defenses.release import require_separable
from lit_recon.defenses.vectors import normal_like, size, squared_norm, uniform_like
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Update


class GaussianNoise(Defense):
    """Adds independent normal numbers of mean 0 to every coordinate, by default to the mean gradient, after averaging.

    `std` is absolute by default: it knows neither the batch size nor the size of the gradient, and without a clipping
    bound it gives no differential privacy. One draw of `randn` per tensor. A standard deviation of 0 is the identity.

    The attacker's counterpart is the identity, and the Gaussian log-likelihood of what he sees. With `relative` he
    estimates the size of the gradient from the noisy one.

    Args:
        std: standard deviation of one coordinate's noise.
        relative: `std` is in units of the root mean square of the gradient's coordinates.
        before_averaging: each example's gradient gets noise of its own; the mean's then has `std / sqrt(n)`.

    Raises:
        ConfigError: `std` negative or infinite, or `relative` together with `before_averaging`.

    Source: [Zhu2019], section 5.1; [Liu2025], section 5, with 0.001, 0.01 and 0.1.
    """

    def __init__(self, std: float = 0.0, relative: bool = False, before_averaging: bool = False) -> None:
        self.std = checked_finite(self, "std", std)
        if relative and before_averaging:
            raise ConfigError(
                "GaussianNoise is relative to the mean gradient and cannot be added before averaging: "
                "set before_averaging to false"
            )
        self.relative, self.before_averaging = relative, before_averaging
        self.stages = (Stage.PER_EXAMPLE,) if before_averaging else (Stage.UPDATE,)

    def prepare(self, model: Backbone, batch_norm: BatchNormMode = "eval") -> Backbone:
        if self.before_averaging:
            require_separable(model, batch_norm, self)
        return model

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        return self._noisy(gradients, generator) if self.before_averaging else gradients

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return update if self.before_averaging else self._noisy(update, generator)

    def log_likelihood(self, candidate: Update, observed: Update, n_examples: int) -> Tensor | None:
        if self.std == 0:
            return None
        std: float | Tensor = self.std / math.sqrt(n_examples) if self.before_averaging else self.std
        if self.relative:
            mean_square = squared_norm(observed) / size(observed)
            std = self.std * (mean_square / (1 + self.std**2)).sqrt()
        return gaussian_log_likelihood(candidate, observed, std)

    def _noisy(self, values: Update, generator: torch.Generator) -> Update:
        if self.std == 0:
            return values
        scale: float | Tensor = (squared_norm(values) / size(values)).sqrt() if self.relative else 1.0
        return {name: value + normal_like(value, generator) * (self.std * scale) for name, value in values.items()}


def gaussian_log_likelihood(candidate: Update, observed: Update, std: float | Tensor) -> Tensor:
    """Log density of `observed` under independent normals of standard deviation `std` around `candidate`."""
    distance = squared_norm({name: value - observed[name] for name, value in candidate.items()})
    spread = torch.as_tensor(std, dtype=distance.dtype, device=distance.device)
    return -0.5 * distance / spread**2 - size(observed) * (spread.log() + 0.5 * math.log(2 * math.pi))


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
