"""Kernel ridge regression from differences of weights to images.

Differences are scaled to unit length: their direction depends on the image, their length mostly on its loss. They are
not standardized by coordinate, since that would amplify the rounding errors of weights that no image changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_recon.attacks.released.base import ReconstructedTargets, Reconstructor
from lit_recon.attacks.shadow.engines.pixels import times_transposed
from lit_recon.errors import ConfigError, ShapeError


@dataclass
class KernelRidge(Reconstructor):
    """Ridge regression with a Gaussian kernel on differences of unit length.

    Bandwidth and ridge minimize the leave-one-out error, which has a closed form, on a part of the shadow models.

    Args:
        bandwidths: candidates for the bandwidth of `exp(-d / bandwidth)`; squared distances `d` have a mean of 1.
        ridges: candidates for the ridge that is added to the kernel's diagonal of 1.
        n_validation: number of shadow models, from the first on, that the choice is made on.
        max_models: most shadow models; time grows with the cube, memory with the square: 16,000 take about 9 GiB.

    Source: Hastie, Tibshirani and Friedman 2009, The Elements of Statistical Learning, section 5.8, and eq. 7.64.
    """

    bandwidths: Sequence[float] = (0.5, 1.0, 2.0)
    ridges: Sequence[float] = (1e-7, 1e-5, 1e-3)
    n_validation: int = 1_500
    max_models: int = 16_000

    def __post_init__(self) -> None:
        if min(self.bandwidths, default=0) <= 0 or min(self.ridges, default=0) <= 0:
            raise ConfigError(f"bandwidths and ridges must be lists of positive numbers; got {self}")
        if self.n_validation < 2 or self.max_models < 2:
            raise ConfigError(f"n_validation and max_models must be at least 2; got {self}")

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        if len(differences) > self.max_models:
            raise ConfigError(
                f"KernelRidge takes at most max_models={self.max_models} shadow models; got {len(differences)}: "
                "lower split.shadow, raise max_models, or use another reconstructor"
            )
        directions = unit_length(differences)
        # Labels are regressed beside the pixels, on the same scale.
        values = torch.cat([images.flatten(1).double(), F.one_hot(labels, n_classes).double()], dim=1)
        few = directions[: self.n_validation]
        self._choose(squared_distances(few, few), values[: len(few)], images[0].numel())
        whole = squared_distances(directions, directions)
        self.directions, self.mean, self.image_shape = directions, values.mean(dim=0), images.shape[1:]
        self.scale = self.bandwidth * float(whole.mean())
        factor = _factor(whole.div_(-self.scale).exp_(), self.ridge)
        if factor is None:
            raise ShapeError(
                f"the kernel of {len(directions)} shadow models is singular at a ridge of {self.ridge}: raise ridges"
            )
        self.weights, self.factor = torch.cholesky_solve(values - self.mean, factor), factor

    @property
    def facts(self) -> dict[str, float]:
        """The chosen `bandwidth` and `ridge`, and their leave-one-out error `validation_mse`."""
        return {"bandwidth": self.bandwidth, "ridge": self.ridge, "validation_mse": self.error}

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        kernel = squared_distances(unit_length(differences), self.directions).div_(-self.scale).exp_()
        values = kernel @ self.weights + self.mean
        n_pixels = self.image_shape.numel()
        # Posterior variance of the Gaussian process with this mean: 1 far from all shadow models, 0 at one of them.
        explained = torch.linalg.solve_triangular(self.factor, kernel.T, upper=False).square().sum(dim=0)
        return ReconstructedTargets(
            images=values[:, :n_pixels].clamp(0, 1).float().unflatten(1, self.image_shape),
            labels=values[:, n_pixels:].argmax(dim=1),
            uncertainty=(1 + self.ridge - explained).clamp(min=0),
        )

    def _choose(self, distances: Tensor, values: Tensor, n_pixels: int) -> None:
        """Set bandwidth, ridge and their leave-one-out MSE of pixels."""
        self.error = math.inf
        mean, centred = distances.mean(), values - values.mean(dim=0)
        for bandwidth in self.bandwidths:
            kernel = (distances / (-bandwidth * mean)).exp_()
            for ridge in self.ridges:
                error = leave_one_out_error(kernel, centred, ridge, n_pixels)
                if error < self.error:
                    self.bandwidth, self.ridge, self.error = bandwidth, ridge, error
        if not math.isfinite(self.error):
            raise ShapeError("no bandwidth and ridge gave a kernel that can be inverted: add larger ridges")


def unit_length(differences: Tensor) -> Tensor:
    """Rows `(s, p)` divided by their lengths, float32; ShapeError if one is zero or not finite."""
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
    """Mean squared error of the pixels of every row, predicted from all other rows; infinite for a singular kernel.

    With the kernel `K` `(s, s)` and `A = (K + ridge I)^-1`, the leave-one-out residual of row `i` of the values `Y`
    `(s, d)`, less their means, is `(A Y)_i / A_ii`. The first `n_pixels` columns enter the error.
    """
    factor = _factor(kernel.clone(), ridge)
    if factor is None:
        return math.inf
    inverse = torch.cholesky_inverse(factor)
    residuals = (inverse @ values[:, :n_pixels]) / inverse.diagonal()[:, None]
    return float(residuals.square().mean())


def _factor(kernel: Tensor, ridge: float) -> Tensor | None:
    """Lower Cholesky factor after adding the ridge in place; None where rounding leaves the kernel indefinite."""
    kernel.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(kernel)
    return None if int(failed) else factor
