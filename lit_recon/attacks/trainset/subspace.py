"""The span of the training images, from the first linear layer of a released model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_recon.attacks.trainset.base import ReleasedModel
from lit_recon.errors import UnsupportedModelError
from lit_recon.solving import least_squares

#: Relative error up to which the input of the first layer counts as the pixels, scaled and shifted one by one.
_TOLERANCE = 1e-4
#: Singular values of the span are above this many times the largest that can only be noise. Those of a random matrix
#: are dense at their upper end: without training images one is rarely 20 % above the tenth.
_ABOVE_NOISE = 1.2


@dataclass(frozen=True, eq=False)
class Span:
    """Images `center + coordinates @ basis`.

    Attributes:
        center: image `(c, h, w)` that the network subtracts.
        basis: orthonormal rows `(k, c * h * w)`.
        singular_values: of the layer's change, in descending order; the basis belongs to the first `k`.
        layer: name of the layer.
        inputs: orthonormal rows `(k, c * h * w)`, the span of the layer's inputs.
    """

    center: Tensor
    basis: Tensor
    singular_values: Tensor
    layer: str
    inputs: Tensor

    def coordinates(self, images: Tensor) -> Tensor:
        """Coordinates `(n, k)` of the projections of images `(n, c, h, w)`."""
        return (images - self.center).flatten(1) @ self.basis.T

    def images(self, coordinates: Tensor) -> Tensor:
        """Images `(n, c, h, w)` with these coordinates `(n, k)`."""
        return self.center + (coordinates @ self.basis).view(-1, *self.center.shape)

    def narrow(self, model: nn.Module) -> None:
        """Let the layer, in place, take its inputs' `k` coordinates, which are equivalent for images in the span.

        Its weight is `(o, k)` then, that of before times `inputs.T`, and so are gradients of this weight.
        """
        parent, _, name = self.layer.rpartition(".")
        setattr(model.get_submodule(parent), name, _Narrow(model.get_submodule(self.layer), self.inputs))


class _Narrow(nn.Linear):
    """A linear layer on the coordinates of its inputs; its weight is given at every call."""

    def __init__(self, layer: nn.Module, rows: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        super().__init__(len(rows), layer.out_features, layer.bias is not None, device="meta")
        self._rows = rows

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs @ self._rows.T)


def training_span(seen: ReleasedModel) -> Span:
    """The span of the training images in which the first layer on the pixels has moved.

    Every gradient of a linear layer's weight is a sum of outer products with the layer's inputs, and so is its change
    by gradient descent. The start is subtracted if it is known; otherwise the released layer stands for the change, to
    which its random start adds noise. Beyond the number of training images all singular values are noise: the first of
    these, and 20 % more, is the level that singular values of the span are above.

    Raises:
        UnsupportedModelError: the network has no linear layer on the pixels, or that layer has not moved.

    Source: [arXiv2605.06519], the subspace of the data from the change of the first layer; the rank's rule is our own.
    """
    name, center, scale = first_layer(seen)
    change = seen.weights[f"{name}.weight"]
    if seen.start is not None:
        # Weight decay shrinks the start as well, by a factor that is unknown here.
        change = change - seen.start[f"{name}.weight"]
    _, singular, rows = torch.linalg.svd(change, full_matrices=False)
    if not singular[0] > 0:
        raise UnsupportedModelError(
            f"the first layer {name} equals its start, so that it shows no training image: a layer that was trained "
            "is needed; do not restrict candidates to a subspace"
        )
    rounding = singular[0] * torch.finfo(singular.dtype).eps * max(change.shape)
    noise = singular[seen.n_examples : seen.n_examples + 1].sum()  # 0 where the layer has no further singular value
    rank = int((singular[: seen.n_examples] > torch.maximum(_ABOVE_NOISE * noise, rounding)).sum())
    if rank == 0:
        raise UnsupportedModelError(
            f"the first layer {name} shows no training image above the noise of its start: give the start, attack a "
            "model that was trained longer, or do not restrict candidates to a subspace"
        )
    # Rows are in the units of the layer's inputs; in pixels they are divided by the inputs' scale.
    basis = torch.linalg.qr((rows[:rank] / scale).T)[0].T.contiguous()
    return Span(center, basis, singular, name, rows[:rank])


def shrinkage(start: Tensor, end: Tensor, n_examples: int) -> float:
    """The factor by which weight decay has shrunk the start of a first layer, `(w, d)` both.

    The change adds a matrix of at most the images' rank to the shrunk start: all other eigenvalues of `end` times the
    pseudoinverse of `start` are that factor. So many, or two, are nowhere else as close together.
    """
    wide = len(start) <= start.shape[1]
    values = torch.linalg.eigvals(least_squares(*((start.T, end.T) if wide else (start, end))))
    count = min(len(values), max(2, len(values) - n_examples))
    distances, nearest = (values - values.real[:, None]).abs().sort(dim=1)
    closest = nearest[distances[:, count - 1].argmin(), :count]
    return float(values.real[closest].median())


def _keep(inputs: list[Tensor], layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    inputs.append(arguments[0])


@torch.no_grad()
def first_layer(seen: ReleasedModel) -> tuple[str, Tensor, Tensor]:
    """The name of a linear layer whose inputs are `(pixels - center) * scale`, with center and scale.

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
        hook = layer.register_forward_pre_hook(partial(_keep, inputs))
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
            return name, -(shown[0] / scale).view(seen.image_shape), scale
    raise UnsupportedModelError(
        f"the attack needs a linear layer on all {n_pixels} pixels, at most scaled and shifted before it; this "
        f"{type(seen.model).__name__} has none: take an attack that does without, or no subspace or method anderson"
    )
