"""Shadow MLPs by what every image did to their first layers, where images are few and pixels many.

Gradient descent moves the first layer by sums of outer products with the images, so that its weights stay

    W_t = W_0 + C_t (X - a m) + u_t m + c_t x

with the fixed images `X`, their mean `m`, shares `a` that leave the rest without it, a model's own image `x`, and one
coefficient per neuron and image. What flows back to the layer's outputs moves `C`, and its sum with the shares `u`, as
it would move `W` itself, momentum included. Outputs for the fixed set need inner products of images alone: one product
with `(n, n)` in place of two with `(n, d)`. Apart from their mean images are nearly orthogonal; with it, large
coefficients would nearly cancel, and lose digits.
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
    """Whether coefficients of images follow the same descent as the weights do, with less arithmetic.

    They do not where steps are not linear in gradients, or where noise leaves the span of the images.
    """
    linear = descent.optimizer == "sgd" and descent.batch_size is None and not descent.is_noisy
    return linear and len(fixed.images) < 2 * fixed.pixels.n_often(fixed.images)


class ImageSpan(NamedTuple):
    """The fixed images, as coordinates of what they span.

    Attributes:
        mean: `(d,)`.
        sides: the images but for their shares of the mean, `(n, d)`.
        products: of those with each other, `(n, n)`.
        shares: of the mean in the images, `(n,)`.
        mean_products: of the images with the mean, `(n,)`.
    """

    mean: Tensor
    sides: Tensor
    products: Tensor
    shares: Tensor
    mean_products: Tensor

    @classmethod
    def of(cls, images: Tensor) -> ImageSpan:
        """Of images `(n, d)`; worked out in float64, so that only the last digit is rounded."""
        exact = images.double()
        mean = exact.mean(0)
        mean_products = exact @ mean
        # The shares of black images are 0 over 0.
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
        sides: coefficients of the span's sides, `(s, h, n)`.
        rest: of its mean and of the own image, and the bias, `(s, h, 3)`.
    """

    def __init__(self, weights: Tensor, bias: Tensor, fixed: Tensor, span: ImageSpan, own: Tensor) -> None:
        self._weights, self._span, self._own = weights, span, own
        zeros = torch.zeros_like(bias)
        self.sides = weights.new_zeros(*bias.shape, len(fixed))
        self.rest = torch.stack([zeros, zeros, bias], dim=2)
        # Errors of what stays the same in all steps would add up: it is worked out in float64.
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
        """What moves `sides` and `rest`, of gradients with respect to `outputs` and `own_outputs`."""
        of_mean = torch.mv(many.flatten(0, 1), self._span.shares).view_as(one)
        return [many, torch.cat([of_mean, one, many.sum(2, keepdim=True).add_(one)], dim=2)]

    def weights(self) -> tuple[Tensor, Tensor]:
        """Weights `(s, h, d)` and biases `(s, h)` as they are now."""
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
        known: the training, which `suits`.
        activation: between layers.
        fixed: the fixed set.
        span: of its images.
        weights: of the start, `(s, o, i)` and `(s, o)` for every layer; those of later layers are overwritten.
        own: one further image of each model.

    Returns:
        Flat weights `(s, p)`, of all released models one after the other.
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
