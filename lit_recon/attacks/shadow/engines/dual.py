"""Training of MLPs in dual coordinates of the first layer, which is faster for few images of many pixels.

Gradient descent moves the first layer by sums of outer products with the images, so that its weights stay

    W_t = W_0 + C_t (X - a m) + u_t m + c_t x

with the fixed images `X`, their mean `m`, the projection coefficients `a` of the images on `m`, a model's own image
`x`, and one coefficient per neuron and image. The gradient with respect to the layer's outputs updates `C`, and its sum
weighted by `a` updates `u`, as it would update `W` itself, momentum included. Outputs on the fixed set need inner
products of images only: one product with `(n, n)` instead of two with `(n, d)`. The mean is treated apart because
images without it are nearly orthogonal; with it, large coefficients would nearly cancel and lose digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.shadow.engines.mlp_gradients import (
    Clip,
    OwnImages,
    SharedImages,
    flow,
    one_hot,
    products_with_one,
)
from lit_recon.attacks.shadow.engines.pixels import times_transposed
from lit_recon.attacks.shadow.steps import Descent
from lit_recon.attacks.shadow.training import GradientDescent, KnownTraining


def suits(descent: GradientDescent, fixed: SharedImages) -> bool:
    """Whether this training can be done in dual coordinates, with less arithmetic.

    It cannot if steps are not linear in gradients, or if noise leaves the span of the images.
    """
    linear = descent.optimizer == "sgd" and descent.batch_size is None and not descent.is_noisy
    return linear and len(fixed.images) < 2 * fixed.pixels.n_often(fixed.images)


class ImageSpan(NamedTuple):
    """The fixed images, split into multiples of their mean and remainders.

    Attributes:
        mean: `(d,)`.
        sides: remainders, `(n, d)`: the images minus `shares` times the mean.
        products: inner products of remainders, `(n, n)`.
        shares: projection coefficients of the images on the mean, `(n,)`.
        mean_products: inner products of the images with the mean, `(n,)`.
    """

    mean: Tensor
    sides: Tensor
    products: Tensor
    shares: Tensor
    mean_products: Tensor

    @classmethod
    def of(cls, images: Tensor) -> ImageSpan:
        """Of images `(n, d)`; computed in float64, then rounded."""
        exact = images.double()
        mean = exact.mean(0)
        mean_products = exact @ mean
        # 0 / 0 if all images are black.
        shares = (mean_products / mean.square().sum()).nan_to_num()
        sides = exact - shares[:, None] * mean
        found = mean, sides, sides @ sides.T, shares, mean_products
        return cls(*(part.to(images.dtype) for part in found))


class FirstLayers:
    """The first layers of many models, as coefficients of images.

    Args:
        weights: of the start, `(s, h, d)`.
        bias: of the start, `(s, h)`.
        fixed: the fixed images, `(n, d)`.
        span: of those.
        own: one further image of each model, `(s, d)`.

    Attributes:
        sides: coefficients of the remainders, `(s, h, n)`.
        rest: of its mean and of the own image, and the bias, `(s, h, 3)`.
    """

    def __init__(self, weights: Tensor, bias: Tensor, fixed: Tensor, span: ImageSpan, own: Tensor) -> None:
        self._weights, self._span, self._own = weights, span, own
        zeros = torch.zeros_like(bias)
        self.sides = weights.new_zeros(*bias.shape, len(fixed))
        self.rest = torch.stack([zeros, zeros, bias], dim=2)
        # Errors of these constants would add up over all steps: they are computed in float64.
        alone = own.double()
        between = alone @ fixed.T.double()
        one = torch.ones_like(between)
        self._rest_products = torch.stack([span.mean_products.expand_as(one), between, one], dim=1).to(own.dtype)
        own_mean, squares = alone @ span.mean.double(), alone.square().sum(1)
        self._own_rest_products = torch.stack([own_mean, squares, one[:, 0]], dim=1).to(own.dtype)
        self._own_products = (alone @ span.sides.T.double()).to(own.dtype)
        self._outputs = (weights.double() @ fixed.T.double()).to(own.dtype)
        self._own_outputs = torch.bmm(weights.double(), alone[:, :, None]).to(own.dtype)

    def outputs(self) -> Tensor:
        """For the fixed images, `(s, h, n)`."""
        outputs = _wide(self.sides, self._span.products).add_(self._outputs)
        return outputs.baddbmm_(self.rest, self._rest_products)

    def own_outputs(self) -> Tensor:
        """For every model's own image, `(s, h, 1)`."""
        outputs = products_with_one(self.sides, self._own_products).add_(self._own_outputs)
        return outputs.add_(products_with_one(self.rest, self._own_rest_products))

    def gradients(self, many: Tensor, one: Tensor) -> list[Tensor]:
        """Gradients of `sides` and `rest`, given those of `outputs` and `own_outputs`."""
        of_mean = torch.mv(many.flatten(0, 1), self._span.shares).view_as(one)
        return [many, torch.cat([of_mean, one, many.sum(2, keepdim=True).add_(one)], dim=2)]

    def weights(self) -> tuple[Tensor, Tensor]:
        """Current weights `(s, h, d)` and biases `(s, h)`."""
        of_mean, of_own, bias = self.rest.split(1, dim=2)
        moved = _wide(self.sides, self._span.sides.T).addcmul_(of_mean, self._span.mean)
        return moved.addcmul_(of_own, self._own[:, None, :]).add_(self._weights), bias[:, :, 0].clone()


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` of `(s, h, q)` and `(m, q)`."""
    return times_transposed(left.flatten(0, 1), right).view(*left.shape[:2], len(right))


def train_dual(
    known: KnownTraining, activation: str, fixed: SharedImages, span: ImageSpan, weights: list[Tensor], own: OwnImages
) -> Tensor:
    """Train one model per own image, all at once.

    Args:
        known: the training, for which `suits` is true.
        activation: between layers.
        fixed: the fixed set.
        span: of the fixed images.
        weights: of the start, `(s, o, i)` and `(s, o)` for every layer; those of later layers are overwritten.
        own: one further image of each model.

    Returns:
        Flat weights `(s, p)`; with snapshots `(s, t * p)`.
    """
    descent, n, released = known.descent, len(fixed.images), []
    layers, later = FirstLayers(weights[0], weights[1], fixed.images, span, own.images), weights[2:]
    classes = one_hot(own.labels, len(fixed.classes), own.images.dtype)[:, :, None]
    clip = own_clip = None
    if descent.dp is not None:
        bound = descent.dp.bound
        clip, own_clip = Clip(fixed.squares, bound), Clip(own.images.square().sum(1, keepdim=True), bound)
    optimizer, kept = Descent(descent, [layers.sides, layers.rest, *later]), known.kept_steps
    for step in range(1, known.n_steps + 1):
        many = flow(layers.outputs(), later, fixed.classes, activation, clip)
        one = flow(layers.own_outputs(), later, classes, activation, own_clip)
        both = [part.add_(more) for part, more in zip(many.later, one.later, strict=True)]
        optimizer.step([*layers.gradients(many.first, one.first), *both], scale=1 / (n + 1))
        if step in kept:
            released.append(torch.cat([part.flatten(1) for part in (*layers.weights(), *later)], dim=1))
    return torch.cat(released, dim=1)
