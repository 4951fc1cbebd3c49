"""Joint diagonalization: directions X with S_l = X diag(.) X^T for a stack of symmetric matrices, X not orthogonal."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Decomposition(NamedTuple):
    """Unit columns `directions` `(r, r)` and the relative `residual` of the stack."""

    directions: Tensor
    residual: float


def fit(stack: Tensor, directions: Tensor) -> tuple[Tensor, float]:
    """Best diagonals `(r, l)` for given directions, and the relative residual."""
    r = stack.shape[1]
    rank_one = (directions[:, None, :] * directions[None, :, :]).reshape(r * r, -1)
    flat = stack.reshape(len(stack), -1).T
    diagonals = torch.linalg.lstsq(rank_one, flat).solution
    return diagonals, float((rank_one @ diagonals - flat).norm() / flat.norm().clamp_min(1e-300))


def jennrich(stack: Tensor, trials: int = 30, seed: int = 0) -> Decomposition:
    """Eigenvectors of P Q^-1 for random combinations P, Q of the stack; the pair that fits best.

    Source: Harshman 1970; Leurgans, Ross, Abel 1993.
    """
    compact = _compact(stack)
    generator = torch.Generator().manual_seed(seed)
    best = Decomposition(torch.eye(stack.shape[1], dtype=stack.dtype), float("inf"))
    for _ in range(trials):
        mix = torch.randn(2, len(compact), generator=generator, dtype=stack.dtype)
        left, right = torch.einsum("pl,lab->pab", mix, compact)
        solved, failed = torch.linalg.solve_ex(right, left.T)
        if failed or not solved.isfinite().all():
            continue
        vectors = torch.linalg.eig(solved.T).eigenvectors
        # a complex pair is two directions that noise has merged; real and imaginary part keep their plane
        directions = torch.where(vectors.imag.norm(dim=0) > 1e-9, vectors.real + 0.1 * vectors.imag, vectors.real)
        directions = torch.nn.functional.normalize(directions, dim=0)
        _, residual = fit(stack, directions)
        if residual < best.residual:
            best = Decomposition(directions, residual)
    return best


def kuleshov(stack: Tensor, seed: int = 0) -> Decomposition:
    """Joint diagonalization of random projections, then of the projections that isolate each direction.

    Both rounds by FFDIAG, the first started from Jennrich's directions.

    Source: Kuleshov, Chaganty, Liang 2015, algorithm 1; Ziehe et al. 2004 for the diagonalization.
    """
    compact = _compact(stack)
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(max(4, 2 * stack.shape[1]), len(compact), generator=generator, dtype=stack.dtype)
    start = jennrich(stack, seed=seed).directions
    directions = _ffdiag(torch.einsum("pl,lab->pab", mix, compact), start)
    diagonals, _ = fit(compact, directions)
    plug_in = torch.nn.functional.normalize(torch.linalg.pinv(diagonals).T, dim=1)
    directions = _ffdiag(torch.einsum("pl,lab->pab", plug_in, compact), directions)
    return Decomposition(directions, fit(stack, directions)[1])


def joint_diagonalization(stack: Tensor, seed: int = 0) -> Decomposition:
    """The better, by residual, of Kuleshov's algorithm and of Jennrich's refined by alternating least squares.

    Args:
        stack: `(l, r, r)`, symmetric, in double precision.
        seed: of the random combinations.
    """
    if stack.shape[1] == 1:
        return Decomposition(torch.ones(1, 1, dtype=stack.dtype), 0.0)
    refined = _alternating(stack, jennrich(stack, seed=seed))
    return min(refined, kuleshov(stack, seed), key=lambda found: found.residual)


def _compact(stack: Tensor) -> Tensor:
    """At most r matrices with the same span, leading singular vectors of the stack."""
    r = stack.shape[1]
    _, values, rows = torch.linalg.svd(stack.reshape(len(stack), -1), full_matrices=False)
    kept = min(r, len(values))
    leading: Tensor = (values[:kept, None] * rows[:kept]).reshape(kept, r, r)
    return leading


def _ffdiag(stack: Tensor, start: Tensor, iterations: int = 200) -> Tensor:
    """Directions whose inverse diagonalises the stack: multiplicative updates (I + W) with zero diagonal."""
    inverse = torch.nn.functional.normalize(torch.linalg.pinv(start), dim=1)
    eye = torch.eye(len(start), dtype=stack.dtype)
    for _ in range(iterations):
        current = inverse @ stack @ inverse.T
        diagonals = current.diagonal(dim1=1, dim2=2)
        z = diagonals.T @ diagonals
        y = torch.einsum("lj,lij->ij", diagonals, current)
        own = z.diagonal()
        determinant = (own[:, None] * own - z.square()).clamp_min(1e-12 * own.max() ** 2)
        update = ((z * y.T - own[:, None] * y) / determinant).fill_diagonal_(0)
        norm = update.norm()
        inverse = torch.nn.functional.normalize((eye + update * (0.5 / norm).clamp(max=1)) @ inverse, dim=1)
        if norm < 1e-9:
            break
    return torch.nn.functional.normalize(torch.linalg.pinv(inverse), dim=0)


def _alternating(stack: Tensor, start: Decomposition, iterations: int = 60) -> Decomposition:
    """S_l = Y diag(.) Z^T solved for one factor at a time, both then replaced by what was found."""
    best, directions = start, start.directions
    length, r, _ = stack.shape
    columns = stack.permute(2, 0, 1).reshape(r * length, r)
    for _ in range(iterations):
        diagonals, _ = fit(stack, directions)
        design = torch.einsum("bi,il->bli", directions, diagonals).reshape(r * length, -1)
        directions = torch.nn.functional.normalize(torch.linalg.lstsq(design, columns).solution.T, dim=0)
        _, residual = fit(stack, directions)
        if residual > best.residual - 1e-12:
            break
        best = Decomposition(directions, residual)
    return best
