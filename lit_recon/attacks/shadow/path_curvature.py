"""Shadow models of any network to first order: the Hessian of the fixed set through a subspace.

As in `linear_response`, models move with the reference, and only their own image's gradient `g` is exact:

    v <- momentum v + (H(theta_t) delta + g(theta_t + delta)) / (n + 1),    delta <- delta - lr v

The Hessian acts mostly on `r` directions `U` `(p, r)`: those that its products with the leading directions of the fixed
images' gradients lead to, at some points of the path. Its products `B = H U` are computed at more points, by automatic
differentiation on a sample of the fixed images, and interpolated between them. Then

    H  is taken for  B (U^T B)^+ B^T,

its Nystroem approximation, which is exact where H has no more than r directions, and has no negative eigenvalues:
H with only its part outside the subspace left out has some, along which differences would explode.

Source: the approximation is that of [Williams2001].
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from lit_recon.attacks.shadow.engine import reference_path
from lit_recon.attacks.shadow.steps import Descent
from lit_recon.attacks.shadow.training import KnownTraining, cross_entropy, full_precision, of_own_images
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ShapeError
from lit_recon.io.tensors import TensorFormat

_KEPT = TensorFormat("lit_recon_curvature", "part of a curvature", "delete the folder, and it is computed again")
#: Shares of the path's length at which directions are looked for, and how many images' gradients per direction.
_SHARES, _PER_DIRECTION = (0.05, 0.4, 0.9), 2
#: Eigenvalues of U^T H U, as shares of the largest, below which they are noise or negative.
_LEAST = 1e-4
#: Images and directions of a product, and single gradients, that are computed at a time.
_IMAGES, _DIRECTIONS, _SINGLE = 250, 16, 64


@dataclass(frozen=True, eq=False)
class PathCurvature:
    """Hessians of the loss summed over the fixed set, along the reference's path, through a subspace.

    Attributes:
        path: weights before each step, `(t, p)`.
        basis: U, `(p, r)`, orthonormal.
        points: steps at which products are known, ascending, the first and the last among them.
        products: B at each of them, `(p, r)`.
    """

    path: Tensor
    basis: Tensor
    points: Sequence[int]
    products: Sequence[Tensor]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """B `(p, r)` and the pseudo-inverse of U^T B `(r, r)` before a step."""
        after = min(bisect_right(self.points, step), len(self.points) - 1)
        before = max(after - 1, 0)
        first, last = self.points[before], self.points[after]
        share = (step - first) / (last - first) if last > first else 0.0
        product = torch.lerp(self.products[before], self.products[after], share)
        within = (self.basis.T @ product).double()
        values, vectors = torch.linalg.eigh(within + within.T)
        kept = values > _LEAST * values[-1]
        inverse = (vectors[:, kept] * (2 / values[kept])) @ vectors[:, kept].T
        return product, inverse.to(product)


def path_curvature(
    known: KnownTraining,
    initial: Tensor,
    rank: int,
    n_points: int,
    n_images: int,
    folder: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> PathCurvature:
    """The curvature along the path from `initial` `(p,)`, at points equally far from each other on it.

    Args:
        known: the training, by full batches.
        initial: weights before the first step.
        rank: directions of the subspace; at most as many as weights.
        n_points: points on the path; at most as many as steps.
        n_images: fixed images drawn for each point; at most all.
        folder: keeps the products of every point, and those that are there are read.
        progress: gets the number of points that are done, and of all.
    """
    with full_precision(), torch.no_grad():
        path = torch.stack(list(islice(reference_path(known, initial, repeat(None, known.n_steps)), known.n_steps)))
        lengths = torch.cat([path.new_zeros(1), (path[1:] - path[:-1]).norm(dim=1).cumsum(0)])
        points = _spread(lengths, n_points)
        samples = [path[_nearest(lengths, share)] for share in _SHARES]
        basis = _kept(folder, "basis", partial(_directions, known, samples, rank, n_images)).to(path)
        products = []
        for done, step in enumerate(points):
            progress(done, len(points))
            compute = partial(_product, known, path[step], basis, step, n_images)
            products.append(_kept(folder, f"step_{step:05d}", compute).to(path))
        progress(len(points), len(points))
    return PathCurvature(path, basis, points, products)


def _kept(folder: Path | None, name: str, compute: Callable[[], Tensor]) -> Tensor:
    """What is computed, or was written into the folder before."""
    if folder is None:
        return compute()
    file = folder / f"{name}.safetensors"
    if not file.is_file():
        _KEPT.write(file, {name: compute()}, {})
    return _KEPT.read(file)[1][name]


def _nearest(lengths: Tensor, share: float) -> int:
    return int((lengths - share * lengths[-1]).abs().argmin())


def _spread(lengths: Tensor, n: int) -> list[int]:
    """At most `n` steps, equally far from each other on a path of these lengths; the first and the last always."""
    if n >= len(lengths):
        return list(range(len(lengths)))
    shares = [i / max(1, n - 1) for i in range(n)]
    return sorted({0, len(lengths) - 1, *(_nearest(lengths, share) for share in shares[1:-1])})


def _directions(known: KnownTraining, weights: Sequence[Tensor], rank: int, n_images: int) -> Tensor:
    """The leading directions `(p, r)` of products of the Hessians at some weights with those of gradients."""
    basis = _of_gradients(known, weights, rank)
    products = [_product(known, point, basis, -1 - number, n_images) for number, point in enumerate(weights)]
    return _leading(torch.cat(products, dim=1).T, rank)


def _of_gradients(known: KnownTraining, weights: Sequence[Tensor], rank: int) -> Tensor:
    """The leading directions `(p, r)` of gradients of single fixed images at some weights, each of unit length."""
    n = len(known.images)
    each = min(n, -(-_PER_DIRECTION * rank // len(weights)))
    found = []
    for number, point in enumerate(weights):
        drawn = torch.randperm(n, generator=seeded_generator(number, "directions"))[:each].to(point.device)
        shared = point.expand(each, -1)
        found.append(of_own_images(_own(known), shared, known.images[drawn], known.labels[drawn], _SINGLE))
    return _leading(torch.nn.functional.normalize(torch.cat(found), dim=1), rank)


def _leading(rows: Tensor, rank: int) -> Tensor:
    """The orthonormal leading directions `(p, r)` of rows `(m, p)`, fewer where there are not as many."""
    p = rows.shape[1]
    if len(rows) >= p:
        directions = torch.linalg.eigh((rows.T @ rows).double()).eigenvectors.flip(1)[:, : min(rank, p)].to(rows)
    else:
        values, vectors = torch.linalg.eigh((rows @ rows.T).double())
        kept = values.flip(0)[:rank] > 1e-7 * values[-1]
        directions = rows.T @ (vectors.flip(1)[:, :rank][:, kept]).to(rows)
    basis: Tensor = torch.linalg.qr(directions).Q
    return basis


def _own(known: KnownTraining) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The gradient `(p,)` of the loss summed over images, given weights, images and labels."""
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = grad(partial(cross_entropy, known.network, reduction="sum"))
    return gradient


def _product(known: KnownTraining, weights: Tensor, basis: Tensor, step: int, n_images: int) -> Tensor:
    """H U `(p, r)` at weights `(p,)`, of the fixed set, estimated on images drawn for this step."""
    n = len(known.images)
    drawn = torch.randperm(n, generator=seeded_generator(step, "curvature"))[: min(n, n_images)].to(weights.device)
    gradient, found = _own(known), torch.zeros_like(basis)
    for some in drawn.split(_IMAGES):
        images, labels = known.images[some], known.labels[some]

        def along(direction: Tensor, images: Tensor = images, labels: Tensor = labels) -> Tensor:
            product: Tensor = jvp(lambda w: gradient(w, images, labels), (weights,), (direction,))[1]
            return product

        parts = [vmap(along)(part) for part in basis.T.split(_DIRECTIONS)]
        found += torch.cat(parts).T
    return found.mul_(n / len(drawn))


def respond_along(known: KnownTraining, curvature: PathCurvature, images: Tensor, labels: Tensor) -> Tensor:
    """Differences `(s, p)` of shadow models with these images `(s, c, h, w)` and labels from `train_reference`.

    To first order, as in the module's text; a model does not depend on the others. ShapeError: arguments that do not
    fit, or a training that diverged.
    """
    known.check(curvature.path[0], images, labels)
    with full_precision(), torch.no_grad():
        moved = images.new_zeros(len(images), known.n_parameters)
        descent, gradient = Descent(known.descent, [moved]), _own(known)
        for step, weights in enumerate(curvature.path):
            product, inverse = curvature.at(step)
            change = of_own_images(gradient, weights + moved, images, labels, _SINGLE)
            change.addmm_(moved @ product @ inverse, product.T)
            descent.step([change], scale=1 / (len(known.images) + 1))
    if not torch.isfinite(moved).all():
        raise ShapeError("linear response diverged to NaN or infinity: lower descent.lr, or set shadows to exact")
    return moved
