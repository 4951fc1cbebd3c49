"""Fisher information about a client's inputs in an update released with noise.

With `J` the Jacobian of an update `g` (p coordinates) with respect to all inputs of a batch (q coordinates), the
release `g + N(0, diag(v))` has the information `J^T diag(1/v) J`, and one with Laplace noise of the scales `b` has
`J^T diag(1/b^2) J`. A defense changes the Jacobian as it changes the update before the noise: dropped coordinates
become rows of zeros, clipping scales it and projects out one direction.
Rows, noise and masks that do not fit an update raise a `ShapeError`, settings out of their range a `ConfigError`.

Source: [Cramer1946]; [Rao1945]; [Liu2025], appendices D and E.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.bounds.layers import weighted
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.noisy_release import NoisyRelease, inner, norm_of
from lit_recon.records import Update


class Jacobian(ABC):
    """Jacobian of an `update` `(p,)` by name with respect to `n_inputs` inputs `(q,)`, stored or not."""

    update: Update
    n_inputs: int

    @abstractmethod
    def gram(self, weights: Update | float = 1.0) -> Tensor:
        """`J^T diag(w) J`, `(q, q)`, for weights of the update's shapes or one number."""

    @abstractmethod
    def transposed(self, vector: Update) -> Tensor:
        """`J^T v`, `(q,)`, for a vector of the update's shapes."""

    def released(self, release: NoisyRelease) -> ReleasedInformation:
        """The information in a release of the update."""
        return ReleasedInformation(self.update, release, self.information(release))

    def information(self, release: NoisyRelease) -> Tensor:
        """The Fisher information `(q, q)` of the inputs in a release, or a lower bound on it."""
        return fisher_information(self, release)

    def after(self, release: NoisyRelease) -> Jacobian:
        """The Jacobian of the mean of a release."""
        changes = release.kept is not None or release.constant is not None or release.bound < math.inf
        return _ReleasedJacobian(self, release) if changes else self

    def after_clipped_examples(self, examples: Sequence[Update], bound: float) -> Jacobian:
        """The Jacobian of the mean of gradients of which each is clipped to a norm of at most `bound`.

        This one is of the summed gradient of `examples`.
        """
        return _ClippedExamplesJacobian(self, examples, bound)


class _ReleasedJacobian(Jacobian):
    """That of the mean of a release: `K c (I - u u^T) J`, with the mask `K` and, where it clips, `u = g / |g|`."""

    def __init__(self, jacobian: Jacobian, release: NoisyRelease) -> None:
        self._jacobian, self._release = jacobian, release
        self.update, self.n_inputs = release.mean(jacobian.update), jacobian.n_inputs

    def gram(self, weights: Update | float = 1.0) -> Tensor:
        kept = self._release.kept
        if kept is not None:
            masks = {name: kept[name].to(value.dtype) for name, value in self.update.items()}
            weights = weighted(masks, weights)
        return _released_gram(self._jacobian, self._release, weights)

    def transposed(self, vector: Update) -> Tensor:
        kept, whole = self._release.kept, self._jacobian.update
        rest = vector if kept is None else weighted(vector, dict(kept))
        norm = norm_of(whole)
        if not self._release.clips(norm):
            return self._jacobian.transposed(rest)
        share = inner(rest, whole) / norm**2
        rest = {name: value - share * whole[name] for name, value in rest.items()}
        result: Tensor = self._release.bound / norm * self._jacobian.transposed(rest)
        return result


class _ClippedExamplesJacobian(Jacobian):
    """That of the mean of gradients clipped one by one.

    An example's gradient depends on its own input only: block `i` of the columns of the Jacobian of the summed gradient
    becomes `c_i (I - u_i u_i^T) J_i / n`, with `c_i` the factor of its clip, and the projection only where that is
    below 1.
    """

    def __init__(self, jacobian: Jacobian, examples: Sequence[Update], bound: float) -> None:
        self._jacobian, self.n_inputs, self._n = jacobian, jacobian.n_inputs, len(examples)
        norms = torch.stack([norm_of(single) for single in examples])
        self._factors = (bound / norms).clamp(max=1.0)
        self.update = {
            name: torch.stack([f * single[name] for f, single in zip(self._factors, examples, strict=True)]).mean(dim=0)
            for name in examples[0]
        }
        # a gradient of zero has no direction, and is not clipped
        lengths = norms.clamp_min(torch.finfo(norms.dtype).tiny)
        self._units = [{k: v / by for k, v in single.items()} for single, by in zip(examples, lengths, strict=True)]
        self._along = self._crossed(self._units)
        own = self._along.diagonal().T
        self._own = torch.where((self._factors < 1)[:, None], own, torch.zeros_like(own))

    def gram(self, weights: Update | float = 1.0) -> Tensor:
        n, own, units = self._n, self._own, self._units
        blocks = self._jacobian.gram(weights).view(n, -1, n, self.n_inputs // n)
        weighed = [weighted(unit, weights) for unit in units]
        along = self._along * weights if isinstance(weights, float | int) else self._crossed(weighed)
        products = torch.stack([torch.stack([inner(unit, other) for other in weighed]) for unit in units])
        blocks = blocks - torch.einsum("ia,ikb->iakb", own, along) - torch.einsum("kia,kb->iakb", along, own)
        blocks = blocks + torch.einsum("ik,ia,kb->iakb", products, own, own)
        scale = self._factors / n
        return (scale[:, None, None, None] * scale[:, None] * blocks).reshape(self.n_inputs, self.n_inputs)

    def transposed(self, vector: Update) -> Tensor:
        whole = self._jacobian.transposed(vector).view(self._n, -1)
        shares = torch.stack([inner(unit, vector) for unit in self._units])
        result: Tensor = (self._factors / self._n)[:, None] * (whole - shares[:, None] * self._own)
        return result.reshape(-1)

    def _crossed(self, vectors: Sequence[Update]) -> Tensor:
        """`J^T v` of every vector, by example: `(n, n, d)`."""
        return torch.stack([self._jacobian.transposed(one) for one in vectors]).view(self._n, self._n, -1)


class DenseJacobian(Jacobian):
    """A stored Jacobian: of each entry of an update, by its name, `rows` `(p_name, q)`."""

    def __init__(self, update: Update, rows: Mapping[str, Tensor]) -> None:
        shapes = {name: (value.numel(), rows[name].shape[1]) for name, value in update.items() if name in rows}
        fits = all(tuple(rows[name].shape) == shape for name, shape in shapes.items())
        if set(rows) != set(update) or not fits or len({shape[1] for shape in shapes.values()}) != 1:
            raise ShapeError(
                "a Jacobian needs one row per coordinate of the update and equally many columns throughout; got "
                f"{ {name: tuple(value.shape) for name, value in rows.items()} }"
            )
        self.update, self.rows = update, dict(rows)
        self.n_inputs = next(iter(shapes.values()))[1]

    def gram(self, weights: Update | float = 1.0) -> Tensor:
        total = torch.zeros(())
        for name, rows in self.rows.items():
            own = rows * weights if isinstance(weights, float | int) else rows * weights[name].reshape(-1, 1)
            total = total + own.T @ rows
        return total

    def transposed(self, vector: Update) -> Tensor:
        parts = (rows.T @ vector[name].reshape(-1) for name, rows in self.rows.items())
        return sum(parts, start=torch.zeros(()))


def fisher_information(jacobian: Jacobian, release: NoisyRelease) -> Tensor:
    """`(q, q)` information about the inputs in an update that is released with noise.

    With active clipping, `c = bound / |g|` and `u = g / |g|`, the released mean has the Jacobian `c (I - u u^T) J`.
    Information in the choice of dropped coordinates or in variances is left out: the bound holds for attackers who do
    not use it.

    Source: [Liu2025], equation 27 and appendix E.
    """
    scale, weights = release.scale, release.precision(jacobian.update)
    # the closed form for a scalar is much cheaper
    if isinstance(scale, float | int) and release.kept is None:
        return _released_gram(jacobian, release, scale**-2)
    return _released_gram(jacobian, release, weights)


def _released_gram(jacobian: Jacobian, release: NoisyRelease, weights: Update | float) -> Tensor:
    """`J^T diag(w) J` of the Jacobian of the mean of a release, for weights that are 0 where it drops."""
    information = jacobian.gram(weights)
    norm = norm_of(jacobian.update)
    if not release.clips(norm):
        return information
    unit = {name: value / norm for name, value in jacobian.update.items()}
    weighed = weighted(unit, weights)
    along, along_weighed = jacobian.transposed(unit), jacobian.transposed(weighed)
    crossed = torch.outer(along, along_weighed)
    clipped = information - crossed - crossed.T + inner(weighed, unit) * torch.outer(along, along)
    result: Tensor = (release.bound / norm) ** 2 * clipped
    return result


@dataclass(frozen=True)
class ReleasedInformation:
    """A released update before clipping, mask and noise, and the Fisher information `(q, q)` about the inputs in it."""

    update: Update
    release: NoisyRelease
    information: Tensor

    @property
    def notes(self) -> tuple[str, ...]:
        """Information that is left out."""
        return self.release.notes


#: Largest number of entries of a stored Jacobian: 400 MB in double precision.
LARGEST = 50_000_000


def autograd_jacobian(
    function: Callable[[Tensor], Update], inputs: Tensor, chunk: int = 16, largest: int = LARGEST
) -> DenseJacobian:
    """The Jacobian of `function` at `inputs` of any shape, column by column.

    `J^T u` is linear in `u`, so that its derivative along `v` is `J v`: both are computed in reverse mode, which every
    operation supports, for `chunk` columns at a time. There are fewer columns (pixels) than rows (parameters). The
    function's operations must be such that `torch.func` can transform them; a client's operator must be called with
    `differentiable="functional"`. Inputs are in double precision if the information is to be inverted.
    """
    if chunk < 1:
        raise ConfigError(f"a Jacobian needs chunks of at least 1 column; got {chunk}")
    released, pull_back, *_ = torch.func.vjp(function, inputs)
    update = {name: value.detach() for name, value in released.items()}
    rows, columns = sum(value.numel() for value in update.values()), inputs.numel()
    check_size(rows, columns, largest)
    nothing = {name: torch.zeros_like(value) for name, value in update.items()}
    _, forward, *_ = torch.func.vjp(lambda cotangent: pull_back(cotangent)[0], nothing)
    units = torch.eye(columns, dtype=inputs.dtype, device=inputs.device).view(columns, *inputs.shape)
    jacobian = {name: value.new_empty(value.numel(), columns) for name, value in update.items()}
    for start in range(0, columns, chunk):
        part = torch.func.vmap(lambda direction: forward(direction)[0])(units[start : start + chunk])
        for name, values in part.items():
            jacobian[name][:, start : start + chunk] = values.detach().flatten(1).T
    return DenseJacobian(update, jacobian)


def check_size(n_parameters: int, n_inputs: int, largest: int = LARGEST) -> None:
    """Raise a `ConfigError` for a Jacobian of more than `largest` entries."""
    if n_parameters * n_inputs > largest:
        raise ConfigError(
            f"a Jacobian of {n_parameters:,} coordinates by {n_inputs:,} inputs has more than {largest:,} entries "
            f"(about {math.ceil(n_parameters * n_inputs * 8 / 1e9)} GB): take a smaller network, smaller images or "
            "smaller batches; two-layer networks have a closed form without a stored Jacobian"
        )
