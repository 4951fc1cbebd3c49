"""Equations for features and loss derivatives: the gradients of head and layer as a least-squares problem.

Unknowns are the features' coordinates `c_i` in a known basis (`(n, r)`) and the loss derivatives `delta_i` with respect
to the logits (`(n, k)`). With `u_j` the projected weights of neuron j, `z_ij = c_i . u_j + b_j` and
`beta_ij = delta_i . A_j`, the gradients of head, layer and its bias are

    G_A[:, j] = sum_i delta_i s(z_ij)    P_j = sum_i beta_ij s'(z_ij) c_i    g_j = sum_i beta_ij s'(z_ij)

The certificate is the sum of their relative residuals; it does not use the true features. Where there are many more
equations than unknowns, only the true features (in any order) make it vanish. Where most entries are hidden there may
be fewer, which many features solve: see `MaskedEquations.too_few`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import Activation
from lit_recon.attacks.updates.features.layer import GradientNoise, LayerGradient
from lit_recon.solving import least_squares


class NormalSystem(NamedTuple):
    """Gauss-Newton `matrix` and half gradient `slope` of an `objective`, unknowns ordered `(c, delta)` by example."""

    matrix: Tensor
    slope: Tensor
    objective: float


@dataclass(frozen=True)
class _Neurons:
    """Neurons `(n, m)` at a point: activation, slope, curvature and beta; residuals on observed entries."""

    value: Tensor
    slope: Tensor
    curvature: Tensor
    beta: Tensor
    head_residual: Tensor
    weight_residual: Tensor


@dataclass(frozen=True)
class FeatureEquations:
    """The least-squares problem in a basis of `r` directions.

    Attributes:
        directions, bias: `(m, r)`, `(m,)`: weights in the basis, and biases.
        head, head_gradient: `(k, m)`: A, and its gradient.
        gradient: `(m, r + 1)`: the layer's gradient in the basis, and that of its bias.
        head_mask: `(k, m)` 1 where the head's gradient was observed; None: everywhere.
        rows: `(m,)` weights of the neurons' squared residuals in the layer's gradient, in [0, 1].
        bias_known: whether the last column of `gradient` is used.
        combinations: `(q, k)`: combinations of classes that replace classes; None: classes themselves.
        sides: `(n, m)` 0 or 1: a ReLU is replaced by multiplication with these; None: not replaced.
        scales: divisors of the squared residuals of head and layer; None: the squared norms of the observed gradients.
    """

    directions: Tensor
    bias: Tensor
    head: Tensor
    head_gradient: Tensor
    gradient: Tensor
    activation: Activation
    head_mask: Tensor | None
    rows: Tensor
    bias_known: bool
    combinations: Tensor | None = None
    sides: Tensor | None = None
    scales: tuple[float, float] | None = None

    @staticmethod
    def of(
        seen: LayerGradient,
        basis: Tensor,
        projected: Tensor | None = None,
        head_mask: Tensor | None = None,
        rows: Tensor | None = None,
        noise: GradientNoise | None = None,
    ) -> FeatureEquations:
        """Equations in an orthonormal basis `(d, r)` of the span of the features.

        `projected` `(m, r)` is the layer's gradient in the basis, by default by projection; of its rows only `rows`
        `(m,)` are known, and bias gradients are used if these are None. `head_mask` `(k, m)` are the observed entries
        of the head's gradient. Residuals are weighted by the `noise`.
        """
        if projected is None:
            projected = seen.weight_gradient @ basis
        equations = FeatureEquations(
            directions=seen.weight @ basis,
            bias=seen.bias,
            head=seen.head_weight,
            head_gradient=seen.head_gradient,
            gradient=torch.cat([projected, seen.bias_gradient[:, None]], dim=1),
            activation=seen.activation,
            head_mask=None if head_mask is None else head_mask.to(basis.dtype),
            rows=torch.ones_like(seen.bias) if rows is None else rows.to(basis.dtype),
            bias_known=rows is None and bool(seen.bias_gradient.any()),
            scales=None if noise is None else noise.scales(seen),
        )
        if head_mask is not None or equations.n_classes <= seen.n_examples or not seen.has_head:
            return equations
        # deltas lie in the range of the head's gradient: fewer combinations than classes save time and reduce noise
        ranges = torch.linalg.svd(seen.head_gradient, full_matrices=False).U[:, : seen.n_examples].T
        head, head_gradient = ranges @ seen.head_weight, ranges @ seen.head_gradient
        return replace(equations, head=head, head_gradient=head_gradient, combinations=ranges)

    @property
    def n_classes(self) -> int:
        """Length of a `delta`."""
        return len(self.head)

    def normal_system(self, features: Tensor, deltas: Tensor, weighted: bool = True) -> NormalSystem:
        """Gauss-Newton system at features `(n, r)` and deltas `(n, k)`, of head and, if `weighted`, layer."""
        n, r = features.shape
        k = self.n_classes
        at = self._at(features, deltas)
        cc, cd = features.new_zeros(n, r, n, r), features.new_zeros(n, r, n, k)
        dd = features.new_zeros(n, k, n, k)
        slope = [torch.zeros_like(features), torch.zeros_like(deltas)]
        objective = 0.0
        head_square, weight_square = self._scales()
        if head_square > 0:
            self._add_head(cc, cd, dd, at, deltas, 1 / head_square)
            inner = (deltas @ at.head_residual) * at.slope / head_square
            slope[0] += inner @ self.directions
            slope[1] += at.value @ at.head_residual.T / head_square
            objective += float(at.head_residual.square().sum()) / head_square
        if weight_square > 0 and (weighted or head_square == 0):
            self._add_weight(cc, cd, dd, at, features, 1 / weight_square)
            residual = at.weight_residual * self.rows[:, None] / weight_square
            pulled = self._extended(features) @ residual.T
            slope[0] += (pulled * at.beta * at.curvature) @ self.directions + (at.beta * at.slope) @ residual[:, :r]
            slope[1] += (pulled * at.slope) @ self.head.T
            objective += float((residual * at.weight_residual).sum())
        top = torch.cat([cc.reshape(n * r, n * r), cd.reshape(n * r, n * k)], dim=1)
        bottom = torch.cat([cd.reshape(n * r, n * k).T, dd.reshape(n * k, n * k)], dim=1)
        return NormalSystem(torch.cat([top, bottom]), torch.cat([part.reshape(-1) for part in slope]), objective)

    def best_deltas(self, features: Tensor) -> tuple[Tensor, float]:
        """Best-fitting deltas `(n, k)` for given features (a linear problem), and the objective there."""
        n, r = features.shape
        system = self.normal_system(features, features.new_zeros(n, self.n_classes))
        block = system.matrix[n * r :, n * r :]
        ridge = 1e-14 * block.diagonal().mean() * torch.eye(len(block), dtype=block.dtype)
        wanted = -system.slope[n * r :]
        solution = least_squares(block + ridge, wanted[:, None])[:, 0]
        return solution.reshape(n, self.n_classes), system.objective - float(wanted @ solution)

    def objective(self, features: Tensor, deltas: Tensor, weighted: bool = True) -> float:
        """The objective of `normal_system`: squared relative residuals of head and, if `weighted`, layer."""
        head, weight = self.residuals(features, deltas)
        return head**2 + (weight**2 if weighted or not self.head_gradient.any() else 0.0)

    def residuals(self, features: Tensor, deltas: Tensor) -> tuple[float, float]:
        """Relative residuals of head and layer, 0 up to rounding at the truth and where no gradient was released."""
        at = self._at(features, deltas)
        head_square, weight_square = self._scales()
        head = float(at.head_residual.square().sum()) / head_square if head_square else 0.0
        weight = float(at.weight_residual.square().sum(dim=1) @ self.rows) / weight_square if weight_square else 0.0
        return head**0.5, weight**0.5

    def by_class(self, deltas: Tensor) -> Tensor:
        """Deltas with respect to the logits `(n, classes)` from those in this problem's combinations."""
        return deltas if self.combinations is None else deltas @ self.combinations

    def with_fixed_sides(self, features: Tensor, trust: Tensor) -> FeatureEquations:
        """The equations with the active set of the ReLU fixed at `features`; `trust` `(m,)` weights the neurons."""
        sides = self.activation.slope(features @ self.directions.T + self.bias)
        return replace(self, sides=sides, rows=self.rows * trust)

    def weight_errors(self, features: Tensor, deltas: Tensor) -> Tensor:
        """Norm of every neuron's residual in the layer's gradient, `(m,)`."""
        errors: Tensor = self._at(features, deltas).weight_residual.norm(dim=1)
        return errors

    def _scales(self) -> tuple[float, float]:
        """Divisors of the squared residuals of head and layer."""
        if self.scales is not None:
            return self.scales
        head = self.head_gradient if self.head_mask is None else self.head_gradient * self.head_mask
        gradient = self.gradient if self.bias_known else self.gradient[:, :-1]
        return float(head.square().sum()), float(gradient.square().sum(dim=1) @ self.rows)

    def _extended(self, features: Tensor) -> Tensor:
        """Coordinates, and the constant input of the bias if its gradient is used."""
        last = features.new_full((len(features), 1), float(self.bias_known))
        return torch.cat([features, last], dim=1)

    def _at(self, features: Tensor, deltas: Tensor) -> _Neurons:
        z = features @ self.directions.T + self.bias
        if self.sides is None:
            of = self.activation
            value, slope, curvature = of.value(z), of.slope(z), of.curvature(z)
        else:
            value, slope, curvature = self.sides * z, self.sides, torch.zeros_like(z)
        beta = deltas @ self.head
        head_residual = deltas.T @ value - self.head_gradient
        if self.head_mask is not None:
            head_residual = head_residual * self.head_mask
        weight_residual = (beta * slope).T @ self._extended(features) - self.gradient
        weight_residual[:, -1] *= self.bias_known
        return _Neurons(value, slope, curvature, beta, head_residual, weight_residual)

    def _add_head(self, cc: Tensor, cd: Tensor, dd: Tensor, at: _Neurons, deltas: Tensor, scale: float) -> None:
        """Blocks of the head's term; d G_A[c, j] / d c_i = delta_ic s'_ij u_j, d / d delta_ic = s_ij."""
        n, r = cc.shape[:2]
        k = self.n_classes
        u, mask = self.directions, self.head_mask
        slopes, mixed, values = _pairs(at.slope, at.slope), _pairs(at.slope, at.value), _pairs(at.value, at.value)
        if mask is None:
            outer = (slopes @ _outer(u, u)).reshape(n, n, r, r) * (deltas @ deltas.T)[:, :, None, None]
            cross = (mixed @ u).reshape(n, n, r, 1) * deltas[:, None, None, :]
            squares = values.sum(dim=1).reshape(n, n, 1).expand(n, n, k)
        else:
            seen = _pairs(deltas, deltas) @ mask
            outer = ((slopes * seen) @ _outer(u, u)).reshape(n, n, r, r)
            cross = (mixed @ _outer(u, mask.T)).reshape(n, n, r, k) * deltas[:, None, None, :]
            squares = (values @ mask.T).reshape(n, n, k)
        cc += scale * outer.permute(0, 2, 1, 3)
        cd += scale * cross.permute(0, 2, 1, 3)
        dd.diagonal(dim1=1, dim2=3).add_(scale * squares)

    def _add_weight(self, cc: Tensor, cd: Tensor, dd: Tensor, at: _Neurons, features: Tensor, scale: float) -> None:
        """Blocks of the layer's term, with t = beta s'' and v = beta s'.

        d P_jp / d c_il = t_ij u_jl c_ip + v_ij [p = l]        d P_jp / d delta_ic = A_cj s'_ij c_ip
        """
        n, r = features.shape
        k = self.n_classes
        u, a, rows = self.directions, self.head, self.rows
        t, v = at.beta * at.curvature, at.beta * at.slope
        extended = self._extended(features)
        gram = extended @ extended.T
        slopes = at.slope * rows
        cc += scale * torch.eye(r, dtype=u.dtype)[None, :, None, :] * (v * rows @ v.T)[:, None, :, None]
        along = (_pairs(v, slopes) @ a.T).reshape(n, n, k)
        cd += scale * (along[:, :, None, :] * features[None, :, :, None]).permute(0, 2, 1, 3)
        if t.any():
            curved = (_pairs(t, t * rows) @ _outer(u, u)).reshape(n, n, r, r) * gram[:, :, None, None]
            bent = (_pairs(t, v * rows) @ u).reshape(n, n, r)[:, :, :, None] * features[:, None, None, :]
            cc += scale * (curved + bent + bent.permute(1, 0, 3, 2)).permute(0, 2, 1, 3)
            cross = (_pairs(t, slopes) @ _outer(u, a.T)).reshape(n, n, r, k) * gram[:, :, None, None]
            cd += scale * cross.permute(0, 2, 1, 3)
        squares = (_pairs(at.slope, slopes) @ _outer(a.T, a.T)).reshape(n, n, k, k) * gram[:, :, None, None]
        dd += scale * squares.permute(0, 2, 1, 3)


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    """Products of every row of one with every row of the other, `(n * n, m)`."""
    return (left[:, None, :] * right[None, :, :]).reshape(-1, left.shape[1])


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Outer product per neuron, `(m, p * q)`."""
    return (left[:, :, None] * right[:, None, :]).reshape(len(left), -1)
