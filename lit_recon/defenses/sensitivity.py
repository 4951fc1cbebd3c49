"""How strongly each coordinate of a gradient answers to the images, and what noise leaves of that.

With `J` the Jacobian of the mean gradient `g` (p coordinates) with respect to all pixels of the batch together, the
sensitivity of coordinate j is the norm of row j, `n_j = |d g_j / d x|`. Noise of variances `v` leaves the Fisher
information `J^T diag(v)^-1 J`, whose trace is `sum_j n_j^2 / v_j`, and the van Trees inequality bounds the squared
error of any reconstruction from below by (number of pixels)^2 / (trace + prior information).

Source: [Chen2024] for scores and estimator.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_recon.defenses.base import Batch, BatchGradient
from lit_recon.defenses.vectors import normal_like
from lit_recon.errors import ConfigError
from lit_recon.records import Update

#: Pixels in a batch up to which the exact mode, one Jacobian-vector product per pixel, is allowed.
EXACT_LIMIT = 4096


def sensitivities(
    gradient: BatchGradient, batch: Batch, directions: int | None, generator: torch.Generator | None = None
) -> Update:
    """Norms `n_j` of the rows of the Jacobian, in the shapes of the update.

    `n_j^2` is the mean of `(J v)_j^2` over random directions `v` from N(0, I), which is unbiased; with 10 of them the
    relative standard deviation of `n_j` is about 1 / sqrt(20), 22 %. Exact: the sum over all unit vectors.

    `J^T u` is linear in `u`, so that its derivative along `v` is `J v`: the graph of `J^T u` is built once, and every
    direction costs one pass back through it. Forward-mode derivatives of the same (`torch.func.jvp`) took 3 to
    20 times as long for small networks on a CPU under PyTorch 2.13. The Jacobian itself is never stored.

    Args:
        gradient: of the mean loss.
        batch: where to differentiate.
        directions: number of random directions, or None for exact values.
        generator: of the directions; one `randn` per direction.

    Raises:
        ConfigError: less than one direction, no generator for them, or too many pixels for the exact mode.
    """
    images = batch.images.detach().requires_grad_()
    chosen = _unit_vectors(images) if directions is None else _normal_directions(images, directions, generator)
    with torch.enable_grad():
        update = gradient(batch._replace(images=images), create_graph=True)
        cotangents = [torch.zeros_like(value, requires_grad=True) for value in update.values()]
        (transposed,) = torch.autograd.grad(list(update.values()), images, cotangents, create_graph=True)
    total = {name: torch.zeros_like(value) for name, value in update.items()}
    for direction in chosen:
        product = torch.autograd.grad(transposed, cotangents, direction, retain_graph=True, materialize_grads=True)
        for squared, part in zip(total.values(), product, strict=True):
            squared.addcmul_(part, part)
    return {name: (value / (directions or 1)).sqrt() for name, value in total.items()}


def leakage(sensitivity: Update, update: Update, floor: float = 1e-8, cap: float = 1e6) -> Update:
    """Scores `min(n_j / max(|g_j|, floor), cap)`: what a coordinate tells about the images per unit of its size.

    Coordinates with neither sensitivity nor gradient, as behind a dead ReLU, score 0.

    Args:
        sensitivity: `n`.
        update: `g`, of the same shapes.
        floor: keeps the quotient finite where the gradient is zero; a paper's constant, absolute.
        cap: of the quotient.
    """
    return {name: (n / update[name].abs().clamp_min(floor)).clamp_max(cap) for name, n in sensitivity.items()}


def fisher_trace(sensitivity: Update, variance: Update) -> Tensor:
    """`sum_j n_j^2 / v_j`, a float64 scalar; infinite where a coordinate with sensitivity has no noise."""
    parts = []
    for name, n in sensitivity.items():
        squared, v = n.double().square(), variance[name].double()
        parts.append(torch.where(squared > 0, squared / v, 0.0).sum())
    return torch.stack(parts).sum()


def _normal_directions(images: Tensor, count: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    if count < 1 or generator is None:
        raise ConfigError(
            f"sensitivities are estimated from at least 1 direction and a generator; got {count} and {generator}: "
            "take 10 directions, or None for exact values"
        )
    return (normal_like(images, generator) for _ in range(count))


def _unit_vectors(images: Tensor) -> Iterator[Tensor]:
    if images.numel() > EXACT_LIMIT:
        raise ConfigError(
            f"exact sensitivities take one derivative per pixel, at most {EXACT_LIMIT}; the batch has "
            f"{images.numel()}: estimate them from 10 directions"
        )
    for pixel in range(images.numel()):
        direction = torch.zeros(images.numel(), dtype=images.dtype, device=images.device)
        direction[pixel] = 1
        yield direction.view(images.shape)
