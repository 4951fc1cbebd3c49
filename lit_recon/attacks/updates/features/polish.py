"""Polish: from a rough start to features that solve the gradient's equations up to rounding.

Also without a span: for gradients too sparse for completion, and for a layer without a released gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from lit_recon.attacks.updates.features.equations import FeatureEquations
from lit_recon.attacks.updates.features.layer import GradientNoise, LayerGradient
from lit_recon.solving import least_squares

#: Initial and largest damping of Levenberg-Marquardt.
_FIRST, _LAST = 1e-3, 1e9
#: Smallest relative gain of a step, and the number of smaller ones in a row that end the search.
_GAIN, _PATIENCE = 1e-3, 3
#: Rounds of reweighted least squares for kinked activations, and the certificate at which they end.
_REWEIGHTINGS, _SETTLED = 10, 1e-6


class Polished(NamedTuple):
    """Coordinates `(n, r)`, loss derivatives `(n, k)` and the sum of relative residuals, the certificate."""

    features: Tensor
    deltas: Tensor
    certificate: float


def polish(equations: FeatureEquations, start: Tensor, iterations: int = 60) -> Polished:
    """Levenberg-Marquardt from directions `(n, r)`, unit rows of unknown sign and order.

    For an activation with a kink the layer's gradient is discontinuous in the features, so the search first uses the
    head's gradient alone. `iterations` is the largest number of steps in each of the two stages.
    """
    features = with_signs(equations, start)
    deltas, _ = equations.best_deltas(features)
    if equations.activation.smooth:
        features, deltas = _levenberg_marquardt(equations, features, deltas, True, iterations)
        return Polished(features, deltas, sum(equations.residuals(features, deltas)))
    features, deltas = _levenberg_marquardt(equations, features, deltas, False, iterations)
    for _ in range(_REWEIGHTINGS):
        # neurons are trusted the less the larger their error, as on the wrong side of their kink
        errors = equations.weight_errors(features, deltas)
        scale = errors.median() + 1e-9 * errors.max() + torch.finfo(errors.dtype).tiny
        trusted = equations.with_fixed_sides(features, scale / (scale + errors))
        features, deltas = _levenberg_marquardt(trusted, features, deltas, True, iterations)
        certificate = sum(equations.residuals(features, deltas))
        if certificate < _SETTLED:
            break
    return Polished(features, deltas, certificate)


def with_signs(equations: FeatureEquations, start: Tensor) -> Tensor:
    """Directions with the signs that fit the equations best.

    The input of the bias is 1 where that of the weights is the feature, so `P q = g` implies `c_i . q = 1` for every
    example, which gives the signs unless the bias gradient is noisy. Single flips follow while they help.
    """
    features = start
    if equations.bias_known:
        gradient = equations.gradient * equations.rows[:, None]
        dual = least_squares(gradient[:, :-1], gradient[:, -1:])
        features = torch.where(start @ dual < 0, -start, start)
    _, best = equations.best_deltas(features)
    while True:
        before = best
        for i in range(len(features)):
            flipped = features.clone()
            flipped[i] = -flipped[i]
            _, objective = equations.best_deltas(flipped)
            if objective < 0.999 * best:
                features, best = flipped, objective
        if best == before:
            return features


def _levenberg_marquardt(
    equations: FeatureEquations, features: Tensor, deltas: Tensor, weighted: bool, iterations: int
) -> tuple[Tensor, Tensor]:
    damping, patience = _FIRST, _PATIENCE
    system = equations.normal_system(features, deltas, weighted)
    for _ in range(iterations):
        diagonal = system.matrix.diagonal()
        raised = system.matrix + torch.diag(damping * diagonal + 1e-14 * diagonal.mean())
        factor, failed = torch.linalg.cholesky_ex(raised)
        # no step if the matrix is not positive definite: more damping follows
        step = torch.zeros_like(system.slope) if failed else torch.cholesky_solve(system.slope[:, None], factor)[:, 0]
        new_features = features - step[: features.numel()].reshape(features.shape)
        new_deltas = deltas - step[features.numel() :].reshape(deltas.shape)
        objective = equations.objective(new_features, new_deltas, weighted)
        gain = 1 - objective / system.objective if system.objective > 0 else 0.0
        damping = max(damping / 5, 1e-14) if gain > 0 else damping * 4
        patience = _PATIENCE if gain > _GAIN or gain <= 0 else patience - 1
        if gain > 0:
            features, deltas = new_features, new_deltas
        if patience == 0 or damping > _LAST or objective == 0:
            break
        if gain > 0:
            system = equations.normal_system(features, deltas, weighted)
    return features, deltas


#: History size of L-BFGS, and rounds in which the active set of a kinked activation is updated.
_MEMORY, _ROUNDS = 30, 4
#: Observed entries per unknown, at least, that determine features.
_PER_UNKNOWN = 1.3
#: Relative gain at which a fit through noise ends: far less than a nat of the likelihood of millions of entries.
_LEAST_GAIN = 1e-10


class MaskedEquations:
    """The equations of `FeatureEquations` in all `d` coordinates, on observed entries only.

    Masks are `(m, d)` and `(k, m)`; None: all entries. Residuals are divided by `noise`, so that their squares sum to
    about 1, or by the observed gradients.
    """

    def __init__(
        self,
        seen: LayerGradient,
        weight_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        noise: GradientNoise | None = None,
    ) -> None:
        self.seen = seen
        dtype = seen.weight.dtype
        self.weight_mask = None if weight_mask is None else weight_mask.to(dtype)
        self.head_mask = None if head_mask is None else head_mask.to(dtype)
        self._head_square = float(_masked(seen.head_gradient, self.head_mask).square().sum())
        self._weight_square = float(_masked(seen.weight_gradient, self.weight_mask).square().sum())
        self.noisy = noise is not None
        if noise is not None:
            self._head_square, self._weight_square = noise.scales(seen)
        self._all_squares = float(seen.weight_gradient.square().sum())

    def value_and_gradient(
        self, features: Tensor, deltas: Tensor, sides: Tensor | None = None
    ) -> tuple[float, float, Tensor, Tensor]:
        """Squared relative residuals of head and layer at `(n, d)` and `(n, k)`, and half the derivatives of their sum.

        `sides` `(n, m)` are fixed slopes of a ReLU; None: those at the features.
        """
        seen, of = self.seen, self.seen.activation
        z = features @ seen.weight.T + seen.bias
        value, slope = (of.value(z), of.slope(z)) if sides is None else (sides * z, sides)
        pull, push = torch.zeros_like(z), torch.zeros_like(deltas)
        direct = torch.zeros_like(features)
        head = weight = 0.0
        if self._head_square:
            residual = _masked(deltas.T @ value - seen.head_gradient, self.head_mask)
            head = float(residual.square().sum()) / self._head_square
            pull += (deltas @ residual) * slope / self._head_square
            push += value @ residual.T / self._head_square
        if self._weight_square:
            beta = deltas @ seen.head_weight
            weight, back, direct = self._layer(beta * slope, features)
            push += (back * slope) @ seen.head_weight.T
            if of.smooth:
                pull += back * beta * of.curvature(z)
        return head, weight, pull @ seen.weight + direct, push

    def _layer(self, factors: Tensor, features: Tensor) -> tuple[float, Tensor, Tensor]:
        """Relative square of the residual `R = factors^T features - gradient`, `features R^T` and `factors R` alike."""
        gradient = self.seen.weight_gradient
        if self.noisy and self.weight_mask is None:
            # without the residual itself, several passes over memory; its square loses digits where it is small, and
            # noise keeps it large
            ours, theirs = factors @ factors.T, features @ features.T
            both = features @ gradient.T
            square = float((ours * theirs).sum() - 2 * (factors * both).sum()) + self._all_squares
            along = theirs @ factors - both, ours @ features - factors @ gradient
        else:
            residual = _masked(factors.T @ features - gradient, self.weight_mask)
            square, along = float(residual.square().sum()), (features @ residual.T, factors @ residual)
        return square / self._weight_square, along[0] / self._weight_square, along[1] / self._weight_square

    def certificate(self, features: Tensor, deltas: Tensor) -> float:
        """Sum of the relative residuals on observed entries."""
        head, weight, *_ = self.value_and_gradient(features, deltas)
        return float(head**0.5 + weight**0.5)

    @property
    def too_few(self) -> str:
        """Why the observed entries cannot determine the features; empty if there are enough of them.

        The loss derivatives of an example sum to 0 over the classes, and so does every column of the head's gradient:
        `n` columns without a missing entry tell the sums, and in any further one the last entry follows.
        """
        seen = self.seen
        head = seen.head_gradient != 0
        whole = int((head[head.any(dim=1)].all(dim=0) & head.any(dim=0)).sum())
        implied = max(0, whole - seen.n_examples)
        count = int(seen.weight_gradient.count_nonzero() + head.sum()) - implied
        unknowns = seen.n_examples * (seen.weight.shape[1] + len(seen.head_weight))
        if count >= _PER_UNKNOWN * unknowns:
            return ""
        least = math.ceil(_PER_UNKNOWN * unknowns)
        independent = f" that do not follow from {implied} others" if implied else ""
        return (
            f"{count} entries of the gradients{independent} are observed, for {unknowns} unknowns: at least {least} "
            "are needed"
        )

    def misfit(self, features: Tensor, deltas: Tensor, noise: GradientNoise) -> float:
        """Root mean square of the head's residual over its noise; of the layer's if the head released nothing."""
        head, weight, _, _ = self.value_and_gradient(features, deltas)
        if self._head_square:
            return float((head * self._head_square / self.seen.head_gradient.numel()) ** 0.5) / noise.head
        return float((weight * self._weight_square / self.seen.weight_gradient.numel()) ** 0.5) / noise.layer


def masked_polish(equations: MaskedEquations, features: Tensor, deltas: Tensor, iterations: int = 300) -> Polished:
    """L-BFGS from features `(n, d)` and deltas `(n, k)`; the better of start and end by the certificate.

    Features are kept at unit norm: long ones with small deltas are a spurious minimum. `iterations` are in total.
    """
    features = torch.nn.functional.normalize(features, dim=1)
    best = Polished(features, deltas, equations.certificate(features, deltas))
    of = equations.seen.activation
    scale = float(features.norm() / deltas.norm().clamp_min(torch.finfo(deltas.dtype).tiny))
    rounds = 1 if of.smooth else _ROUNDS
    for _ in range(rounds):
        sides = None if of.smooth else of.slope(best.features @ equations.seen.weight.T + equations.seen.bias)

        def objective(flat: NDArray[np.float64], sides: Tensor | None = sides) -> tuple[float, NDArray[np.float64]]:
            x, y = _unpacked(flat, features, deltas, scale)
            head, weight, along_features, along_deltas = equations.value_and_gradient(x, y, sides)
            radius = torch.from_numpy(flat[: features.numel()]).view_as(features).norm(dim=1, keepdim=True)
            along_features = (along_features - (along_features * x).sum(dim=1, keepdim=True) * x) / radius
            slope = torch.cat([along_features.reshape(-1), along_deltas.reshape(-1) / scale])
            return head + weight, 2 * slope.numpy()

        start = torch.cat([best.features.reshape(-1), best.deltas.reshape(-1) * scale]).numpy()
        least = _LEAST_GAIN if equations.noisy else 1e-18
        options = {"maxiter": iterations // rounds, "maxcor": _MEMORY, "ftol": least, "gtol": 1e-12}
        found = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
        moved = _unpacked(found.x, features, deltas, scale)
        certificate = equations.certificate(*moved)
        if certificate >= best.certificate:
            break
        best = Polished(*moved, certificate)
    return best


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values * mask


def _unpacked(flat: NDArray[np.float64], features: Tensor, deltas: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Features and deltas from L-BFGS's vector, in which both are scaled to similar size."""
    vector = torch.from_numpy(flat.copy())
    split = features.numel()
    unit = torch.nn.functional.normalize(vector[:split].reshape(features.shape), dim=1)
    return unit, vector[split:].reshape(deltas.shape) / scale
