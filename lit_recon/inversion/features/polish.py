"""From a rough start to features that meet the gradient's equations up to rounding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.inversion.features.equations import FeatureEquations

#: Damping of Levenberg and Marquardt: where it starts, and beyond what no step is left to take.
_FIRST, _LAST = 1e-3, 1e9
#: Steps that gain less than this share of the objective in a row end the search.
_GAIN, _PATIENCE = 1e-3, 3
#: Rounds of reweighted least squares behind a kink, and the certificate at which no further one is needed.
_REWEIGHTINGS, _SETTLED = 10, 1e-6


class Polished(NamedTuple):
    """Coordinates `(n, r)`, loss derivatives `(n, k)` and the sum of relative residuals, the certificate."""

    features: Tensor
    deltas: Tensor
    certificate: float


def polish(equations: FeatureEquations, start: Tensor, iterations: int = 60) -> Polished:
    """Levenberg-Marquardt from directions `(n, r)` of unknown sign and order.

    Behind an activation with a kink the layer's gradient jumps where a neuron changes sides, so the search first uses
    the head's gradient alone, which does not.

    Args:
        equations: to be met.
        start: rows of unit norm.
        iterations: at most so many steps in each of the two stages.
    """
    features = with_signs(equations, start)
    deltas, _ = equations.best_deltas(features)
    if equations.activation.smooth:
        features, deltas = _levenberg_marquardt(equations, features, deltas, True, iterations)
        return Polished(features, deltas, sum(equations.residuals(features, deltas)))
    features, deltas = _levenberg_marquardt(equations, features, deltas, False, iterations)
    for _ in range(_REWEIGHTINGS):
        trusted = equations.with_fixed_sides(features, _trust(equations.weight_errors(features, deltas)))
        features, deltas = _levenberg_marquardt(trusted, features, deltas, True, iterations)
        certificate = sum(equations.residuals(features, deltas))
        if certificate < _SETTLED:
            break
    return Polished(features, deltas, certificate)


def _trust(errors: Tensor) -> Tensor:
    """Weights `(m,)` in (0, 1] that decay with a neuron's error: one on the wrong side of its kink must not count."""
    scale = errors.median() + 1e-9 * errors.max() + torch.finfo(errors.dtype).tiny
    return scale / (scale + errors)


def with_signs(equations: FeatureEquations, start: Tensor) -> Tensor:
    """Directions with the signs under which the equations are met best.

    The bias sees the constant 1 where the weights see the feature, so a vector q with `P q = g` satisfies `c_i . q = 1`
    for every example: that settles signs unless the bias gradient is noisy. Then single flips follow while they help.
    """
    features = start
    if equations.bias_known:
        gradient = equations.gradient * equations.rows[:, None]
        dual = torch.linalg.lstsq(gradient[:, :-1], gradient[:, -1:]).solution
        features = torch.where(start @ dual < 0, -start, start)
    _, best = equations.best_deltas(features)
    improved = True
    while improved:
        improved = False
        for i in range(len(features)):
            flipped = features.clone()
            flipped[i] = -flipped[i]
            _, objective = equations.best_deltas(flipped)
            if objective < 0.999 * best:
                features, best, improved = flipped, objective, True
    return features


def _levenberg_marquardt(
    equations: FeatureEquations, features: Tensor, deltas: Tensor, weighted: bool, iterations: int
) -> tuple[Tensor, Tensor]:
    damping, patience = _FIRST, _PATIENCE
    system = equations.normal_system(features, deltas, weighted)
    for _ in range(iterations):
        step = _damped_step(system.matrix, system.slope, damping)
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


def _damped_step(matrix: Tensor, slope: Tensor, damping: float) -> Tensor:
    """Solution of the system with its diagonal raised by a factor; none, i.e. zero, if that is not enough."""
    diagonal = matrix.diagonal()
    raised = matrix + torch.diag(damping * diagonal + 1e-14 * diagonal.mean())
    factor, failed = torch.linalg.cholesky_ex(raised)
    if failed:
        return torch.zeros_like(slope)
    solution: Tensor = torch.cholesky_solve(slope[:, None], factor)[:, 0]
    return solution
