"""Completion of a matrix of known rank from some of its entries.

Pruning and dropping hide entries of a gradient matrix and leave its rank as it was. With more known entries than a
matrix of this rank has degrees of freedom, the hidden ones follow from the others.

1. Rows and columns with too few known entries are set aside, and those columns are taken first in which most entries
   are known: a core that determines the rows' factor.
2. The rank is raised step by step on the core, by alternating least squares from the leading singular vectors of the
   residual. At full rank Gauss-Newton steps follow, in which the columns' factor is eliminated and conjugate gradients
   solve for that of the rows (variable projection, [Okatani2007]).
3. Every other column is one least-squares problem. Its normal matrix gives the expected error: columns that are not
   determined are set aside.

A share of the known entries is left out of all fits and has to be predicted by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.solving import least_squares

#: Share of the known entries that is left out of the fit to check it.
HELD_OUT = 0.02
#: Largest relative misfit of the fitted entries: rounding of single precision is 1e-7, of a wrong completion 1e-3.
MISFIT = 1e-6
#: Largest relative misfit of the entries that were left out, which also have the errors of the factors.
PREDICTED = 1e-5
#: Largest expected error of a column's coefficients, relative to those of a typical column.
DETERMINED = 1e-5
#: Known entries of every row and column of the core, as multiples of the rank, in the order in which they are tried.
_CORES = (2.0, 1.5, 1.25)
#: Known entries per degree of freedom below which a completion is not tried.
_LEAST = 1.1
#: Rows and columns for which normal matrices are held at a time.
_CHUNK = 512
#: Random probes of the factors' response to rounding.
_PROBES = 2
#: Known entries per degree of freedom at which no further columns are added to the core, and sweeps of alternating
#: least squares at every rank, in the order in which they are tried: the first is several times as fast.
_ATTEMPTS = ((1.6, 3), (3.0, 8))
#: Relative rounding error of single precision.
_ROUNDING = 3e-8
#: Ridge on normal matrices, relative to the mean of the diagonal.
_RIDGES = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True)
class CompletedMatrix:
    """The row space of a completed matrix.

    Attributes:
        basis: `(columns, rank)`, orthonormal on the known columns and zero on the others.
        known: `(columns,)` bool, columns that are determined.
        observed: share of the matrix that is observed, apart from rows and columns without any entry.
        errors: `(columns,)`, expected relative error of each column; infinite where it is not determined.
        misfit: relative, of the entries that were fitted.
        predicted: relative misfit of the entries that were left out.
        gap: smallest singular value over the expected error of the matrix.
    """

    basis: Tensor
    known: Tensor
    observed: float
    errors: Tensor
    misfit: float
    predicted: float
    gap: float


class _Problem:
    """Observed entries: values, zero where hidden, and weights of one and zero, both `(rows, columns)`."""

    def __init__(self, values: Tensor, mask: Tensor) -> None:
        self.mask = mask
        self.values, self.weights = torch.where(mask, values, 0.0), mask.to(values.dtype)

    def single(self) -> _Problem:
        """The same in single precision, values of mean square 1."""
        size = self.values.square().sum().div(self.weights.sum().clamp_min(1)).sqrt().clamp_min(1e-300)
        return _Problem((self.values / size).float(), self.mask)

    def residual(self, left: Tensor, right: Tensor) -> Tensor:
        """Of a product of factors, zero where hidden."""
        return self.values - self.weights * (left @ right.T)

    def misfit(self, left: Tensor, right: Tensor) -> float:
        """Relative norm of the residual."""
        return float(self.residual(left, right).norm() / self.values.norm())


def complete(values: Tensor, observed: Tensor, rank: int, seed: int = 0) -> CompletedMatrix | str:
    """The row space of a matrix of known rank, or why it cannot be completed.

    Args:
        values: `(rows, columns)`, float64; ignored where not observed.
        observed: `(rows, columns)` bool.
        rank: of the matrix.
        seed: of the entries that are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    left_out = observed & (torch.rand(observed.shape, generator=generator) < HELD_OUT)
    mask = observed & ~left_out
    for enough, sweeps in _ATTEMPTS:
        core = _core(mask, rank, enough)
        if isinstance(core, str):
            return core
        rows, columns = core
        problem = _Problem(values[rows][:, columns], mask[rows][:, columns])
        left, right, misfit = _refined(problem, _raised(problem, rank, seed, sweeps))
        if misfit < MISFIT:
            break
    else:
        return f"no matrix of rank {rank} has its entries (relative misfit {misfit:.1g})"
    typical = values[observed].square().mean().sqrt()
    joint = _joint_errors(problem, left, right, _ROUNDING * float(typical), seed)
    kept = joint[0] < DETERMINED
    if int(kept.sum()) <= rank:
        return f"only {int(kept.sum())} rows are determined, {rank + 1} are needed"
    rows = rows.clone()
    rows[rows.clone()] = kept
    left = torch.linalg.qr(left[kept])[0]
    # every column from the rows of the core, then every row from these columns, then again every column
    known_rows, factor = rows, left
    for _ in range(2):
        fit = _solved(values[known_rows].T, mask[known_rows].T, factor)
        known = fit.errors < DETERMINED
        if int(known.sum()) <= rank:
            return f"only {int(known.sum())} columns are determined, {rank + 1} are needed"
        basis = torch.linalg.qr(fit.factor[known])[0]
        across = _solved(values[:, known], mask[:, known], basis)
        if int((across.errors < DETERMINED).sum()) <= int(known_rows.sum()):
            break
        known_rows = across.errors < DETERMINED
        factor = torch.linalg.qr(across.factor[known_rows])[0]
    checked = left_out & known_rows[:, None] & known
    told = (across.factor @ basis.T)[checked[:, known]]
    predicted = float((told - values[checked]).norm() / values[checked].norm())
    if not predicted < PREDICTED:
        return f"entries that were left out are not predicted (relative misfit {predicted:.1g})"
    full = values.new_zeros(values.shape[1], rank)
    full[known] = basis
    singular = torch.linalg.svdvals(fit.factor[known])
    size = fit.factor[known].norm() / known.sum() ** 0.5
    gap = float(singular[-1] / (fit.errors[known].norm() * size))
    share = float(observed[observed.any(1)][:, observed.any(0)].double().mean())
    return CompletedMatrix(full, known, share, torch.where(known, fit.errors, torch.inf), misfit, predicted, gap)


def degrees(rows: int, columns: int, rank: int) -> int:
    """Degrees of freedom of a matrix of this rank."""
    return rank * (rows + columns - rank)


def _core(mask: Tensor, rank: int, enough: float) -> tuple[Tensor, Tensor] | str:
    """Rows and columns, both bool, of the part to be completed first, or what is missing.

    `enough`: known entries per degree of freedom at which no further columns are added.
    """
    best, chosen, missing = _LEAST, None, ""
    for factor in _CORES:
        need = int(factor * rank) + 4
        rows, columns = _peeled(mask, need)
        if int(rows.sum()) < rank or int(columns.sum()) < rank:
            missing = missing or f"no {rank} rows and columns keep {need} entries each"
            continue
        counts = (mask & rows[:, None]).sum(0) * columns
        order = counts.argsort(descending=True, stable=True)[: int(columns.sum())]
        width = int(rows.sum())
        while best < enough:
            part = torch.zeros_like(columns)
            part[order[:width]] = True
            r, c = _peeled(mask & part, need)
            entries, unknowns = int(mask[r][:, c].sum()), degrees(int(r.sum()), int(c.sum()), rank)
            if int(r.sum()) >= rank and int(c.sum()) >= rank:
                missing = f"{entries} entries are kept, {int(_LEAST * unknowns) + 1} are needed for rank {rank}"
                if entries > best * unknowns:
                    best, chosen = entries / unknowns, (r, c)
            if width >= len(order):
                break
            width = int(1.5 * width)
    return chosen if chosen is not None else f"too little is left: {missing}"


def _peeled(mask: Tensor, need: int) -> tuple[Tensor, Tensor]:
    """Rows and columns that keep `need` entries among each other."""
    rows, columns = mask.any(1), mask.any(0)
    while True:
        r = (mask & columns).sum(1) >= need
        c = (mask & r[:, None]).sum(0) >= need
        if torch.equal(r, rows) and torch.equal(c, columns):
            return rows, columns
        rows, columns = r, c


def _raised(problem: _Problem, rank: int, seed: int, sweeps: int, steps: int = 8) -> Tensor:
    """A factor `(rows, rank)` by alternating least squares in single precision, the rank raised in steps."""
    generator = torch.Generator().manual_seed(seed)
    problem = problem.single()
    rows, columns = problem.values.shape
    left, right = problem.values.new_zeros(rows, 0), problem.values.new_zeros(columns, 0)
    while right.shape[1] < rank:
        add = min(max(1, rank // steps), rank - right.shape[1])
        right = torch.cat([right, _leading(problem.residual(left, right), add, generator)], 1)
        for _ in range(sweeps):
            left = torch.linalg.qr(_half(problem.values, problem.weights, torch.linalg.qr(right)[0]))[0]
            right = _half(problem.values.T, problem.weights.T, left)
    exact: Tensor = torch.linalg.qr(left.double())[0]
    return exact


def _leading(matrix: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """About the `k` leading right singular vectors."""
    block = torch.randn(matrix.shape[1], k + 4, generator=generator, dtype=matrix.dtype)
    for _ in range(4):
        block = torch.linalg.qr(matrix.T @ (matrix @ block))[0]
    leading: Tensor = block @ torch.linalg.svd(matrix @ block, full_matrices=False)[2][:k].T
    return leading


def _normals(weights: Tensor, factor: Tensor) -> Iterator[Tensor]:
    """Normal matrices `(chunk, r, r)` of rows with weights `(m, k)` on a factor `(k, r)`, chunk by chunk."""
    r = factor.shape[1]
    i, j = torch.triu_indices(r, r)
    products = factor[:, i] * factor[:, j]  # each matrix is symmetric: half the products
    for part in weights.split(_CHUNK):
        packed = part @ products
        normal = packed.new_empty(len(part), r, r)
        normal[:, i, j] = packed
        normal[:, j, i] = packed
        yield normal


def _factored(normal: Tensor) -> Tensor:
    """Cholesky factors with a ridge at the level of rounding."""
    size = normal.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(normal.dtype).tiny)
    ridge = (_RIDGES[normal.dtype] * size)[:, None, None] * torch.eye(normal.shape[1], dtype=normal.dtype)
    factor: Tensor = torch.linalg.cholesky(normal + ridge)
    return factor


def _half(values: Tensor, weights: Tensor, factor: Tensor) -> Tensor:
    """Least-squares coefficients `(m, r)` of rows `values` `(m, k)`, zero where hidden, on a factor `(k, r)`."""
    rights = (values @ factor).split(_CHUNK)
    pairs = zip(rights, _normals(weights, factor), strict=True)
    return torch.cat([torch.cholesky_solve(b[:, :, None], _factored(normal))[:, :, 0] for b, normal in pairs])


def _inverses(weights: Tensor, factor: Tensor) -> Tensor:
    return torch.cat([torch.cholesky_inverse(_factored(normal)) for normal in _normals(weights, factor)])


def _refined(problem: _Problem, left: Tensor, steps: int = 40) -> tuple[Tensor, Tensor, float]:
    """Both factors after Gauss-Newton steps, computed in single precision, until the misfit stops falling."""
    right = _half(problem.values.T, problem.weights.T, left)
    misfit, weights = problem.misfit(left, right), problem.weights.float()
    for _ in range(steps):
        residual, size = problem.residual(left, right), right.norm() / len(right) ** 0.5
        linearized = _Linearized(weights, left.float(), (right / size).float())
        step = linearized((residual / size).float(), 60, 1e-2)[0].double()
        size, before = 1.0, misfit
        while True:
            tried = torch.linalg.qr(left + size * step)[0]
            moved = _half(problem.values.T, problem.weights.T, tried)
            reached = problem.misfit(tried, moved)
            if reached < misfit or size < 0.1:
                break
            size /= 4
        if reached < misfit:
            left, right, misfit = tried, moved, reached
        if not reached < 0.9 * before:
            break
    return left, right, misfit


class _Linearized:
    """First-order changes of both factors that explain a residual.

    The change of `right` is eliminated; conjugate gradients solve for that of `left`, preconditioned with the normal
    matrices of the rows.
    """

    def __init__(self, weights: Tensor, left: Tensor, right: Tensor) -> None:
        self.weights, self.left, self.right = weights, left, right
        self.columns, self.rows = _inverses(weights.T, left), _inverses(weights, right)

    def __call__(self, residual: Tensor, most: int, tolerance: float) -> tuple[Tensor, Tensor]:
        """Changes `(rows, r)`, orthogonal to `left`, and `(columns, r)`."""
        own = self._answer(residual)
        wanted = (residual - self.weights * (self.left @ own.T)) @ self.right
        found, remaining = torch.zeros_like(wanted), wanted
        preconditioned = _times(self.rows, remaining)
        direction, product = preconditioned, (remaining * preconditioned).sum()
        first = product
        for _ in range(most):
            if not product > tolerance**2 * first:
                break
            moved = self.weights * (direction @ self.right.T)
            image = (moved - self.weights * (self.left @ self._answer(moved).T)) @ self.right
            curvature = (direction * image).sum()
            if not curvature > 0:
                break
            length = product / curvature
            found, remaining = found + length * direction, remaining - length * image
            preconditioned = _times(self.rows, remaining)
            product, previous = (remaining * preconditioned).sum(), product
            direction = preconditioned + product / previous * direction
        answer = self._answer(residual - self.weights * (found @ self.right.T))
        along = self.left.T @ found  # moves the basis, not the space
        return found - self.left @ along, answer + self.right @ along.T

    def _answer(self, residual: Tensor) -> Tensor:
        return _times(self.columns, residual.T @ self.left)


def _times(matrices: Tensor, rows: Tensor) -> Tensor:
    product: Tensor = (matrices @ rows[:, :, None])[:, :, 0]
    return product


def _joint_errors(problem: _Problem, left: Tensor, right: Tensor, rounding: float, seed: int) -> tuple[Tensor, Tensor]:
    """Expected errors of rows `(rows,)` and columns `(columns,)` of a core, relative to typical ones.

    The response of both factors to random rounding errors of all entries: a part of the matrix that its own entries
    leave open responds strongly, even if each of its rows and columns follows from the others.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = problem.weights
    respond = _Linearized(weights, left, right)
    rows, columns = left.new_zeros(len(left)), left.new_zeros(len(right))
    for _ in range(_PROBES):
        noise = weights * torch.randn(weights.shape, generator=generator, dtype=left.dtype)
        moved, answer = respond(rounding * noise, 300, 1e-3)
        turn = _common_turn(answer, right)
        rows = rows + (moved + left @ turn.T).square().sum(1)
        columns = columns + (answer - right @ turn).square().sum(1)
    usual = [factor.square().sum(1).mean() * _PROBES for factor in (left, right)]
    return (rows / usual[0]).sqrt(), (columns / usual[1]).sqrt()


def _common_turn(change: Tensor, factor: Tensor) -> Tensor:
    """The matrix T `(r, r)` such that most rows of `change` are close to those of `factor @ T`: a change of basis."""
    weights = factor.new_ones(len(factor), 1)
    for _ in range(20):
        scaled = weights * factor
        turn: Tensor = least_squares(scaled, weights * change)
        size = (change - factor @ turn).norm(dim=1, keepdim=True)
        # least sum of distances to the power 1/2: a few rows that move far do not count
        weights = (size + 1e-3 * size.median()).pow(-0.75)
        weights = weights / weights.max()
    return turn


@dataclass(frozen=True)
class _Fit:
    """Coefficients `(m, r)` of rows on a factor, and their expected errors `(m,)` relative to a typical row."""

    factor: Tensor
    errors: Tensor


def _solved(values: Tensor, mask: Tensor, factor: Tensor) -> _Fit:
    """Every row of `values` `(m, k)` from its observed entries and an orthonormal factor `(k, r)`."""
    r = factor.shape[1]
    coefficients, spread, squares, freedom = [], [], values.new_zeros(()), 0
    observed = mask.to(values.dtype)
    chunks = zip(
        values.split(_CHUNK), mask.split(_CHUNK), observed.split(_CHUNK), _normals(observed, factor), strict=True
    )
    for v, m, weights, normal in chunks:
        lowest = torch.linalg.eigvalsh(normal)
        enough = (m.sum(1) > r) & (lowest[:, 0] > 1e-9)
        solved = values.new_zeros(len(v), r)
        inner = _factored(normal[enough])
        right = (weights * torch.where(m, v, 0.0)) @ factor
        solved[enough] = torch.cholesky_solve(right[enough][:, :, None], inner)[:, :, 0]
        residual = weights * (torch.where(m, v, 0.0) - solved @ factor.T)
        coefficients.append(solved)
        spread.append(torch.where(enough, (1 / lowest.clamp_min(1e-300)).sum(1).sqrt(), torch.inf))
        sure = enough & (m.sum(1) > 2 * r)
        squares = squares + residual[sure].square().sum()
        freedom += int((m.sum(1) - r)[sure].sum())
    found, wide = torch.cat(coefficients), torch.cat(spread)
    typical = values[mask].square().mean().sqrt()
    rounding = torch.maximum((squares / max(freedom, 1)).sqrt(), _ROUNDING * typical)
    usual = found[wide < torch.inf].norm(dim=1).square().mean().sqrt()
    return _Fit(found, wide * rounding / usual)
