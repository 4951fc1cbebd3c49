"""Approximate images become exact: the derivatives that they imply unmix the gradient better than they were unmixed.

The gradient of a first layer is D^T X. From images X follow, through the public model, the derivatives D, and from D by
least squares images again. Both depend on the images through few things, class probabilities and which neurons are
active, so that a rough guess gives most entries of D nearly right. Neurons for which it does not are outliers, and the
least squares are robust against these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_recon.inversion.first_layer import (
    FirstLayer,
    assign_labels,
    derivatives,
    relative_residual,
    to_inputs,
    to_pixels,
)
from lit_recon.records import Observation

#: Relative residual of the gradient below which only rounding is left.
SOLVED = 1e-6
#: Relative residual above which images of less residual need not be better ones: the guess is kept.
CONVINCING = 1e-2
#: Reweightings of the robust least squares, and the residual, relative to the median, that counts as none.
REWEIGHTINGS, SMALLEST_RESIDUAL = 15, 1e-3


def refined(
    images: Tensor, labels: Tensor, layer: FirstLayer, seen: Observation, iterations: int
) -> tuple[Tensor, Tensor, float, list[float]]:
    """Images and labels that explain the whole update after at most `iterations` rounds, or the guess.

    A round may lower the residual and raise the error: far from the solution, wrong derivatives are explained by wrong
    images. Only a residual below `CONVINCING` takes the place of the guess.

    Args:
        images: `(n, c, h, w)` in [0, 1]; a guess.
        labels: `(n,)`, in any order.
        layer: first layer.
        seen: the observation.
        iterations: at most; 0 only assigns labels.

    Returns:
        Images in [0, 1], labels in their order, the relative residual of the whole update, and its curve.
    """
    separate = _robust_separation(layer, len(images))
    order = _labelled(images, labels, layer, seen)
    residual = relative_residual(images, order, seen)
    guess = best = (images, order, residual)
    curve = [residual]
    for _ in range(iterations):
        if curve[-1] < SOLVED:
            break
        inputs = separate(derivatives(images, order, layer.bias_name, seen) / len(images))
        images = to_pixels(inputs, seen).clamp(0, 1)
        order = _labelled(images, labels, layer, seen)
        residual = relative_residual(images, order, seen)
        curve.append(residual)
        if residual < best[2]:
            best = images, order, residual
    return *(best if best[2] < CONVINCING else guess), curve


def _labelled(images: Tensor, labels: Tensor, layer: FirstLayer, seen: Observation) -> Tensor:
    inputs = to_inputs(images.double(), seen)
    parts = torch.linalg.lstsq(inputs.T, layer.weight.T, driver="gelsd").solution
    return assign_labels(images, labels, parts, layer.bias_name, seen)[0]


def _robust_separation(layer: FirstLayer, n: int) -> Callable[[Tensor], Tensor]:
    """A function from derivatives `(n, m)` to inputs `(n, d)` whose mixtures come close to the gradient.

    The sum over neurons of distances, not of their squares, is minimised, by iteratively reweighted least squares.
    """
    left, values, right = torch.linalg.svd(torch.cat([layer.weight, layer.bias[:, None]], dim=1), full_matrices=False)
    left, right = left[:, :n] * values[:n], right[:n]
    # first axis: along the column of the bias, whose mixtures are of ones
    ones = right[:, -1]
    turn = torch.linalg.svd(ones[None], full_matrices=True).Vh
    target, axes = left @ turn.T, turn @ right
    scale = (turn @ ones)[0]

    def separate(parts: Tensor) -> Tensor:
        weights = torch.ones(len(target), dtype=target.dtype)
        coordinates = torch.zeros(len(parts), target.shape[1], dtype=target.dtype)
        for _ in range(REWEIGHTINGS):
            system = (parts * weights).T
            coordinates = torch.linalg.lstsq(system, target * weights[:, None], driver="gelsd").solution
            errors = (parts.T @ coordinates - target).norm(dim=1)
            floor = SMALLEST_RESIDUAL * errors.median() + torch.finfo(errors.dtype).tiny
            weights = (floor / (errors + floor)).sqrt()
        coordinates[:, 0] = 1 / scale
        inputs: Tensor = (coordinates @ axes)[:, :-1]
        return inputs

    return separate
