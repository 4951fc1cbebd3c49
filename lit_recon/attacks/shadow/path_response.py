"""Weights of shadow models of any network, to first order in gradients of their own images along the reference's path.

To first order, a model trained on the fixed set and one image differs from the reference, whose weights before step t
are `theta_t`, by

    v <- momentum v + (n H_t delta + g(theta_t)) / (n + 1),    delta <- delta - lr v,

where `g` is the gradient of the model's own image, and `H_t` the Hessian of the fixed set's mean loss. The last
difference is linear in the gradients. `H_t` is kept in `r` directions, the columns of `U`, in which its Gauss-Newton
part is largest: that part, and on request the rest, which takes longer:

    delta = sum_t (U F_t U^T - w_t (1 - U U^T)) g(theta_t)

`w_t` is what momentum makes of one gradient, the `(r, r)` matrices `F_t` come from the recursion run backwards. `g` and
`H` are computed at some steps only, and interpolated between them. A model costs the gradients of one image at these
steps, and can be differentiated in that image.

Source: ours; without curvature these are the sums of [Pruthi2020], with all of it, those of [Hara2019]. The directions
are found by subspace iteration, see [Halko2011].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from lit_recon.attacks.shadow.engine import full_batch_path
from lit_recon.attacks.shadow.training import GradientDescent, KnownTraining, cross_entropy, full_precision, unflatten
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, ShapeError

#: Directions that subspace iteration carries beyond those that are kept, and its iterations.
_MORE, _ITERATIONS = 50, 2
#: Exponent of the spacing of steps: weights and curvature change faster at the start of training.
_EARLIER = 1.5
#: Memory in bytes of the rows of Gauss-Newton matrices that are held at a time.
_ROWS_BYTES = 128 * 2**20
#: Images and directions of products with Hessians that are computed together.
_PIECE, _TOGETHER = 250, 16


@dataclass(frozen=True)
class ResponseSettings:
    """How exactly the fixed set's response is known; ConfigError for a number below 1, or a single step.

    Args:
        rank: leading directions of the fixed set's curvature; all if there are fewer.
        steps: of the reference's path at which gradients and curvature are computed.
        images: of the fixed set, that the curvature is estimated on.
        rest: of these, on which what the Hessian has beyond its Gauss-Newton part is estimated; 0: it is left out.
    """

    rank: int = 300
    steps: int = 11
    images: int = 1_000
    rest: int = 0

    def __post_init__(self) -> None:
        if min(self.rank, self.images, self.steps - 1, self.rest + 1) < 1 or self.rest > self.images:
            raise ConfigError(
                f"rank and images must be at least 1, steps at least 2 and rest from 0 to images; got {self}"
            )


@dataclass(frozen=True, eq=False)
class PathResponse:
    """Differences of models from the reference, linear in their own images' gradients at `q` steps of its path."""

    network: nn.Module
    weights: Tensor  # of the reference at these steps, `(q, p)`
    sums: Tensor  # weight of every step's gradient outside the directions, `(q,)`
    directions: Tensor  # orthonormal `(p, r)`
    inside: Tensor  # what becomes of every step's gradient in these directions, `(q, r, r)`

    @classmethod
    def of(cls, known: KnownTraining, initial: Tensor, settings: ResponseSettings) -> PathResponse:
        """For a training on full batches by gradient descent from `initial` `(p,)`; takes seconds to minutes."""
        n_steps = known.n_steps
        steps = spread_steps(n_steps, settings.steps)
        shares = interpolation(steps, n_steps).to(initial)
        order = torch.randperm(len(known.images), generator=seeded_generator(0, "curvature"))
        numbers = order[: settings.images].to(initial.device)
        sample, labels = known.images[numbers], known.labels[numbers]
        with full_precision(), torch.no_grad():
            kept_steps = set(steps.tolist())
            path = full_batch_path(known, initial)
            weights = torch.stack([at for step, at in enumerate(path) if step in kept_steps])
            directions = leading_directions(known.network, weights, sample, settings.rank)
            curvature = [_projected(known.network, at, sample, directions) for at in weights]
            if settings.rest:
                some, few = sample[: settings.rest], labels[: settings.rest]
                for own, at in zip(curvature, weights, strict=True):
                    own += _hessian(known.network, at, some, few, directions)
                    own -= _projected(known.network, at, some, directions)
            response = _backwards(known.descent, len(known.images), torch.stack(curvature), shares)
        kept = known.descent.momentum
        sums = torch.tensor([(1 - kept ** (n_steps - step)) / (1 - kept) for step in range(n_steps)])
        sums = sums.to(initial) * (known.descent.lr / (len(known.images) + 1))
        inside = torch.einsum("tq,tab->qab", shares, response)
        return cls(known.network, weights, shares.T @ sums, directions, inside)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Differences `(m, p)` of models with own images `(m, c, h, w)` and labels `(m,)`; differentiable."""
        gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = grad(partial(cross_entropy, self.network))
        at_steps = vmap(vmap(gradient, in_dims=(0, None, None)), in_dims=(None, 0, 0))
        gradients = at_steps(self.weights, images[:, None], labels[:, None])  # (m, q, p)
        total = torch.einsum("q,mqp->mp", self.sums, gradients)
        stiff = torch.einsum("qab,mqb->ma", self.inside, gradients @ self.directions)
        found: Tensor = (total @ self.directions + stiff) @ self.directions.T - total
        return found

    def differences(self, images: Tensor, labels: Tensor) -> Tensor:
        """The same for any number of models, without derivatives; ShapeError if they are not finite."""
        at_a_time = max(1, _ROWS_BYTES // (self.weights.numel() * self.weights.element_size()))
        with full_precision(), torch.no_grad():
            groups = zip(images.split(at_a_time), labels.split(at_a_time), strict=True)
            found = torch.cat([self(*group) for group in groups])
        if not torch.isfinite(found).all():
            raise ShapeError("linear response diverged to NaN or infinity: lower descent.lr, or set shadows to exact")
        return found


def spread_steps(n_steps: int, n: int) -> Tensor:
    """Up to `n` steps from 0 to `n_steps - 1`, both included, denser at the start.

    >>> spread_steps(100, 6)
    tensor([ 0,  9, 25, 46, 71, 99])
    """
    steps: Tensor = ((n_steps - 1) * torch.linspace(0, 1, n, dtype=torch.float64) ** _EARLIER).round().long()
    found: Tensor = steps.unique()
    return found


def interpolation(steps: Tensor, n_steps: int) -> Tensor:
    """Shares `(n_steps, q)` of ascending steps `(q,)`, the first and the last included, in every step's value.

    >>> interpolation(torch.tensor([0, 2, 3]), 4).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    shares = torch.zeros(n_steps, len(steps))
    shares[0, 0] = 1
    for index in range(1, len(steps)):
        first, last = int(steps[index - 1]), int(steps[index])
        late = torch.linspace(0, 1, last - first + 1)
        shares[first : last + 1, index - 1], shares[first : last + 1, index] = 1 - late, late
    return shares


def gauss_newton_rows(network: nn.Module, weights: Tensor, images: Tensor) -> Tensor:
    """Rows `(n k, p)` whose sum of squares is the Gauss-Newton matrix of the cross-entropy summed over `(n, ...)`."""

    def of_one(image: Tensor) -> Tensor:
        def logits(weights: Tensor) -> Tensor:
            found: Tensor = functional_call(network, unflatten(network, weights), image[None])[0]
            return found

        found, back, *_ = vjp(logits, weights)
        shares = found.softmax(0)
        # the Hessian of cross-entropy in the logits, diag(p) - p p^T, is the sum of squares of these rows
        roots = torch.diag(shares.sqrt()) - shares.sqrt()[:, None] * shares
        rows: Tensor = vmap(lambda row: back(row)[0])(roots)
        return rows

    found: Tensor = vmap(of_one)(images).flatten(0, 1)
    return found


def leading_directions(network: nn.Module, weights: Tensor, images: Tensor, rank: int) -> Tensor:
    """Orthonormal `(p, r)`: leading directions of the Gauss-Newton matrix, summed over weights `(q, p)`.

    Each of the images `(n, ...)` is used at one of the weights.
    """
    p = weights.shape[1]
    kept = min(rank, p)
    generator = seeded_generator(0, "directions")
    found = torch.randn(p, min(rank + _MORE, p), generator=generator, dtype=torch.float64).to(weights)
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(found).Q
        found = torch.zeros_like(basis)
        for at, some in zip(weights, images.chunk(len(weights)), strict=False):
            for rows in _rows(network, at, some):
                found += rows.T @ (rows @ basis)
    # a singular value decomposition of all rows takes minutes on a GPU
    basis, upper = torch.linalg.qr(found)
    directions: Tensor = basis @ torch.linalg.svd(upper).U[:, :kept]
    return directions


def _projected(network: nn.Module, weights: Tensor, images: Tensor, directions: Tensor) -> Tensor:
    """Gauss-Newton matrix `(r, r)` of the mean cross-entropy in directions `(p, r)`."""
    total = directions.new_zeros(directions.shape[1], directions.shape[1])
    for rows in _rows(network, weights, images):
        inside = rows @ directions
        total += inside.T @ inside
    return total / len(images)


def _hessian(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor, directions: Tensor) -> Tensor:
    """Hessian `(r, r)` of the mean cross-entropy in directions `(p, r)`."""
    total = directions.new_zeros(directions.shape[1], directions.shape[1])
    for some, few in zip(images.split(_PIECE), labels.split(_PIECE), strict=True):
        product = vmap(partial(_hessian_product, network, weights, some, few))
        total += torch.cat([product(each) for each in directions.T.split(_TOGETHER)]) @ directions
    return (total + total.T) / (2 * len(images))


def _hessian_product(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor, direction: Tensor) -> Tensor:
    """The Hessian of the cross-entropy, summed over images, times a direction `(p,)`."""

    def gradient(weights: Tensor) -> Tensor:
        found: Tensor = grad(partial(cross_entropy, network, reduction="sum"))(weights, images, labels)
        return found

    found: Tensor = jvp(gradient, (weights,), (direction,))[1]
    return found


def _rows(network: nn.Module, weights: Tensor, images: Tensor) -> Iterator[Tensor]:
    """`gauss_newton_rows`, some images at a time."""
    n_logits = network(images[:1]).shape[1]
    at_a_time = max(1, _ROWS_BYTES // (n_logits * weights.numel() * weights.element_size()))
    for some in images.split(at_a_time):
        yield gauss_newton_rows(network, weights, some)


def _backwards(descent: GradientDescent, n: int, curvature: Tensor, shares: Tensor) -> Tensor:
    """Matrices `(t, r, r)`: what a gradient of each step adds to the last difference, given curvature `(q, r, r)`."""
    r = curvature.shape[1]
    of_place, of_speed = torch.eye(r).to(curvature), curvature.new_zeros(r, r)  # the last difference by state
    found = curvature.new_empty(len(shares), r, r)
    for step in reversed(range(len(shares))):
        of_gradient = of_speed - descent.lr * of_place
        found[step] = of_gradient / (n + 1)
        here = torch.einsum("q,qab->ab", shares[step], curvature)
        of_place = of_place + of_gradient @ here * (n / (n + 1))
        of_speed = descent.momentum * of_gradient
    return found
