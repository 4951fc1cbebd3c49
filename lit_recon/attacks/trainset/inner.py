"""The inner problem of bilevel attacks: the weights that a training on candidate images gives, as one vector."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp

from lit_recon.attacks.shadow.training import unflatten
from lit_recon.attacks.trainset.base import ReleasedModel
from lit_recon.attacks.trainset.training import Weights, regularized_loss
from lit_recon.errors import ThreatModelError

#: A linear map of vectors `(p,)`.
LinearMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class InnerProblem:
    """A training with unknown images.

    Attributes:
        seen: the released model.
        labels: `(m,)` int64 of the candidates.
        weight_decay: of the training.
        released: the released weights, `(p,)`.
        origin: weights `(p,)` that changes of weights are counted from.
    """

    seen: ReleasedModel
    labels: Tensor
    weight_decay: float
    released: Tensor
    origin: Tensor

    def loss(self, vector: Tensor, images: Tensor) -> Tensor:
        """The mean loss of images `(m, c, h, w)` and the known ones under weights `(p,)`, with weight decay."""
        weights = unflatten(self.seen.model, vector)
        examples = self.examples(images)
        return regularized_loss(self.seen.task, self.seen.model, weights, *examples, self.weight_decay)

    def examples(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images `(n, c, h, w)` and labels of a training on images `(m, c, h, w)`: the known ones and these."""
        return self.seen.with_known(images, self.labels, self.seen.repeats_of_known(len(images)))

    def gradient(self, vector: Tensor, images: Tensor) -> Tensor:
        """The gradient `(p,)` of `loss` in the weights; it can be differentiated once more."""
        gradient: Tensor = grad(self.loss)(vector, images)
        return gradient

    def hessian(self, vector: Tensor, images: Tensor) -> LinearMap:
        """Product of the Hessian of `loss` in the weights with a vector `(p,)`."""
        images = images.detach()
        pull: Any = vjp(lambda weights: self.gradient(weights, images), vector)[1]

        def product(direction: Tensor) -> Tensor:
            # The Hessian is symmetric: a product from the left is one from the right.
            result: Tensor = pull(direction, retain_graph=True)[0]
            return result

        return product

    def distance(self, vector: Tensor) -> float:
        """Distance of weights `(p,)` from the released ones, relative to how far the released are from the origin."""
        released = (self.released - self.origin).norm()
        return float((vector.detach() - self.released).norm() / released)


def drawn_weights(seen: ReleasedModel, seed: int) -> Weights:
    """New weights for the architecture, from the distribution with which it is initialized."""
    network = copy.deepcopy(seen.model).cpu()
    with torch.random.fork_rng(devices=[]):
        generator = torch.default_generator.manual_seed(seed)
        initialize = getattr(network, "initialize", None)
        if initialize is not None:
            initialize(generator)
        else:
            for module in network.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
    parameters = dict(network.named_parameters())
    return {name: parameters[name].detach().to(weight) for name, weight in seen.weights.items()}


def conjugate_gradients(matrix: LinearMap, right: Tensor, tolerance: float = 1e-12, most: int = 1000) -> Tensor:
    """The solution `(p,)` of a linear system with a symmetric matrix.

    It ends at a residual of `tolerance` times the norm of the right side, after `most` iterations, or at a direction in
    which the matrix is not positive, with what has been found so far.

    Source: [NocedalWright2006], algorithms 5.2 and 7.1.
    """
    solution, residual = torch.zeros_like(right), right.clone()
    direction, square, enough = residual.clone(), residual.dot(residual), (tolerance * right.norm()) ** 2
    for _ in range(most):
        if square <= enough:
            break
        image = matrix(direction)
        curvature = direction.dot(image)
        if curvature <= 0:
            break
        length = square / curvature
        solution += length * direction
        residual -= length * image
        before, square = square, residual.dot(residual)
        direction = residual + square / before * direction
    return solution


#: Steps of Newton's method at most.
_MOST_STEPS = 50


def newton(problem: InnerProblem, images: Tensor, start: Tensor, tolerance: float = 1e-12) -> Tensor:
    """The weights `(p,)` that minimize a strongly convex loss, by Newton's method with halved steps.

    It ends where the gradient shows that the relative error is at most `tolerance` (or what the dtype allows, if that
    is more): strong convexity bounds the error by the norm of the gradient over the weight decay.

    Source: [NocedalWright2006], section 7.1.
    """
    images, vector = images.detach(), start.detach()
    tolerance = max(tolerance, 10 * torch.finfo(vector.dtype).eps)
    slope, value = problem.gradient(vector, images), problem.loss(vector, images)
    first = slope.norm()
    for _ in range(_MOST_STEPS):
        size = slope.norm()
        if size <= tolerance * problem.weight_decay * vector.norm():
            break
        # A system solved to the relative size of the gradient keeps Newton's quadratic convergence.
        forcing = float(torch.clamp(size / first, max=0.1, min=1e-10))
        move = -conjugate_gradients(problem.hessian(vector, images), slope, forcing)
        promised, length = slope.dot(move), 1.0
        while True:
            tried = vector + length * move
            new_slope, new_value = problem.gradient(tried, images), problem.loss(tried, images)
            if new_value <= value + 1e-4 * length * promised or new_slope.norm() <= 0.9 * size or length < 1e-4:
                break
            length /= 2
        if length < 1e-4:  # rounding errors are all that is left
            break
        vector, slope, value = tried, new_slope, new_value
    return vector


def implicit_gradient(
    problem: InnerProblem,
    images: Tensor,
    vector: Tensor,
    slope: Tensor,
    damping: float = 0.0,
    tolerance: float = 1e-12,
    most: int = 1000,
) -> Tensor:
    """The gradient `(m, c, h, w)` in the images of a function of the weights that minimize their loss.

    Args:
        problem, images: of the training.
        vector: the weights `(p,)` that minimize its loss.
        slope: the function's gradient `(p,)` in the weights.
        damping: added to the eigenvalues of the Hessian.
        tolerance, most: of the conjugate gradients.

    Source: the implicit function theorem.
    """
    product, images = problem.hessian(vector, images), images.detach()
    adjoint = conjugate_gradients(lambda direction: product(direction) + damping * direction, slope, tolerance, most)
    pull: Any = vjp(lambda candidates: problem.gradient(vector, candidates), images)[1]
    mixed: Tensor = pull(adjoint)[0]
    return -mixed


def is_linear_in_weights(seen: ReleasedModel) -> bool:
    """Whether the outputs for given images are linear in the weights, so that convex losses are convex in them."""
    generator = torch.Generator().manual_seed(0)
    probes = torch.rand(8, *seen.image_shape, generator=generator).to(seen.like)
    first = {name: torch.randn(weight.shape, generator=generator).to(weight) for name, weight in seen.weights.items()}
    second = {name: torch.randn(weight.shape, generator=generator).to(weight) for name, weight in seen.weights.items()}
    both = {name: first[name] - 2 * second[name] for name in first}
    with torch.no_grad():
        outputs = [seen.outputs(weights, probes) for weights in (first, second, both)]
    return bool((outputs[2] - outputs[0] + 2 * outputs[1]).norm() <= 1e-3 * outputs[2].norm())


def need_change(seen: ReleasedModel) -> None:
    """A ThreatModelError if the released weights are those of a known start."""
    if seen.start is not None and all(torch.equal(seen.start[name], weight) for name, weight in seen.weights.items()):
        raise ThreatModelError(
            "the training did not change the weights: the released ones are the start, and nothing of the images is in "
            "them; give the weights at which the training began"
        )
