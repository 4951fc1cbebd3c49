"""Systems of a Gaussian kernel and a ridge, solved block by block within a bound on memory.

The kernel matrix is symmetric: the square blocks of its lower triangle suffice. `BlockCholesky` factors them in place,
which is exact and takes half the memory of the matrix. `ConjugateGradients` keeps as many of the float32 products of
directions as memory allows, computes the others anew in every step, and stops at a stated residual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.released.base import Announce, silently
from lit_recon.attacks.released.gaussian_kernel import CHUNK, GaussianKernel
from lit_recon.errors import ConfigError, ShapeError

#: Bytes that are counted for buffers of the matrix libraries.
_BUFFERS = 1 << 24
#: Fewest right-hand sides that are solved for at a time, if there are so many.
_FEWEST = 32
#: Arrays `(k, columns)` float64 that are held: by the kernel of released models and its forward substitution, and by
#: conjugate gradients.
_DIRECT_ARRAYS, _ITERATIVE_ARRAYS = 3, 7
#: Rounding of float32, in which products of directions are.
_ROUNDING = torch.finfo(torch.float32).eps
#: Avoids a division by zero.
_TINY = torch.finfo(torch.float64).tiny


class Layout(NamedTuple):
    """How a system is solved, and the memory that this takes."""

    direct: bool  # whether by a Cholesky factorization, else by conjugate gradients
    columns: int  # right-hand sides, or released models, at a time
    kept: int  # blocks whose products stay in memory for conjugate gradients
    n_bytes: int  # beside differences and images

    @property
    def gib(self) -> str:
        """The memory in GiB."""
        return gib(self.n_bytes)


@dataclass(frozen=True)
class BlockSolver:
    """Solves the systems of kernel ridge regression within a bound on memory.

    A Cholesky factorization takes about `4 k^2` bytes for `k` shadow models and is exact. Where that is more than the
    bound, conjugate gradients with a Nyström preconditioner take its place.

    Args:
        memory_gib: most memory, beside differences and images, in GiB.
        block: rows of a block of the kernel matrix; at most so many shadow models are solved in one.
        centers: evenly spaced shadow models whose columns of the kernel make the preconditioner.
        tolerance: largest norm of the residual of conjugate gradients, relative to that of the right-hand side.
        max_steps: most steps of conjugate gradients.

    Source: [Rudi2017] for the preconditioner from columns of the kernel, [Frangella2023] for its use with all models.
    """

    memory_gib: float = 8.0
    block: int = 2_048
    centers: int = 2_000
    tolerance: float = 1e-5
    max_steps: int = 500

    def __post_init__(self) -> None:
        if not (self.memory_gib > 0 and 0 < self.tolerance < 1):
            raise ConfigError(f"solver.memory_gib must be above 0 and solver.tolerance between 0 and 1; got {self}")
        if min(self.block, self.centers, self.max_steps) < 1:
            raise ConfigError(f"solver.block, solver.centers and solver.max_steps must be at least 1; got {self}")

    @property
    def n_bytes(self) -> int:
        """The bound."""
        return int(self.memory_gib * 2**30)

    def layout(self, k: int, p: int, d: int) -> Layout:
        """For `k` differences of `p` weights and `d` outputs; ConfigError where the bound is too low."""
        limit, size = self.n_bytes, min(self.block, k)
        n = -(-k // size)
        blocks, centers, fewest = n * (n + 1) // 2, min(self.centers, k), min(d, _FEWEST)
        # Outputs; directions of two blocks; a block's products, distances, and copies of them; a block's outputs; rows
        # on their way to unit length.
        fixed = 8 * k * d + 8 * size * p + 28 * size**2 + 16 * size * d + 32 * max(CHUNK, p) + _BUFFERS
        direct, a_column = fixed + 8 * blocks * size**2, 8 * k * _DIRECT_ARRAYS
        if direct + fewest * a_column <= limit:
            columns = min(d, (limit - direct) // a_column)
            return Layout(True, columns, 0, direct + columns * a_column)
        # Columns of the kernel, and the decomposition of the matrix between centers.
        iterative, a_column = fixed + 8 * k * centers + 48 * centers**2, 8 * k * _ITERATIVE_ARRAYS
        if iterative + fewest * a_column > limit:
            raise ConfigError(
                f"kernel ridge regression on {k} shadow models with {p} weights and {d} outputs takes at least "
                f"{gib(iterative + fewest * a_column)} GiB beside their differences; got "
                f"solver.memory_gib={self.memory_gib:g}: raise it, or lower split.shadow, solver.centers or "
                "solver.block"
            )
        # With all products in memory, steps on few columns at a time take no longer; else, each computes them anew.
        left, products = limit - iterative, 4 * size**2
        columns = min(d, max(left - blocks * products, 0) // a_column)
        if columns < fewest:
            columns = min(d, left // a_column)
        kept = min(blocks, (left - columns * a_column) // products)
        return Layout(False, columns, kept, iterative + columns * a_column + kept * products)

    def system(
        self, differences: Tensor, bandwidth: float, ridge: float, d: int, announce: Announce = silently
    ) -> KernelSystem:
        """The kernel of differences `(k, p)` plus the ridge, to be solved for `d` outputs within `layout`'s memory.

        The bandwidth is in units of the mean squared distance. The differences are not copied, and must not change.
        Raises ConfigError as `layout`, and ShapeError for a difference that is zero or not finite, or a kernel that is
        not positive definite.
        """
        layout = self.layout(len(differences), differences.shape[1], d)
        kernel = GaussianKernel(differences, self.block, layout.kept)
        announce = announce if len(kernel.parts) > 1 else silently
        if layout.direct:
            return BlockCholesky(kernel, bandwidth, ridge, layout, announce)
        return ConjugateGradients(kernel, bandwidth, ridge, layout, self, announce)


class KernelSystem(ABC):
    """A kernel matrix plus a ridge on its diagonal, which takes no more memory than `layout` says."""

    def __init__(self, kernel: GaussianKernel, ridge: float, layout: Layout) -> None:
        self.kernel, self.ridge, self.layout = kernel, ridge, layout
        self.note, self.facts = "", dict[str, float]()  # how systems of many blocks were solved, and how exactly

    @abstractmethod
    def solve_(self, values: Tensor) -> Tensor:
        """Replace the columns of `(k, d)` float64 by the solutions."""

    @abstractmethod
    def explained(self, kernel: Tensor) -> Tensor:
        """For rows `a` of `(m, k)` and the matrix `A` of the system, `a A^-1 a^T`: `(m,)`."""

    def _label(self, how: str) -> str:
        return f"{how}, {len(self.kernel.differences)} models, up to {self.layout.gib} GiB"

    def _report(self, how: str, residual: float, **facts: float) -> None:
        self.facts = {"kernel_residual": residual, **facts}
        self.note = (
            f"Kernel ridge regression on {len(self.kernel.differences)} shadow models was solved by {how}, with at "
            f"most {self.layout.gib} GiB beside their differences; the largest relative residual is {residual:.0e}."
        )


class BlockCholesky(KernelSystem):
    """Solved by the Cholesky factor, whose blocks replace those of the matrix one by one."""

    def __init__(
        self, kernel: GaussianKernel, bandwidth: float, ridge: float, layout: Layout, announce: Announce = silently
    ) -> None:
        super().__init__(kernel, ridge, layout)
        n = len(kernel.parts)
        factor = kernel.spread(bandwidth, True, announce(n, self._label("distances for Cholesky"), "rows of blocks"))
        advance = announce(n, self._label("Cholesky factorization"), "rows of blocks")
        for i, row in enumerate(factor):
            for j, block in enumerate(row):
                block.div_(-kernel.scale).exp_()
                for known, across in zip(row[:j], factor[j][:j], strict=True):
                    block.addmm_(known, across.T, alpha=-1)
                if i != j:
                    block.copy_(torch.linalg.solve_triangular(factor[j][j].T, block, upper=True, left=False))
            root = cholesky(row[i], ridge)
            if root is None:
                raise _singular(kernel, ridge)
            row[i] = root
            advance(1)
        self._factor = factor

    def solve_(self, values: Tensor) -> Tensor:
        if len(self.kernel.parts) == 1:
            return values.copy_(torch.cholesky_solve(values, self._factor[0][0]))
        rows = self.kernel.parts[-1]
        wanted = values[rows].clone()
        self._forward_(values)
        for i, part in reversed(list(enumerate(self.kernel.parts))):
            root = self._factor[i][i].T
            values[part] = torch.linalg.solve_triangular(root, values[part], upper=True)
            for j, block in enumerate(self._factor[i][:i]):
                values[self.kernel.parts[j]].addmm_(block.T, values[part], alpha=-1)
        # The rows of one part stand for all: they cost the products of that part anew.
        lengths = wanted.norm(dim=0).clamp(min=_TINY)
        left = wanted.add_(values[rows], alpha=-self.ridge)
        for j, block in self.kernel.blocks(len(self.kernel.parts) - 1):
            left.addmm_(block, values[self.kernel.parts[j]], alpha=-1)
        self._report("a Cholesky factorization in blocks", float((left.norm(dim=0) / lengths).max()))
        return values

    def explained(self, kernel: Tensor) -> Tensor:
        return self._forward_(kernel.clone().T).square_().sum(dim=0)

    def _forward_(self, values: Tensor) -> Tensor:
        """Multiply by the inverse of the factor."""
        for i, part in enumerate(self.kernel.parts):
            for j, block in enumerate(self._factor[i][:i]):
                values[part].addmm_(block, values[self.kernel.parts[j]], alpha=-1)
            values[part] = torch.linalg.solve_triangular(self._factor[i][i], values[part], upper=False)
        return values


class ConjugateGradients(KernelSystem):
    """Solved by conjugate gradients on all columns side by side, preconditioned by a Nyström approximation.

    With the columns `C` `(k, r)` of the kernel that belong to centers and the matrix `W` between these, the kernel is
    near `F F^T`, `F = C W^-1/2`; the preconditioner is the inverse of `F F^T + ridge I`.
    """

    def __init__(
        self,
        kernel: GaussianKernel,
        bandwidth: float,
        ridge: float,
        layout: Layout,
        solver: BlockSolver,
        announce: Announce = silently,
    ) -> None:
        super().__init__(kernel, ridge, layout)
        n, k = len(kernel.parts), len(kernel.differences)
        kernel.spread(bandwidth, False, announce(n, self._label("distances for conjugate gradients"), "rows of blocks"))
        self._solver, self._announce = solver, announce
        r = min(solver.centers, k)
        chosen = slice(0, k // r * r, k // r)
        columns = kernel.between(kernel.differences[chosen])
        between = columns[:, chosen]
        values, vectors = torch.linalg.eigh((between + between.T) / 2)
        # What is left of the other directions is rounding of the products.
        certain = values > _ROUNDING
        turn = (vectors[:, certain] / values[certain].sqrt()).T
        for part in kernel.parts:
            columns[: len(turn), part] = turn @ columns[:, part]
        self._nystrom = columns[: len(turn)]  # F^T
        root = cholesky(self._nystrom @ self._nystrom.T, ridge)
        if root is None:
            raise _singular(kernel, ridge)
        self._root = root

    def solve_(self, values: Tensor) -> Tensor:
        residual, steps = 0.0, 0
        advance = self._announce(values.shape[1], self._label("conjugate gradients"), "outputs")
        for some in values.split(self.layout.columns, dim=1):
            found, reached, taken = self._solve(some.contiguous())
            some.copy_(found)
            residual, steps = max(residual, reached), max(steps, taken)
            advance(some.shape[1])
        how = f"conjugate gradients in blocks and {steps} steps, {self.layout.kept} blocks in memory"
        self._report(how, residual, kernel_steps=float(steps))
        return values

    def explained(self, kernel: Tensor) -> Tensor:
        found = self._solve(kernel.T.contiguous())[0]
        return (kernel * found.T).sum(dim=1)

    def _solve(self, wanted: Tensor) -> tuple[Tensor, float, int]:
        """The solutions of columns `(k, c)`, their largest relative residual and the number of steps."""
        lengths = wanted.norm(dim=0).clamp(min=_TINY)
        found, left, steps = torch.zeros_like(wanted), wanted.clone(), 0
        reached = float((left.norm(dim=0) / lengths).max())
        # The residual that the steps keep up drifts from the true one, which alone is trusted.
        while not reached <= self._solver.tolerance:
            if steps == self._solver.max_steps:
                raise ConfigError(
                    f"conjugate gradients left a relative residual of {reached:.0e} after {steps} steps, above "
                    f"solver.tolerance={self._solver.tolerance:g}: raise solver.max_steps, solver.centers or ridges, "
                    "or solver.memory_gib for a Cholesky factorization"
                )
            steps += self._descend_(found, left, lengths, self._solver.max_steps - steps)
            left = self.kernel.times(found).add_(found, alpha=self.ridge).neg_().add_(wanted)
            reached = float((left.norm(dim=0) / lengths).max())
        return found, reached, steps

    def _descend_(self, found: Tensor, left: Tensor, lengths: Tensor, most: int) -> int:
        """Take steps, until half the tolerance or `most` of them, and return their number; `left` is overwritten."""
        direction = self._preconditioned(left)
        slope = (left * direction).sum(dim=0)
        for step in range(1, most + 1):
            image = self.kernel.times(direction).add_(direction, alpha=self.ridge)
            curvature = (direction * image).sum(dim=0)
            active = left.norm(dim=0) > self._solver.tolerance / 2 * lengths
            if (active & (curvature <= 0)).any():
                raise _singular(self.kernel, self.ridge)
            length = torch.where(active, slope / curvature, 0.0)
            found.addcmul_(direction, length)
            left.addcmul_(image, length, value=-1)
            del image
            if (left.norm(dim=0) <= self._solver.tolerance / 2 * lengths).all():
                return step
            steepest = self._preconditioned(left)
            before, slope = slope, (left * steepest).sum(dim=0)
            direction.mul_(torch.where(active, slope / before, 0.0)).add_(steepest)
            del steepest
        return most

    def _preconditioned(self, values: Tensor) -> Tensor:
        """Columns `(k, c)` times the inverse of `F F^T + ridge I`, by Woodbury's formula, and times the ridge."""
        inner = torch.cholesky_solve(self._nystrom @ values, self._root)
        return torch.addmm(values, self._nystrom.T, inner, alpha=-1)


def cholesky(kernel: Tensor, ridge: float) -> Tensor | None:
    """Lower Cholesky factor after adding the ridge in place; None where rounding leaves the kernel indefinite."""
    kernel.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(kernel)
    return None if int(failed) else factor


def _singular(kernel: GaussianKernel, ridge: float) -> ShapeError:
    n = len(kernel.differences)
    return ShapeError(f"the kernel of {n} shadow models is singular at a ridge of {ridge}: raise ridges")


def gib(n_bytes: int) -> str:
    """A number of bytes in GiB."""
    return f"{n_bytes / 2**30:.3g}"
