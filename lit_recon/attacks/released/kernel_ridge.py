"""The missing image as a smooth function of the direction in which it moved the weights, fitted in closed form.

The length of a difference says how much the model had left to learn from an image, its direction what the image looks
like: differences are scaled to unit length, and nothing is scaled coordinate by coordinate, since that would raise the
rounding errors of weights that no image moves to the size of the signal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_recon.attacks.released.base import FittedReconstructor, ReconstructedTargets, Reconstructor, check_shadows
from lit_recon.attacks.shadow.engines.pixels import times_transposed
from lit_recon.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class KernelRidge(Reconstructor):
    """Ridge regression with a Gaussian kernel on differences of unit length.

    Bandwidth and ridge are those of the least leave-one-out error, in closed form, on a part of the shadow models.

    Args:
        bandwidths: to choose from, of `exp(-d / bandwidth)` for squared distances `d`, in units of the mean of `d`.
        ridges: to choose from; they are added to the kernel's diagonal of 1.
        n_validation: shadow models that the choice is made on, the first ones.
        max_models: refuse more; time grows with the third power of their number, memory with the second: a run
            with 16,000 needs some 9 GiB.

    Source: Hastie, Tibshirani and Friedman 2009, The Elements of Statistical Learning, sections 5.8 and 7.10 (eq. 7.64
    for leave-one-out errors of linear smoothers).
    """

    bandwidths: Sequence[float] = (0.5, 1.0, 2.0)
    ridges: Sequence[float] = (1e-7, 1e-5, 1e-3)
    n_validation: int = 1_500
    max_models: int = 16_000

    def __post_init__(self) -> None:
        if min(self.bandwidths, default=0) <= 0 or min(self.ridges, default=0) <= 0:
            raise ConfigError(
                "bandwidths and ridges must be lists of positive numbers; "
                f"got {list(self.bandwidths)} and {list(self.ridges)}"
            )
        if self.n_validation < 2 or self.max_models < 2:
            raise ConfigError(
                f"n_validation and max_models must be at least 2; got {self.n_validation} and {self.max_models}"
            )

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        check_shadows(differences, images, labels, n_classes)
        if len(differences) > self.max_models:
            raise ConfigError(
                f"KernelRidge takes at most max_models={self.max_models} shadow models; got {len(differences)}: "
                "lower split.shadow, raise max_models, or use another reconstructor"
            )
        directions = unit_length(differences)
        # Labels are regressed beside the pixels, on the same scale.
        values = torch.cat([images.flatten(1).double(), F.one_hot(labels, n_classes).double()], dim=1)
        few = min(self.n_validation, len(directions))
        part = squared_distances(directions[:few], directions[:few])
        bandwidth, ridge, error = self._choose(part, values[:few], images[0].numel())
        whole = squared_distances(directions, directions)
        scale = bandwidth * float(whole.mean())
        mean = values.mean(dim=0)
        kernel = whole.div_(-scale).exp_()
        kernel.diagonal().add_(ridge)
        factor = _factor(kernel)
        if factor is None:
            raise ShapeError(
                f"the kernel of {len(directions)} shadow models is singular at a ridge of {ridge}: raise ridges"
            )
        weights = torch.cholesky_solve(values - mean, factor)
        return _FittedKernelRidge(directions, weights, factor, mean, scale, images.shape[1:], bandwidth, ridge, error)

    def _choose(self, distances: Tensor, values: Tensor, n_pixels: int) -> tuple[float, float, float]:
        """Bandwidth, ridge and their leave-one-out MSE of pixels."""
        best = (math.nan, math.nan, math.inf)
        mean, centred = distances.mean(), values - values.mean(dim=0)
        for bandwidth in self.bandwidths:
            kernel = (distances / (-bandwidth * mean)).exp_()
            for ridge in self.ridges:
                error = leave_one_out_error(kernel, centred, ridge, n_pixels)
                if error < best[2]:
                    best = (bandwidth, ridge, error)
        if not math.isfinite(best[2]):
            raise ShapeError("no bandwidth and ridge gave a kernel that can be inverted: add larger ridges")
        return best


@dataclass(frozen=True, eq=False)
class _FittedKernelRidge(FittedReconstructor):
    directions: Tensor
    weights: Tensor
    factor: Tensor
    mean: Tensor
    scale: float
    image_shape: torch.Size
    bandwidth: float
    ridge: float
    error: float

    @property
    def facts(self) -> dict[str, float]:
        """What was chosen: `bandwidth`, `ridge`, and their `validation_mse` on the shadow models."""
        return {"bandwidth": self.bandwidth, "ridge": self.ridge, "validation_mse": self.error}

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        kernel = squared_distances(unit_length(differences), self.directions).div_(-self.scale).exp_()
        values = kernel @ self.weights + self.mean
        n_pixels = self.image_shape.numel()
        # The posterior variance of the Gaussian process whose mean this is: 1 far from all shadow models, 0 at one.
        explained = torch.linalg.solve_triangular(self.factor, kernel.T, upper=False).square().sum(dim=0)
        return ReconstructedTargets(
            images=values[:, :n_pixels].clamp(0, 1).float().unflatten(1, self.image_shape),
            labels=values[:, n_pixels:].argmax(dim=1),
            uncertainty=(1 + self.ridge - explained).clamp(min=0),
        )


def unit_length(differences: Tensor) -> Tensor:
    """Rows `(s, p)` divided by their lengths, float32.

    Raises:
        ShapeError: a row is zero or not finite: that model says nothing about its image.
    """
    lengths = differences.double().norm(dim=1, keepdim=True)
    if not (torch.isfinite(lengths).all() and (lengths > 0).all()):
        raise ShapeError("differences must be finite and not zero: a released model equals the reference, or holds NaN")
    directions: Tensor = (differences.double() / lengths).float()
    return directions


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Between rows of unit length `(m, p)` and `(n, p)`: `(m, n)` float64, exactly 0 between a row and itself."""
    with torch.no_grad():
        products = times_transposed(a, b)
    distances = products.double().mul_(-2).add_(2).clamp_(min=0)
    if a is b or (a.shape == b.shape and a.data_ptr() == b.data_ptr()):
        distances.add_(distances.T.clone()).div_(2)
        distances.diagonal().zero_()
    return distances


def leave_one_out_error(kernel: Tensor, values: Tensor, ridge: float, n_pixels: int) -> float:
    """Mean squared error of every row's pixels as predicted by all others; infinite where the kernel is singular.

    With `A = (K + ridge I)^-1` the residual of row `i`, had it been left out, is `(A Y)_i / A_ii`.

    Args:
        kernel: `(s, s)`.
        values: `(s, d)`, pixels first, less their means.
        ridge: added to the diagonal.
        n_pixels: columns that count.
    """
    shifted = kernel.clone()
    shifted.diagonal().add_(ridge)
    factor = _factor(shifted)
    if factor is None:
        return math.inf
    inverse = torch.cholesky_inverse(factor)
    residuals = (inverse @ values[:, :n_pixels]) / inverse.diagonal()[:, None]
    return float(residuals.square().mean())


def _factor(matrix: Tensor) -> Tensor | None:
    """Lower Cholesky factor; None where rounding leaves the matrix indefinite."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return None if int(failed) else factor
