"""Gaussian and Laplace noise on gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_recon.defenses.base import Defense, Round, Stage, checked
from lit_recon.defenses.release import require_separable
from lit_recon.defenses.vectors import laplace_like, normal_like, size, squared_norm
from lit_recon.errors import ConfigError
from lit_recon.records import BatchNormMode, Noise, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian, ReleasedInformation


def with_normal_noise(values: Update, std: float | Tensor, generator: torch.Generator) -> Update:
    """The values plus independent normal noise; one draw per tensor, none where `std` is the number 0."""
    if not isinstance(std, Tensor) and std == 0:
        return values
    return {name: value + std * normal_like(value, generator) for name, value in values.items()}


class GaussianNoise(Defense):
    """Adds independent normal noise of mean 0 to every coordinate, by default of the mean gradient, after averaging.

    Without a clipping bound there is no differential privacy. One draw of `randn` per tensor; none for a `std` of 0.

    Args:
        std: standard deviation of one coordinate's noise, absolute: independent of batch size and gradient.
        relative: `std` is in units of the root mean square of the mean gradient's coordinates.
        before_averaging: add the noise to each example's gradient: `std / sqrt(n)` on the mean; not `relative`.

    Source: [Zhu2019], section 5.1; [Liu2025], section 5, with 0.001, 0.01 and 0.1.
    """

    def __init__(self, std: float = 0.0, relative: bool = False, before_averaging: bool = False) -> None:
        self.std = checked(self, "std", std)
        if relative and before_averaging:
            raise ConfigError(
                "GaussianNoise is relative to the mean gradient and cannot be added before averaging: "
                "set before_averaging to false"
            )
        self.relative, self.before_averaging = relative, before_averaging

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stage selected by `before_averaging`."""
        return (Stage.PER_EXAMPLE,) if self.before_averaging else (Stage.UPDATE,)

    def prepare(self, model: nn.Module, batch_norm: BatchNormMode = "eval") -> nn.Module:
        if self.before_averaging:
            require_separable(model, batch_norm, self)
        return model

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        return with_normal_noise(gradients, self.std, generator) if self.before_averaging else gradients

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.before_averaging or self.std == 0:
            return update
        scale = (squared_norm(update) / size(update)).sqrt() if self.relative else 1.0
        return with_normal_noise(update, self.std * scale, generator)

    def released_std(self, n_examples: int) -> float:
        if self.relative and self.std:
            raise ConfigError(f"no bound is known for {self}: the size of relative noise depends on the images")
        return self.std / math.sqrt(n_examples) if self.before_averaging else self.std

    def without_noise(self) -> Defense:
        return Defense()

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        if self.before_averaging:
            return super().released_information(jacobian, round_, std, generator)
        return jacobian.released(self.released_std(len(round_.batch.images)) or std)


class LaplaceNoise(Defense):
    """Adds independent Laplace noise of mean 0 to every coordinate of the mean gradient, after averaging.

    One draw of `rand` per tensor, by the inverse of the distribution function; none for a scale of 0.
    Source: [Zhu2019], section 5.1.

    Args:
        scale: mean absolute value of the noise on a coordinate, whose standard deviation is `sqrt(2) scale`. It is not
            an epsilon: a larger scale is more noise.
    """

    def __init__(self, scale: float = 0.0) -> None:
        self.scale = checked(self, "scale", scale)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.scale == 0:
            return update
        return {name: value + self.scale * laplace_like(value, generator) for name, value in update.items()}

    def released_std(self, n_examples: int) -> float:
        if self.scale:
            raise ConfigError(f"no bound is known for {self}: its noise is not Gaussian")
        return 0.0

    def released_noise(self, n_examples: int) -> Noise | None:
        return Noise("laplace", self.scale) if self.scale else None
