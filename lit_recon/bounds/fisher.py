"""Fisher information about a client's inputs in an update released with Gaussian noise.

With `J` the Jacobian of an update `g` (p coordinates) with respect to all inputs of a batch (q coordinates), the
release `g + N(0, diag(v))` has the information `J^T diag(1/v) J`. A defense changes the Jacobian as it changes the
update before the noise: dropped coordinates become rows of zeros, clipping scales it and projects out one direction.
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

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.records import Update


@dataclass(frozen=True)
class GaussianRelease:
    """A release of an update: clipping as one vector, then dropping of coordinates, then independent Gaussian noise.

    Attributes:
        std: standard deviation of the noise, above 0: one number, or one per coordinate in the update's shapes.
        kept: coordinates that are released, treated as fixed and known; None: all.
        bound: largest norm of the update, absolute.
    """

    std: float | Mapping[str, Tensor]
    kept: Mapping[str, Tensor] | None = None
    bound: float = math.inf

    def __post_init__(self) -> None:
        values = [torch.tensor(self.std)] if isinstance(self.std, float | int) else list(self.std.values())
        if not all(bool((value > 0).all()) and bool(value.isfinite().all()) for value in values):
            raise ConfigError(
                "a release needs noise with a positive, finite standard deviation on every coordinate: without noise "
                "an update may determine its inputs exactly, and the only bound is 0"
            )
        if not self.bound > 0:
            raise ConfigError(f"a release needs a clipping bound above 0; got {self.bound:g}: it would be zero")

    def mean(self, update: Update) -> Update:
        """The release without the noise."""
        norm, kept = _norm(update), self.kept
        factor = float(self.bound / norm) if norm > self.bound else 1.0
        return {name: factor * (value if kept is None else kept[name] * value) for name, value in update.items()}

    def drawn(self, update: Update, generator: torch.Generator) -> Update:
        """A random release of `update`; dropped coordinates are zero."""
        released = {}
        for name, value in self.mean(update).items():
            std = self.std if isinstance(self.std, float | int) else self.std[name]
            noise = std * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            released[name] = value + (noise if self.kept is None else self.kept[name] * noise)
        return released

    def precision(self, update: Update) -> Update:
        """The inverse variance of the noise on every coordinate of an update, 0 where it is dropped."""
        weights = {}
        for name, value in update.items():
            std = self.std if isinstance(self.std, float | int) else self.std.get(name)
            kept = torch.ones_like(value) if self.kept is None else self.kept.get(name)
            if std is None or kept is None or {getattr(std, "shape", value.shape), kept.shape} != {value.shape}:
                raise ShapeError(
                    f"noise and mask must have the names and shapes of the update; they differ in {name!r}"
                )
            weights[name] = kept.to(value.dtype) / std**2
        return weights


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

    def released(
        self,
        std: float | Mapping[str, Tensor],
        kept: Mapping[str, Tensor] | None = None,
        bound: float = math.inf,
        notes: Sequence[str] = (),
    ) -> ReleasedInformation:
        """The information in the release of the update; arguments as for `GaussianRelease`, and notes."""
        release = GaussianRelease(std, kept, bound)
        return ReleasedInformation(self.update, release, self.information(release), tuple(notes))

    def information(self, release: GaussianRelease) -> Tensor:
        """The Fisher information `(q, q)` of the inputs in a release, or a lower bound on it."""
        return fisher_information(self, release)

    def released_by_example(self, examples: Sequence[Update], bound: float, std: float) -> ReleasedInformation:
        """The information in the mean of gradients clipped one by one, with noise `std` on the mean.

        An example's gradient depends on its own input only: block `i` of the columns of this Jacobian, of the summed
        gradient, becomes `c_i (I - u_i u_i^T) J_i / n`, with `c_i` the factor of its clip to a norm of at most `bound`,
        and the projection only where that is below 1.
        """
        n = len(examples)
        d = self.n_inputs // n
        norms = torch.stack([_norm(single) for single in examples])
        factors = (bound / norms).clamp(max=1.0)
        # a gradient of zero has no direction, and is not clipped
        lengths = norms.clamp_min(torch.finfo(norms.dtype).tiny)
        units = [{name: v / by for name, v in single.items()} for single, by in zip(examples, lengths, strict=True)]
        along = torch.stack([self.transposed(unit) for unit in units]).view(n, n, d)  # unit, example, input
        blocks = self.gram().view(n, d, n, d)
        clipped = factors < 1
        for i in range(n):
            for k in range(n):
                own, other = clipped[i] * along[i, i], clipped[k] * along[k, k]
                blocks[i, :, k] += _inner(units[i], units[k]) * torch.outer(own, other)
                blocks[i, :, k] -= torch.outer(own, along[i, k]) + torch.outer(along[k, i], other)
                blocks[i, :, k] *= factors[i] * factors[k] / (n * std) ** 2
        mean = {
            name: torch.stack([f * single[name] for f, single in zip(factors, examples, strict=True)]).mean(dim=0)
            for name in examples[0]
        }
        return ReleasedInformation(mean, GaussianRelease(std), blocks.reshape(n * d, n * d))


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


def fisher_information(jacobian: Jacobian, release: GaussianRelease) -> Tensor:
    """`(q, q)` information about the inputs in an update that is released with Gaussian noise.

    With active clipping, `c = bound / |g|` and `u = g / |g|`, the released mean has the Jacobian `c (I - u u^T) J`.
    Information in the choice of dropped coordinates or in variances is left out: the bound holds for attackers who do
    not use it.

    Source: [Liu2025], equation 27 and appendix E.
    """
    std, weights = release.std, release.precision(jacobian.update)
    # the closed form for a scalar is much cheaper
    information = jacobian.gram(std**-2 if isinstance(std, float | int) and release.kept is None else weights)
    norm = _norm(jacobian.update)
    if not norm > release.bound:
        return information
    unit = {name: value / norm for name, value in jacobian.update.items()}
    weighted = {name: weights[name] * value for name, value in unit.items()}
    along, along_weighted = jacobian.transposed(unit), jacobian.transposed(weighted)
    crossed = torch.outer(along, along_weighted)
    clipped = information - crossed - crossed.T + _inner(weighted, unit) * torch.outer(along, along)
    result: Tensor = (release.bound / norm) ** 2 * clipped
    return result


@dataclass(frozen=True)
class ReleasedInformation:
    """A released update before clipping, mask and noise, and the Fisher information `(q, q)` about the inputs in it.

    `notes` state information that is left out.
    """

    update: Update
    release: GaussianRelease
    information: Tensor
    notes: tuple[str, ...] = ()


def _inner(left: Update, right: Update) -> Tensor:
    return torch.stack([(left[name] * value).sum() for name, value in right.items()]).sum()


def _norm(update: Update) -> Tensor:
    return _inner(update, update).sqrt()


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
