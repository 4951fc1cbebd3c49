"""The span of the training images, from the first linear layer of a released model."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_recon.attacks.trainset.base import ReleasedModel
from lit_recon.errors import UnsupportedModelError

#: Relative error up to which the input of the first layer counts as the pixels, scaled and shifted one by one.
_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Span:
    """Images `center + coordinates @ basis`.

    Attributes:
        center: image `(c, h, w)` that the network subtracts.
        basis: orthonormal rows `(k, c * h * w)`.
        singular_values: of the layer's change, in descending order; the basis belongs to the first `k`.
    """

    center: Tensor
    basis: Tensor
    singular_values: Tensor

    def coordinates(self, images: Tensor) -> Tensor:
        """Coordinates `(n, k)` of the projections of images `(n, c, h, w)`."""
        return (images - self.center).flatten(1) @ self.basis.T

    def images(self, coordinates: Tensor) -> Tensor:
        """Images `(n, c, h, w)` with these coordinates `(n, k)`."""
        return self.center + (coordinates @ self.basis).view(-1, *self.center.shape)


def training_span(seen: ReleasedModel) -> Span:
    """The span of the training images in which the first layer on the pixels has moved.

    Every gradient of a linear layer's weight is a sum of outer products with the layer's inputs, and so is its change
    over the whole training by gradient descent, with or without momentum or weight decay where the start is zero. The
    start is subtracted if it is known; otherwise the released layer stands for the change, which presumes a start far
    smaller than it. Its small singular values are the start's, or rounding: the rank is where consecutive singular
    values differ most, at most the number of training images.

    Raises:
        UnsupportedModelError: the network has no linear layer on the pixels, or that layer has not moved.

    Source: the subspace of the data from the change of the first layer, arXiv 2605.06519.
    """
    name, center, scale = _first_layer(seen)
    change = seen.weights[name]
    if seen.start is not None:
        # Weight decay multiplies the start by an unknown factor, which is small after a long training.
        change = change - seen.start[name]
    _, singular, rows = torch.linalg.svd(change, full_matrices=False)
    floor = singular[0] * torch.finfo(singular.dtype).eps * max(change.shape)
    if not singular[0] > 0:
        raise UnsupportedModelError(
            f"the first layer {name} equals its start, so that it shows no training image: a layer that was trained "
            "is needed; do not restrict candidates to a subspace"
        )
    most = min(seen.n_examples, len(singular) - 1)
    rank = 1 if most < 1 else int((singular[:most] / singular[1 : most + 1].clamp_min(floor)).argmax()) + 1
    # Rows are in the units of the layer's inputs; in pixels they are divided by the inputs' scale.
    basis = torch.linalg.qr((rows[:rank] / scale).T)[0].T.contiguous()
    return Span(center, basis, singular)


@torch.no_grad()
def _first_layer(seen: ReleasedModel) -> tuple[str, Tensor, Tensor]:
    """The weight's name of a linear layer whose inputs are `(pixels - center) * scale`, with center and scale.

    `center` is `(c, h, w)`, `scale` `(c * h * w,)`.
    """
    n_pixels = prod(seen.image_shape)
    found = [
        (name, module)
        for name, module in seen.model.named_modules()
        if isinstance(module, nn.Linear) and module.in_features == n_pixels
    ]
    probes = torch.rand(4, *seen.image_shape, generator=torch.Generator().manual_seed(0)).to(seen.like)
    probes[0], probes[1] = 0, 1
    for name, layer in found:
        inputs: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, arguments, to=inputs: to.append(arguments[0]))  # type: ignore[misc]
        try:
            functional_call(seen.model, dict(seen.weights), (probes,))
        finally:
            hook.remove()
        if len(inputs) != 1 or tuple(inputs[0].shape) != (4, n_pixels):
            continue
        [shown] = inputs
        scale = shown[1] - shown[0]
        expected = shown[0] + probes.flatten(1) * scale
        if bool((scale != 0).all()) and torch.allclose(shown, expected, _TOLERANCE, _TOLERANCE):
            return f"{name}.weight", -(shown[0] / scale).view(seen.image_shape), scale
    raise UnsupportedModelError(
        f"the span of the training images shows in a linear layer on all {n_pixels} pixels; this "
        f"{type(seen.model).__name__} has none: do not restrict candidates to a subspace"
    )
