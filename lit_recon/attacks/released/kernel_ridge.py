"""Kernel ridge regression from differences of weights to images.

Differences are scaled to unit length: their direction depends on the image, their length mostly on its loss. They are
not standardized by coordinate, since that would amplify the rounding errors of weights that no image changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor, silently
from lit_recon.attacks.released.gaussian_kernel import squared_distances, unit_length
from lit_recon.attacks.released.kernel_systems import BlockSolver, cholesky, gib
from lit_recon.errors import ConfigError, ShapeError


@dataclass
class KernelRidge(Reconstructor):
    """Ridge regression with a Gaussian kernel on differences of unit length.

    Bandwidth and ridge minimize the leave-one-out error, which has a closed form, on a part of the shadow models. The
    differences are not copied: they must not change while the reconstructor is used.

    Args:
        bandwidths: candidates for the bandwidth of `exp(-d / bandwidth)`; squared distances `d` have a mean of 1.
        ridges: candidates for the ridge that is added to the kernel's diagonal of 1.
        n_validation: number of shadow models, from the first on, that the choice is made on.
        max_models: most shadow models; time grows with the cube of their number.
        solver: how the system of all shadow models is solved within a bound on memory.

    Source: Hastie, Tibshirani and Friedman 2009, The Elements of Statistical Learning, section 5.8, and eq. 7.64.
    """

    bandwidths: Sequence[float] = (0.5, 1.0, 2.0)
    ridges: Sequence[float] = (1e-7, 1e-5, 1e-3)
    n_validation: int = 1_500
    max_models: int = 60_000
    solver: BlockSolver = field(default_factory=BlockSolver)

    def __post_init__(self) -> None:
        if min(self.bandwidths, default=0) <= 0 or min(self.ridges, default=0) <= 0:
            raise ConfigError(f"bandwidths and ridges must be lists of positive numbers; got {self}")
        if self.n_validation < 2 or self.max_models < 2:
            raise ConfigError(f"n_validation and max_models must be at least 2; got {self}")

    def prepare(self, background: Background) -> None:
        if (sizes := background.sizes) is not None:
            self._check_sizes(sizes.n, sizes.n_features, math.prod(sizes.image_shape) + sizes.n_classes)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        n_pixels, self.image_shape = images[0].numel(), images.shape[1:]
        d = n_pixels + n_classes
        few = slice(0, self.n_validation)
        self._check_sizes(len(differences), differences.shape[1], d)
        self._choose(unit_length(differences[few]), outputs(images[few], labels[few], n_classes), n_pixels)
        announce = silently if self.background is None else self.background.announce
        self.system = self.solver.system(differences, self.bandwidth, self.ridge, d, announce)
        values = outputs(images, labels, n_classes)
        self.mean = values.mean(dim=0)
        self.weights = self.system.solve_(values.sub_(self.mean))

    @property
    def facts(self) -> dict[str, float]:
        """The chosen `bandwidth` and `ridge`, and their leave-one-out error `validation_mse`.

        For more than one block also the largest relative residual of the system, `kernel_residual`, and for conjugate
        gradients their number of steps, `kernel_steps`.
        """
        return {
            "bandwidth": self.bandwidth,
            "ridge": self.ridge,
            "validation_mse": self.error,
            **self.system.facts,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        return (self.system.note,) if self.system.note else ()

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        values, explained = [], []
        for some in differences.split(self.system.layout.columns):
            kernel = self.system.kernel.between(some)
            values.append(kernel @ self.weights)
            explained.append(self.system.explained(kernel))
        found, n_pixels = torch.cat(values) + self.mean, self.image_shape.numel()
        # Posterior variance of the Gaussian process with this mean: 1 far from all shadow models, 0 at one of them.
        return ReconstructedTargets(
            images=found[:, :n_pixels].clamp(0, 1).float().unflatten(1, self.image_shape),
            labels=found[:, n_pixels:].argmax(dim=1),
            uncertainty=(1 + self.ridge - torch.cat(explained)).clamp(min=0),
        )

    def _check_sizes(self, k: int, p: int, d: int) -> None:
        """Raise ConfigError for too many of `k` shadow models with `p` weights and `d` outputs, before the work."""
        if k > self.max_models:
            raise ConfigError(
                f"KernelRidge takes at most max_models={self.max_models} shadow models; got {k}: "
                "lower split.shadow, raise max_models, or use another reconstructor"
            )
        self.solver.layout(k, p, d)
        n = min(k, self.n_validation)
        # Their directions; distances, kernel, its factor, inverse and copies of these; their outputs.
        n_bytes = 4 * n * p + 56 * n**2 + 16 * n * d
        if n_bytes > self.solver.n_bytes:
            raise ConfigError(
                f"the choice of bandwidth and ridge on n_validation={n} shadow models takes {gib(n_bytes)} GiB; got "
                f"solver.memory_gib={self.solver.memory_gib:g}: raise it, or lower n_validation"
            )

    def _choose(self, directions: Tensor, values: Tensor, n_pixels: int) -> None:
        """Set bandwidth, ridge and their leave-one-out MSE of pixels."""
        self.error, distances = math.inf, squared_distances(directions, directions)
        mean, centered = distances.mean(), values - values.mean(dim=0)
        for bandwidth in self.bandwidths:
            kernel = (distances / (-bandwidth * mean)).exp_()
            for ridge in self.ridges:
                error = leave_one_out_error(kernel, centered, ridge, n_pixels)
                if error < self.error:
                    self.bandwidth, self.ridge, self.error = bandwidth, ridge, error
        if not math.isfinite(self.error):
            raise ShapeError("no bandwidth and ridge gave a kernel that can be inverted: add larger ridges")


def outputs(images: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """Pixels and labels, the latter on the scale of pixels and one column for each class: `(s, d)` float64."""
    n_pixels = images[0].numel()
    values = torch.empty(len(images), n_pixels + n_classes, dtype=torch.float64)
    values[:, :n_pixels] = images.flatten(1)
    values[:, n_pixels:] = F.one_hot(labels, n_classes)
    return values


def leave_one_out_error(kernel: Tensor, values: Tensor, ridge: float, n_pixels: int) -> float:
    """Mean squared error of the pixels of every row, predicted from all other rows; infinite for a singular kernel.

    With the kernel `K` `(s, s)` and `A = (K + ridge I)^-1`, the leave-one-out residual of row `i` of the values `Y`
    `(s, d)`, less their means, is `(A Y)_i / A_ii`. The first `n_pixels` columns enter the error.
    """
    factor = cholesky(kernel.clone(), ridge)
    if factor is None:
        return math.inf
    inverse = torch.cholesky_inverse(factor)
    residuals = (inverse @ values[:, :n_pixels]) / inverse.diagonal()[:, None]
    return float(residuals.square().mean())
