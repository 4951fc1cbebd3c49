"""How much noise the gradients of layer and head carry, as their ranks tell."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.inversion.features.layer import LayerGradient

#: Noise below this share of the layer's gradient (root mean squares) is rounding, which exact recovery can do with.
_ROUNDING = 1e-5


class GradientNoise(NamedTuple):
    """Standard deviation of what was added to every entry of the `layer`'s and of the `head`'s gradient."""

    layer: float
    head: float

    def scales(self, seen: LayerGradient) -> tuple[float, float]:
        """What to divide squared residuals of head and layer by, to weigh them by noise and have the sum near 1."""
        n = seen.head_gradient.numel() + seen.weight_gradient.numel()
        return (self.head**2 * n if seen.has_head else 0.0), self.layer**2 * n


def gradient_noise(seen: LayerGradient) -> GradientNoise | None:
    """The noise in both gradients, or None if there is only rounding.

    Without noise neither gradient has a rank above the batch's size. Whatever lies beyond is noise, of which a matrix
    of that size has a known share there. Where a head of few classes leaves nothing over, it is taken to be as noisy as
    the layer.

    Source: the residual variance of a regression on `rank` directions; the leading ones keep their part of the noise.
    """
    weight = seen.weight_gradient
    layer = _beyond(weight, seen.n_examples)
    if layer is None or layer <= _ROUNDING * float(weight.square().mean().sqrt()):
        return None
    released = seen.head_gradient
    head = _beyond(released, seen.n_examples) if seen.has_head else None
    return GradientNoise(
        layer, layer if head is None else max(head, _ROUNDING * float(released.square().mean().sqrt()))
    )


def _beyond(gradient: Tensor, rank: int) -> float | None:
    """Root mean square of noise in a matrix `(p, q)` of that rank; None where the rank leaves nothing over."""
    p, q = sorted(gradient.shape)
    if rank >= p:
        return None
    values = torch.linalg.svdvals(gradient)[rank:]
    return float((values.square().sum() / ((p - rank) * (q - rank))).sqrt())
