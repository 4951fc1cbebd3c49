"""The release that a defense makes of an update, as bounds need to know it: clipping, dropped coordinates, noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import add, mul

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.records import NoiseFamily, Update


@dataclass(frozen=True)
class NoisyRelease:
    """A release of an update: clipping as one vector, then dropping of coordinates, then independent noise.

    Attributes:
        scale: standard deviation of normal noise, mean absolute value of Laplace noise, as `Noise.scale`: above 0, one
            number, or one per coordinate in the update's shapes. None: no noise, of which there is no information.
        kept: coordinates that are released, treated as fixed and known; None: all.
        bound: largest norm of the update, absolute.
        constant: values that are released whatever the update is, 0 on kept coordinates; None: zeros.
        family: of the noise.
        notes: information that is left out.
    """

    scale: float | Mapping[str, Tensor] | None = None
    kept: Mapping[str, Tensor] | None = None
    bound: float = math.inf
    constant: Mapping[str, Tensor] | None = None
    family: NoiseFamily = "gaussian"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        own = self.scale
        values = [torch.tensor(own)] if isinstance(own, float | int) else list((own or {}).values())
        if not all(bool((value > 0).all()) and bool(value.isfinite().all()) for value in values):
            raise ConfigError(
                "a release needs noise with a positive, finite scale on every coordinate: without noise an update may "
                "determine its inputs exactly, and the only bound is 0"
            )
        if not self.bound > 0:
            raise ConfigError(f"a release needs a clipping bound above 0; got {self.bound:g}: it would be zero")

    def with_noise(self, std: float) -> NoisyRelease:
        """The same, with normal noise of this standard deviation where it has none."""
        return self if self.scale is not None else replace(self, scale=std, family="gaussian")

    def masked(self, other: NoisyRelease) -> NoisyRelease:
        """This release without noise, and then only what `other` keeps, which neither clips nor has noise."""
        kept, constant = other.kept, self.constant
        if kept is not None and constant is not None:
            constant = {name: kept[name] * value for name, value in constant.items()}
        return replace(self, kept=_both(self.kept, kept, mul), constant=_both(constant, other.constant, add))

    def clips(self, norm: Tensor) -> bool:
        """Whether an update of this norm is scaled."""
        return bool(norm > self.bound)

    def mean(self, update: Update) -> Update:
        """The release without the noise."""
        norm, kept, constant = norm_of(update), self.kept, self.constant
        factor = float(self.bound / norm) if self.clips(norm) else 1.0
        found = {name: factor * (value if kept is None else kept[name] * value) for name, value in update.items()}
        return found if constant is None else {name: value + constant[name] for name, value in found.items()}

    def drawn(self, update: Update, generator: torch.Generator) -> Update:
        """A random release of `update`; dropped coordinates are zero."""
        released = {}
        for name, value in self.mean(update).items():
            noise = self._scale(name) * self._unit_noise(value, generator)
            released[name] = value + (noise if self.kept is None else self.kept[name] * noise)
        return released

    def _unit_noise(self, value: Tensor, generator: torch.Generator) -> Tensor:
        if self.family == "gaussian":
            return torch.randn(value.shape, generator=generator, dtype=value.dtype)
        waiting = torch.empty(2, *value.shape, dtype=value.dtype).exponential_(generator=generator)
        return waiting[0] - waiting[1]

    def _scale(self, name: str) -> float | Tensor:
        if self.scale is None:
            raise ConfigError("there is no information about a release without noise: give it a scale")
        return self.scale if isinstance(self.scale, float | int) else self.scale[name]

    def precision(self, update: Update) -> Update:
        """The information in every coordinate of an update about its mean, 0 where it is dropped.

        It is `1 / scale^2` for both families.
        """
        weights = {}
        for name, value in update.items():
            scale = self._scale(name) if not isinstance(self.scale, Mapping) or name in self.scale else None
            kept = torch.ones_like(value) if self.kept is None else self.kept.get(name)
            if scale is None or kept is None or {getattr(scale, "shape", value.shape), kept.shape} != {value.shape}:
                raise ShapeError(
                    f"noise and mask must have the names and shapes of the update; they differ in {name!r}"
                )
            weights[name] = kept.to(value.dtype) / scale**2
        return weights


def _both(
    left: Mapping[str, Tensor] | None, right: Mapping[str, Tensor] | None, combined: Callable[[Tensor, Tensor], Tensor]
) -> Mapping[str, Tensor] | None:
    """One of them, or where there are two, their entries combined."""
    if left is None or right is None:
        return right if left is None else left
    return {name: combined(value, right[name]) for name, value in left.items()}


def inner(left: Update, right: Update) -> Tensor:
    """Inner product of two updates, a scalar."""
    return torch.stack([(left[name] * value).sum() for name, value in right.items()]).sum()


def norm_of(update: Update) -> Tensor:
    """L2 norm of an update, a scalar."""
    return inner(update, update).sqrt()
