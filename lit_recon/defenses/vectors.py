"""Updates as vectors: norm, coordinates, and random vectors of the same shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lit_recon.errors import ConfigError
from lit_recon.records import Update


def flatten(update: Mapping[str, Tensor]) -> Tensor:
    """All coordinates `(p,)`, tensor after tensor."""
    return torch.cat([value.reshape(-1) for value in update.values()])


def unflatten(vector: Tensor, like: Update) -> Update:
    """Inverse of `flatten` for an update of the shapes of `like`."""
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view(value.shape) for part, (name, value) in zip(parts, like.items(), strict=True)}


def size(update: Update) -> int:
    """Number of coordinates `p`."""
    return sum(value.numel() for value in update.values())


def mean_update(updates: Sequence[Update]) -> Update:
    """The mean of the updates of several clients, at least one."""
    if len(updates) == 1:
        return updates[0]
    return {name: torch.stack([update[name] for update in updates]).mean(0) for name in updates[0]}


def squared_norm(update: Update) -> Tensor:
    """Sum of the squares of all coordinates, a scalar."""
    return torch.stack([value.square().sum() for value in update.values()]).sum()


def normal_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of the shape, dtype and device of `value`, drawn on the generator's device."""
    return torch.randn(value.shape, generator=generator, device=generator.device, dtype=value.dtype).to(value.device)


def uniform_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1) of the shape, dtype and device of `value`, drawn on the generator's device."""
    return torch.rand(value.shape, generator=generator, device=generator.device, dtype=value.dtype).to(value.device)


def laplace_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Laplace numbers of scale 1 in the shape of `value`, by the inverse distribution function of `uniform_like`."""
    centered = uniform_like(value, generator) - 0.5
    # 1 - 2 |u| is at least one rounding unit: the logarithm stays finite
    tail = (1 - 2 * centered.abs()).clamp_min(torch.finfo(value.dtype).eps / 2)
    return -centered.sign() * tail.log()


def entrywise(update: Update, change: Callable[[Tensor], Tensor]) -> Update:
    """The update with changed tensors, but for those without dimensions."""
    return {name: change(value) if value.dim() else value for name, value in update.items()}


def where_observed(candidate: Update, observed: Update) -> Update:
    """The candidate's coordinates where the observed update is not zero, and zero elsewhere.

    A coordinate that was zero before the defense counts as dropped: one equation is lost, none is wrong.
    """
    return {name: torch.where(observed[name] != 0, value, 0.0) for name, value in candidate.items()}


def matched_scale(utility: Callable[[float], float], target: float, low: float, high: float, steps: int = 20) -> float:
    """The scale in [low, high], both positive, at which a monotone `utility` meets `target`.

    By bisection of its logarithm; the utility, for example the final training loss, is measured `steps` + 2 times. A
    `ConfigError` says that `low` and `high` do not enclose the target.

    >>> round(matched_scale(lambda scale: scale**2, target=9.0, low=1.0, high=10.0), 3)
    3.0
    """
    if not 0 < low < high < math.inf:
        raise ConfigError(f"matched_scale needs 0 < low < high, both finite; got low={low:g} and high={high:g}")
    at_low, at_high = utility(low), utility(high)
    if not min(at_low, at_high) <= target <= max(at_low, at_high):
        nearest = low if abs(at_low - target) < abs(at_high - target) else high
        raise ConfigError(
            f"no scale in [{low:g}, {high:g}] reaches {target:g}: the utility goes from {at_low:g} to {at_high:g}; "
            f"the nearest is {nearest:g}: widen the interval"
        )
    rising = at_high > at_low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (utility(middle) < target) == rising else (low, middle)
    return math.sqrt(low * high)
