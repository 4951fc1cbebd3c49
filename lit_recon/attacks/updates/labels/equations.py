"""Equations for the inputs of the head, given its gradient and class counts, with fewer examples than classes.

For head inputs h_i, probabilities p_i = softmax(W h_i + b) and labels y_i the gradient of the mean cross-entropy is

    G_b = mean_i (p_i - e_{y_i})        G_W = mean_i (p_i - e_{y_i}) h_i^T

With fewer examples than classes the rows of G_W span the inputs, so h_i = V c_i with a known basis V. Given labels,
n^2 numbers have to satisfy (k - 1)(n + 1) equations, at least as many: in every measurement only right labels left no
residual beyond rounding. Inputs after a ReLU must also be non-negative, which avoids spurious minima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.attacks.updates.labels.head import ROUNDING, HeadGradient

#: Prior variances of an input: of the overall mean, of the means of classes, and within a class. The prior only starts
#: the search and is negligible against equations solved up to rounding.
SHARED, BETWEEN, WITHIN = 1.0, 0.3, 0.3
#: Weight of squared negative entries; the prior energy of an input is about 1 in the same unit.
NON_NEGATIVITY = 1e4
#: Steps of Levenberg-Marquardt at most.
MOST_STEPS = 150


@dataclass(frozen=True)
class Fit:
    """The best fit for assumed counts.

    Attributes:
        score: lower is more plausible; comparable between counts.
        residual: relative to the gradient.
        expected: `(k,)`: sum of the class probabilities of the fitted inputs.
        explained: the residual is no more than rounding or noise.
    """

    score: float
    residual: float
    expected: Tensor
    explained: bool


@dataclass
class _Point:
    """Inputs, and the terms of the objective."""

    inputs: Tensor
    probabilities: Tensor
    errors: Tensor
    bias_residual: Tensor
    weight_residual: Tensor
    negative: Tensor
    objective: float


class HeadEquations:
    """Levenberg-Marquardt on the equations of a head with fewer examples than classes, with decreasing noise level."""

    def __init__(self, head: HeadGradient) -> None:
        self.head = head
        rank = min(head.n_examples, head.weight.shape[1])
        self.basis = torch.linalg.svd(head.weight_gradient, full_matrices=False).Vh[:rank].T
        self.weight, self.gradient = head.weight @ self.basis, head.weight_gradient @ self.basis
        self.precision = rank / head.input_norm**2
        self.penalty = NON_NEGATIVITY * len(self.basis) / head.input_norm**2 if head.non_negative else 0.0

    def solve(self, counts: Tensor, seed: int = 0) -> Fit:
        """Fit for assumed class counts `(k,)`, from a random start."""
        targets = torch.eye(len(counts), dtype=torch.float64).repeat_interleave(counts, dim=0)
        precision = torch.linalg.inv(_covariance(targets)) * self.precision
        k, q = self.gradient.shape
        floor = torch.tensor(self._floor(), dtype=torch.float64)
        unit = torch.stack([self.head.bias_gradient.norm() / k**0.5, self.gradient.norm() / (k * q) ** 0.5])
        temperature, damping, patience = 1.0, 1e-3, 3
        noise = torch.maximum(floor, temperature * unit)
        at = self._at(prior_guess(targets, self.gradient, seed), targets, precision, noise)
        system = self._system(at, precision, noise)
        for _ in range(MOST_STEPS):
            new = self._at(at.inputs - _damped_solution(*system, damping), targets, precision, noise)
            gain = 1 - new.objective / at.objective
            stuck = gain <= 0 and damping > 1e4
            damping = max(damping / 10, 1e-12) if gain > 0 else damping * 8
            at = new if gain > 0 else at
            if (noise > floor).any() and (stuck or 0 < gain < 0.5):
                temperature, damping = 0.3 * temperature, 1e-3 if stuck else damping
                noise = torch.maximum(floor, temperature * unit)
                at, gain = self._at(at.inputs, targets, precision, noise), 1.0
            elif (noise <= floor).all():
                patience = patience - 1 if 0 < gain < 1e-3 else patience
                if stuck or patience == 0 or self._misfit(at, floor) < 2:
                    break
            system = self._system(at, precision, noise) if gain > 0 else system
        bias_misfit = (at.bias_residual.norm() / self.head.bias_gradient.norm()).item()
        weight_misfit = (at.weight_residual.norm() / self.gradient.norm()).item()
        explained = self._misfit(at, floor) < 4
        return Fit(at.objective, bias_misfit + weight_misfit, at.probabilities.sum(dim=0), explained)

    def _floor(self) -> tuple[float, float]:
        """Standard deviations of noise and rounding in the gradients of bias and weights.

        The client's probabilities are rounded, those of a fit are not: their errors reach the gradient of the weights
        through the inputs.
        """
        rounding = ROUNDING * float(self.head.bias_gradient.abs().max())
        through_inputs = rounding * self.head.input_norm
        return max(self.head.bias_noise, 3 * rounding), max(self.head.weight_noise, through_inputs)

    def _at(self, inputs: Tensor, targets: Tensor, precision: Tensor, noise: Tensor) -> _Point:
        n = len(inputs)
        probabilities = torch.softmax(inputs @ self.weight.T + self.head.bias, dim=1)
        errors = probabilities - targets
        bias_residual = errors.mean(dim=0) - self.head.bias_gradient
        weight_residual = errors.T @ inputs / n - self.gradient
        negative = (inputs @ self.basis.T).clamp(max=0)
        objective = (
            (bias_residual / noise[0]).square().sum()
            + (weight_residual / noise[1]).square().sum()
            + (inputs * (precision @ inputs)).sum()
            + self.penalty * negative.square().sum()
        ).item()
        return _Point(inputs, probabilities, errors, bias_residual, weight_residual, negative, objective)

    def _system(self, at: _Point, precision: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Gauss-Newton matrix `(n q, n q)` and half the gradient `(n, q)` of the objective.

        The Jacobian of example i with respect to coordinate a of its input is D_ia for the bias and
        D_ia h_i^T + r_i e_a^T for the weights, with D_i = (diag p_i - p_i p_i^T) W and r_i = p_i - e_{y_i}; its inner
        products are sums of the products below, and the Jacobian itself is never formed.
        """
        h, p, r = at.inputs, at.probabilities, at.errors
        n, q = h.shape
        d = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) @ self.weight
        flat = d.transpose(0, 1).reshape(-1, n * q)
        dd = (flat.T @ flat).reshape(n, q, n, q)
        dr = torch.einsum("ika,jk->iaj", d, r)[:, :, :, None] * h[:, None, None, :]
        same = torch.eye(q, dtype=h.dtype)
        weights = dd * (h @ h.T)[:, None, :, None] + dr + dr.permute(2, 3, 0, 1)
        weights = weights + (r @ r.T)[:, None, :, None] * same[None, :, None, :]
        matrix = (weights / noise[1] ** 2 + dd / noise[0] ** 2) / n**2
        matrix = matrix + precision[:, None, :, None] * same[None, :, None, :]
        weight_pull, bias_pull = at.weight_residual / noise[1] ** 2 / n, at.bias_residual / noise[0] ** 2 / n
        slope = torch.einsum("ika,ik->ia", d, bias_pull + h @ weight_pull.T) + r @ weight_pull + precision @ h
        if self.penalty:
            slope = slope + self.penalty * at.negative @ self.basis
            for i in range(n):
                violated = self.basis[at.negative[i] < 0]
                matrix[i, :, i, :] += self.penalty * violated.T @ violated
        return matrix.reshape(n * q, n * q), slope

    def _misfit(self, at: _Point, noise: Tensor) -> float:
        """Mean square of the residual over the noise; about 1 or less for a complete fit."""
        k, q = self.gradient.shape
        square: Tensor = (at.bias_residual / noise[0]).square().sum() + (at.weight_residual / noise[1]).square().sum()
        return float(square) / int((k - 1) * (q + 1))


def _damped_solution(matrix: Tensor, slope: Tensor, damping: float) -> Tensor:
    """Solution of the damped system; zero if it is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(matrix + damping * matrix.diagonal().diag())
    if failed:
        return torch.zeros_like(slope)
    solution: Tensor = torch.cholesky_solve(slope.reshape(-1, 1), factor).reshape(slope.shape)
    return solution


def prior_guess(targets: Tensor, gradient: Tensor, seed: int) -> Tensor:
    """Mean of the inputs `(n, d)` given the weights' gradient `(k, d)` and random probabilities that favor the labels.

    Random, because examples of a class with equal starts stay equal, and different starts reach different minima.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(targets.shape, generator=generator, dtype=targets.dtype) + targets
    errors = torch.softmax(2 * logits, dim=1) - targets
    reached = _covariance(targets) @ errors
    inputs: Tensor = reached @ torch.linalg.pinv(errors.T @ reached, rtol=1e-6, hermitian=True)
    return inputs @ (len(targets) * gradient)


def _covariance(targets: Tensor) -> Tensor:
    """Prior covariance `(n, n)` of one coordinate of the inputs."""
    within: Tensor = WITHIN * torch.eye(len(targets), dtype=targets.dtype)
    return SHARED + BETWEEN * targets @ targets.T + within
