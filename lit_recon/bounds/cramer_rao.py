"""Cramer-Rao: how far an unbiased reconstruction is from the truth at least, given the information in a release.

Locally: for estimators whose mean is the truth, or nearly, in a neighbourhood of it. An attack that knows what images
look like, that clips to [0, 1] or that gives up and answers a constant is biased and may come closer; for those only
`lit_recon.bounds.van_trees` speaks. Every bound says so itself.

Sources:
    [Liu2025] Liu, Wang, Chen, Lei, lemma D.2 and remark D.3: the relaxed bound.
    [StoicaNg1998] Stoica and Ng, On the Cramer-Rao bound under parametric constraints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ShapeError

#: Below this share of the largest eigenvalue an information is rounding, and its inverse nothing.
_SINGULAR = 1e-13

UNBIASED = (
    "unbiased attacks only: one that uses a prior, clips to the range of pixels or answers a constant is biased and "
    "may come closer"
)
UNBIASED_ON_SPHERE = f"attacks that know the norm of every input, otherwise {UNBIASED}"


@dataclass(frozen=True)
class ErrorBound:
    """The least squared error, summed over all coordinates of all inputs.

    Attributes:
        squared: `E |x^ - x|^2` is at least this; infinite where the release leaves a direction open.
        relaxed: a weaker bound from the trace of the information alone: what theorems on rates are about.
        n_inputs: coordinates `q` that `squared` is a sum over.
        applies_to: which attacks cannot do better.
    """

    squared: float
    relaxed: float
    n_inputs: int
    applies_to: str

    @property
    def mse(self) -> float:
        """Mean over coordinates."""
        return self.squared / self.n_inputs

    @property
    def rmse(self) -> float:
        """Root of the mean squared error of a coordinate."""
        return math.sqrt(self.mse)


def cramer_rao(information: Tensor) -> ErrorBound:
    """`tr(F^-1)`, and `q^2 / tr(F)`, which is never above it.

    Args:
        information: `(q, q)`, symmetric, positive semidefinite.

    Raises:
        ShapeError: not a square, finite matrix.

    Source: [Liu2025], equation 27, lemma D.2.

    >>> bound = cramer_rao(torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)))
    >>> bound.squared, bound.relaxed
    (1.25, 0.8)
    """
    values = _eigenvalues(information)
    return ErrorBound(_sum_of_inverses(values), _relaxed(values), len(values), UNBIASED)


def unit_norm_cramer_rao(information: Tensor, inputs: Tensor) -> ErrorBound:
    """The bound for attacks that know `|x_i|`: `tr(U (U^T F U)^-1 U^T)` with `U` orthogonal to every input.

    Args:
        information: `(n d, n d)`, example after example.
        inputs: `(n, d)`, none of them zero.

    Raises:
        ShapeError: the information does not belong to such inputs.

    Source: [StoicaNg1998], theorem 1.
    """
    n, d = inputs.shape
    if information.shape != (n * d, n * d) or d < 2:
        raise ShapeError(f"inputs {n, d} need an information {n * d, n * d}; got {tuple(information.shape)}")
    tangents = [torch.linalg.svd(x[None]).Vh[1:].T for x in inputs]
    basis = torch.block_diag(*tangents)
    values = _eigenvalues(basis.T @ information @ basis)
    return ErrorBound(_sum_of_inverses(values), _relaxed(values), n * d, UNBIASED_ON_SPHERE)


def _eigenvalues(information: Tensor) -> Tensor:
    square = information.dim() == 2 and information.shape[0] == information.shape[1] > 0
    if not square or not information.isfinite().all():
        raise ShapeError(f"an information is a finite, square matrix; got {tuple(information.shape)}")
    values: Tensor = torch.linalg.eigvalsh(information.double())
    return values


def _sum_of_inverses(values: Tensor) -> float:
    if values[0] <= _SINGULAR * len(values) * values[-1]:
        return math.inf
    return float(values.reciprocal().sum())


def _relaxed(values: Tensor) -> float:
    trace = float(values.sum())
    return len(values) ** 2 / trace if trace > 0 else math.inf
