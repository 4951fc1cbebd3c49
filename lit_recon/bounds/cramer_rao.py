"""Lower bounds on the squared error of a reconstruction, from the Fisher information in a release.

Cramer-Rao holds for estimators that are unbiased, at least nearly and near the true input. An attack that uses a prior
on images, clips to [0, 1] or returns a constant is biased and may have a smaller error; only `van_trees` applies to it:
if inputs are drawn from a density with information `P` about their location, every attack has
`E |x^ - x|^2 >= tr((E F + P)^-1)`, the mean over inputs and noise. The bound is only as accurate as the density.
Matrices and samples of the wrong size raise a `ShapeError`, settings out of their range a `ConfigError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.bounds.two_layer import TwoLayerJacobian, TwoLayerNet
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.noisy_release import NoisyRelease
from lit_recon.records import Update
from lit_recon.solving import least_squares

#: Eigenvalues below this fraction of the largest count as zero; the information is then singular.
_SINGULAR = 1e-13

UNBIASED = (
    "unbiased attacks only: one that uses a prior, clips to the range of pixels or returns a constant is biased and "
    "may have a smaller error"
)
UNBIASED_ON_SPHERE = f"attacks that know the norm of every input, otherwise {UNBIASED}"


@dataclass(frozen=True)
class ErrorBound:
    """A lower bound on the squared error, summed over all coordinates of all inputs.

    Attributes:
        squared: lower bound of `E |x^ - x|^2`; infinite if the release has no information about some direction.
        relaxed: a weaker bound from the trace of the information.
        n_inputs: number `q` of coordinates in the sum.
        applies_to: the attacks for which the bound holds.
    """

    squared: float
    relaxed: float
    n_inputs: int
    applies_to: str

    @property
    def mse(self) -> float:
        """Mean squared error of a coordinate."""
        return self.squared / self.n_inputs

    @property
    def rmse(self) -> float:
        """Its root."""
        return math.sqrt(self.mse)


def cramer_rao(information: Tensor, rounding: float = 0.0) -> ErrorBound:
    """`tr(F^-1)`, and the weaker bound `q^2 / tr(F)`, of information `(q, q)`, symmetric and positive semidefinite.

    Eigenvalues may be larger by `rounding`, and are taken to be: the bound holds, and is too low where they are not.

    Source: [Liu2025], equation 27, lemma D.2 and remark D.3.
    """
    return ErrorBound(*_bounds(information, rounding), len(information), UNBIASED)


def unknown_directions(information: Tensor, rounding: float = 0.0) -> int:
    """The number of directions of the inputs without information: eigenvalues of at most `rounding`, or tiny."""
    values = torch.linalg.eigvalsh(information.double())
    return int((values <= _resolution(values, rounding)).sum())


def unknown_basis(information: Tensor, rounding: float = 0.0) -> Tensor:
    """Orthonormal columns `(q, k)` that span the `unknown_directions`."""
    values, vectors = torch.linalg.eigh(information.double())
    basis: Tensor = vectors[:, values <= _resolution(values, rounding)]
    return basis


def _resolution(values: Tensor, rounding: float) -> float:
    return max(rounding, _SINGULAR * len(values) * float(values[-1]))


@dataclass(frozen=True)
class Rounding:
    """The effect of rounding on information `(q, q)`, from the errors `(q, m)` of some of its columns.

    Errors are taken to be independent, of mean zero, and as large in the other columns.

    Attributes:
        size: twice their root mean square times `sqrt(q)`, the norm of a random symmetric matrix: what eigenvalues of
            this size or below are is not known.
        relative: order of magnitude of the error of the Cramer-Rao RMSE, relative to it: its standard deviation if
            errors were independent; infinite if an eigenvalue is not known.
    """

    size: float
    relative: float

    @classmethod
    def of(cls, information: Tensor, errors: Tensor) -> Rounding:
        """For information that is not scaled since."""
        q = len(information)
        size = 2 * float(errors.square().mean().sqrt()) * math.sqrt(q)
        values, vectors = torch.linalg.eigh(information.double())
        if not values[0] > _resolution(values, size):
            return cls(size, math.inf)
        inverse = values.reciprocal()
        # the derivative of the trace of the inverse is minus the inverse's square
        squared = (vectors * inverse.square()) @ vectors.T
        variance = 2 * float(squared.square().mean()) * float(errors.square().mean()) * q**2
        return cls(size, math.sqrt(variance) / float(inverse.sum()) / 2)


def unit_norm_cramer_rao(information: Tensor, inputs: Tensor) -> ErrorBound:
    """The bound for attacks that know `|x_i|`: `tr(U (U^T F U)^-1 U^T)` with `U` orthogonal to every input.

    Inputs are `(n, d)`, none of them zero; the information is `(n d, n d)`, example after example.

    Source: [StoicaNg1998], theorem 1.
    """
    n, d = inputs.shape
    if information.shape != (n * d, n * d) or d < 2:
        raise ShapeError(f"inputs {n, d} need an information matrix {n * d, n * d}; got {tuple(information.shape)}")
    basis = torch.block_diag(*[torch.linalg.svd(x[None]).Vh[1:].T for x in inputs])
    return ErrorBound(*_bounds(basis.T @ information @ basis), n * d, UNBIASED_ON_SPHERE)


def _bounds(information: Tensor, rounding: float = 0.0) -> tuple[float, float]:
    """`tr(F^-1)`, infinite for singular information, and `q^2 / tr(F)`."""
    square = information.dim() == 2 and information.shape[0] == information.shape[1] > 0
    if not square or not information.isfinite().all():
        raise ShapeError(f"the information must be a finite, square matrix; got {tuple(information.shape)}")
    values = torch.linalg.eigvalsh(information.double())
    # rounding may have made them negative
    values = values.clamp_min(0) + rounding
    singular = float(values[0]) <= _resolution(values, 0.0)
    trace = float(values.sum())
    return (
        math.inf if singular else float(values.reciprocal().sum()),
        len(values) ** 2 / trace if trace > 0 else math.inf,
    )


EVERY_ATTACK = "every attack, biased or not, on average over inputs drawn from the prior"


@dataclass(frozen=True)
class GaussianPrior:
    """Inputs drawn independently from one normal distribution, of `covariance` `(d, d)`, positive definite."""

    covariance: Tensor

    def __post_init__(self) -> None:
        if self.covariance.dim() != 2 or self.covariance.shape[0] != self.covariance.shape[1]:
            raise ShapeError(f"a covariance is a square matrix; got {tuple(self.covariance.shape)}")
        if not torch.linalg.eigvalsh(self.covariance)[0] > 0:
            raise ConfigError("a Gaussian prior needs a positive definite covariance: raise its floor")

    @classmethod
    def isotropic(cls, d: int, variance: float) -> GaussianPrior:
        """The same variance in all directions."""
        if not variance > 0:
            raise ConfigError(f"a Gaussian prior needs a variance above 0; got {variance:g}")
        return cls(variance * torch.eye(d, dtype=torch.float64))

    @classmethod
    def fitted(cls, samples: Tensor, floor: float = 1e-4) -> GaussianPrior:
        """The covariance of samples `(n, ...)`, with `floor` added to every variance.

        The floor gives constant pixels, and directions beyond the number of samples, a positive variance; the bound
        becomes a little larger than that of the samples' own covariance.
        """
        if len(samples) < 2 or not floor > 0:
            raise (ShapeError if len(samples) < 2 else ConfigError)(
                f"a prior is fitted to 2 samples or more with a floor above 0; got {len(samples)} and {floor:g}"
            )
        covariance = torch.cov(samples.flatten(1).double().T).reshape(samples[0].numel(), -1)
        return cls(covariance + floor * torch.eye(len(covariance), dtype=torch.float64))

    def precision(self, n: int) -> Tensor:
        """Inverse covariance of a batch of `n` inputs, `(n d, n d)`."""
        inverse: Tensor = torch.linalg.inv(self.covariance)
        blocks: Tensor = torch.block_diag(*[inverse] * n)
        return blocks


def van_trees(information: Tensor, prior: GaussianPrior, rounding: float = 0.0) -> ErrorBound:
    """`tr((F + P)^-1)`, and the weaker bound `q^2 / tr(F + P)`, for the prior of one input.

    `information` `(q, q)` is the mean over inputs drawn from the prior, example after example. Its eigenvalues may be
    larger by `rounding`, and are taken to be, as for `cramer_rao`.

    Source: [VanTrees1968]; [GillLevit1995], equation 1.
    """
    size, d = len(information), len(prior.covariance)
    if information.shape != (size, size) or size % d or not information.isfinite().all():
        raise ShapeError(
            f"a prior of {d} coordinates needs an information matrix (n {d}, n {d}); got {tuple(information.shape)}"
        )
    total = information.double() + prior.precision(size // d).to(information.device)
    total.diagonal().add_(rounding)
    squared = float(torch.linalg.inv(total).diagonal().sum())
    return ErrorBound(squared, size**2 / float(total.diagonal().sum()), size, EVERY_ATTACK)


def remaining(unknown: Tensor, prior: GaussianPrior) -> ErrorBound:
    """The error that the prior leaves if all directions but those of orthonormal columns `(q, k)` are known exactly.

    That is the case of a release without noise: the limit of `van_trees` for noise that vanishes.
    """
    if not unknown.numel():
        return ErrorBound(0.0, 0.0, len(unknown), EVERY_ATTACK)
    precision = unknown.T @ prior.precision(len(unknown) // len(prior.covariance)).to(unknown) @ unknown
    relaxed = unknown.shape[1] ** 2 / float(precision.trace())
    return ErrorBound(float(torch.linalg.inv(precision).trace()), relaxed, len(unknown), EVERY_ATTACK)


def likeliest_inputs(
    net: TwoLayerNet, start: Tensor, targets: Tensor, observed: Update, release: NoisyRelease, steps: int = 5
) -> Tensor:
    """Inputs `(n, d)` that maximize the likelihood of the release, by damped Gauss-Newton steps from `start`.

    Each step is halved until the likelihood does not decrease; dropped coordinates of `observed` are not used. For a
    check of the bound, start at the true inputs.
    """
    if steps < 1 or release.bound != float("inf") or release.family != "gaussian":
        raise ConfigError(
            f"Gauss-Newton needs 1 step or more, no clipping and normal noise; got {steps}, {release.bound:g} and "
            f"{release.family} noise"
        )
    weights = release.precision(observed)

    def misfit(inputs: Tensor) -> tuple[Update, float]:
        update = net.update(inputs, targets)
        weighted = {name: weights[name] * (observed[name] - value) for name, value in update.items()}
        return weighted, float(sum((weighted[name] * (observed[name] - update[name])).sum() for name in update))

    inputs, (weighted, value) = start, misfit(start)
    for _ in range(steps):
        jacobian = TwoLayerJacobian(net, inputs, targets)
        step = least_squares(jacobian.gram(weights), jacobian.transposed(weighted)[:, None])
        for halvings in range(10):
            moved = inputs + 0.5**halvings * step.view_as(inputs)
            found, less = misfit(moved)
            if less <= value:
                inputs, weighted, value = moved, found, less
                break
        else:
            break
    return inputs
