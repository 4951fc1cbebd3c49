"""Least squares that is the same in every run, leading eigenvectors, sums of squares, and L-BFGS step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


def least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """The shortest `x` that minimizes `|matrix x - target|`; NaN where `matrix` or `target` is not finite.

    The default driver of `torch.linalg.lstsq` on a CPU, gelsy, takes its first pivots from memory that nobody has set:
    the last digits differ from run to run. On a GPU, which has no other driver, `matrix` must have full rank.
    """
    if not matrix.is_cuda and not (matrix.isfinite().all() and target.isfinite().all()):
        shape = torch.broadcast_shapes(matrix.shape[:-2], target.shape[:-2])
        return target.new_full((*shape, matrix.shape[-1], target.shape[-1]), torch.nan)
    driver = "gels" if matrix.is_cuda else "gelsd"
    solution: Tensor = torch.linalg.lstsq(matrix, target, driver=driver).solution
    return solution


class Eigenspace(NamedTuple):
    """Largest eigenvalues `(k,)`, falling, eigenvectors as orthonormal rows `(k, d)`, and norms of their residuals.

    An eigenvalue is at least the value that is given, and near it up to the residual.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor


def leading_eigenspace(
    apply: Callable[[Tensor], Tensor],
    size: int,
    k: int,
    exact: int | None = None,
    least: float = 0.0,
    depth: int = 30,
    restarts: int = 6,
    seed: int = 0,
) -> Eigenspace:
    """The `k` largest eigenvalues of a positive semidefinite operator.

    Args:
        apply: the operator on rows `(b, d)`.
        size: `d`.
        k: number of eigenvalues.
        exact: number of the first eigenvectors that have to converge, to residual norms below 1e-10; default: all.
        least: stop once one of these eigenvalues is smaller, as far as residual and rise in the last step tell.
        depth: applications between two Rayleigh-Ritz steps; `depth * (k + 2)` rows are held.
        restarts: Rayleigh-Ritz steps at most.
        seed: of the first block.

    >>> values = torch.tensor([3.0, 3.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    >>> leading_eigenspace(lambda rows: rows * values, 5, 2).values.round(decimals=6)
    tensor([3., 3.], dtype=torch.float64)
    """
    width = min(k + 2, size)
    generator = torch.Generator().manual_seed(seed)
    block = _orthonormal(torch.randn(width, size, generator=generator, dtype=torch.float64))
    known = torch.full((width,), -torch.inf, dtype=torch.float64)
    for _ in range(restarts):
        basis, images = block, apply(block)
        newest = images
        for _ in range(depth - 1):
            newest = newest[: size - len(basis)]  # at most `size` directions
            for _ in range(2):  # twice, because of rounding
                newest = newest - (newest @ basis.T) @ basis
                _, lengths, newest = torch.linalg.svd(newest, full_matrices=False)
                newest = newest[lengths > 1e-10]  # the rest is rounding, the space is exhausted
            if len(newest) == 0:
                break
            basis = torch.cat([basis, newest])
            newest = apply(newest)
            images = torch.cat([images, newest])
        values, weights = torch.linalg.eigh((basis @ images.T + images @ basis.T) / 2)
        values, weights = values.flip(0)[:width], weights.flip(1)[:, :width]
        block, moved = weights.T @ basis, weights.T @ images
        residuals, risen = (moved - values[:, None] * block).norm(dim=1), values - known
        known, too_small = values, values + torch.maximum(residuals, risen) < least
        if float(residuals[: exact or k].max()) < 1e-10 or bool(too_small[: exact or k].any()):
            break
        block = _orthonormal(block)
    return Eigenspace(values[:k], block[:k], residuals[:k])


def _orthonormal(rows: Tensor) -> Tensor:
    columns: Tensor = torch.linalg.qr(rows.T)[0]
    return columns.T.contiguous()


#: Decrease that is asked of a step, relative to that by the slope; and limits of a shorter step, relative to the last.
_DECREASE, _SHORTER, _LESS_SHORT = 1e-4, 0.1, 0.5
#: Cosine of the angle between a step and the change of the gradient, below which it says nothing of the curvature.
_CURVED = 1e-10
#: Length of a step, relative to that of the variables, below which nothing changes.
_STILL = 1e-9
#: Length of the first step, relative to the root of the number of variables.
_FIRST = 0.003
#: Rows for steps and changes of the gradient that are there from the start; as many again whenever they are full.
_ROWS = 64


class StepwiseLBFGS:
    """L-BFGS in the compact form of [Byrd1994], with steps that are made shorter until the loss falls.

    After every evaluation at `variable` with its gradient, `told` moves it to where the next one is asked: several
    searches can be evaluated together, each at its own stage.

    Args:
        variable: that is moved.
        history: number of steps and changes of the gradient that are kept.
    """

    def __init__(self, variable: Tensor, history: int) -> None:
        self.variable, self.history = variable, history
        self.still = False
        like = variable.detach().flatten()
        self._best: tuple[float, Tensor, Tensor] | None = None  # loss, place and gradient
        rows = min(history, _ROWS)
        self._steps, self._changes = (like.new_zeros(rows, len(like)) for _ in range(2))
        self._products = like.new_zeros(rows, rows, dtype=torch.float64)
        self._kept, self._direction, self._length = 0, torch.zeros_like(like), 1.0

    def told(self, loss: float) -> None:
        """Move to the next place, given the loss at this one."""
        assert self.variable.grad is not None
        place, slope = (one.detach().flatten().clone() for one in (self.variable, self.variable.grad.detach()))
        if self._best is None:
            self._best = (loss, place, slope)
            self._turn(_FIRST * len(slope) ** 0.5)
        else:
            before, start, gradient = self._best
            expected = self._length * float(gradient @ self._direction)
            if loss <= before + _DECREASE * expected:
                self._learn(place - start, slope - gradient)
                self._best = (loss, place, slope)
                self._turn(1.0)
            else:
                excess = loss - before - expected  # above 0; not finite where the loss is not
                shorter = -expected / (2 * excess) if excess < float("inf") else 0.0
                self._length *= min(max(shorter, _SHORTER), _LESS_SHORT)
        _, start, _ = self._best
        step = self._length * self._direction
        self.still = bool(step.norm() <= _STILL * start.norm())
        with torch.no_grad():
            self.variable.copy_((start + step).view_as(self.variable))

    def _learn(self, step: Tensor, change: Tensor) -> None:
        if not float(step @ change) > _CURVED * float(step.norm() * change.norm()):
            return
        if self._kept == len(self._steps) < self.history:
            more = min(self._kept, self.history - self._kept)
            self._steps, self._changes = (pad(one, (0, 0, 0, more)) for one in (self._steps, self._changes))
            self._products = pad(self._products, (0, more, 0, more))
        if self._kept == self.history:
            for one in (self._steps, self._changes):
                one[:-1] = one[1:].clone()
            self._products[:-1, :-1] = self._products[1:, 1:].clone()
            self._kept -= 1
        last = self._kept
        self._steps[last], self._changes[last] = step, change
        self._kept += 1
        self._products[: self._kept, last] = (self._steps[: self._kept] @ change).double()

    def _turn(self, length: float) -> None:
        """The quasi-Newton direction at the best place; without history the gradient's, of this length."""
        assert self._best is not None
        slope, n = self._best[2], self._kept
        self._length = 1.0
        if not n:
            self._direction = -slope * (length / slope.norm().clamp_min(torch.finfo(slope.dtype).tiny))
            return
        steps, changes, upper = self._steps[:n], self._changes[:n], self._products[:n, :n].triu()
        own = upper.diagonal()
        scale = float(own[-1]) / float(changes[-1].square().sum())
        left, right = (steps @ slope).double(), scale * (changes @ slope).double()
        solved = torch.linalg.solve_triangular(upper, left[:, None], upper=True)[:, 0]
        back = solved.to(changes) @ changes
        inner = own * solved + scale * (changes @ back).double() - right
        first = torch.linalg.solve_triangular(upper.T, inner[:, None], upper=False)[:, 0]
        self._direction = -(scale * slope + first.to(steps) @ steps - scale * back)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the variable."""
        return {name: value for name, value in vars(self).items() if name not in ("variable", "history")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for name, value in state.items():
            setattr(self, name, value)


#: Values whose squares are added in single precision, and number of such pieces from which on this is done.
_PIECE, _MANY = 128, 1000


def sum_of_squares(values: Tensor) -> Tensor:
    """In double precision; of many values the norms of short pieces are not, whose rounding averages out."""
    if values.numel() < _MANY * _PIECE:
        return values.square().sum(dtype=torch.float64)
    whole, rest = values.flatten().split([values.numel() // _PIECE * _PIECE, values.numel() % _PIECE])
    norms = torch.linalg.vector_norm(whole.view(-1, _PIECE), dim=1)
    total: Tensor = norms.double().square().sum() + rest.double().square().sum()
    return total
