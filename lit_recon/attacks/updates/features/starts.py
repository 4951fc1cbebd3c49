"""Joint diagonalization, and starts of the polish: feature directions in their span, up to sign and order."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.solving import least_squares

#: Relative difference of residuals that counts as rounding.
_ROUNDING = 1e-9


class Decomposition(NamedTuple):
    """Unit columns `directions` `(r, r)` and the relative `residual` of the stack."""

    directions: Tensor
    residual: float


def fit(stack: Tensor, directions: Tensor) -> tuple[Tensor, float]:
    """Best diagonals `(r, l)` for given directions, and the relative residual."""
    r = stack.shape[1]
    rank_one = (directions[:, None, :] * directions[None, :, :]).reshape(r * r, -1)
    flat = stack.reshape(len(stack), -1).T
    diagonals = least_squares(rank_one, flat)
    return diagonals, float((rank_one @ diagonals - flat).norm() / flat.norm().clamp_min(1e-300))


def jennrich(stack: Tensor, trials: int = 30, seed: int = 0) -> Decomposition:
    """Eigenvectors of P Q^-1 for random combinations P, Q of the stack; the best-fitting pair.

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
        # complex pair: two directions merged by noise; real and imaginary part span the same plane
        directions = torch.where(vectors.imag.norm(dim=0) > 1e-9, vectors.real + 0.1 * vectors.imag, vectors.real)
        directions = torch.nn.functional.normalize(directions, dim=0)
        _, residual = fit(stack, directions)
        if residual < best.residual:
            best = Decomposition(directions, residual)
    return best


def kuleshov(stack: Tensor, seed: int = 0) -> Decomposition:
    """Joint diagonalization (FFDIAG from Jennrich's start) of random projections, then of isolating ones.

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
    """The better of Kuleshov's algorithm and Jennrich's with alternating least squares; the stack is `(l, r, r)`.

    The largest entry of each direction is positive.
    """
    if stack.shape[1] == 1:
        return Decomposition(torch.ones(1, 1, dtype=stack.dtype), 0.0)
    refined, projected = _alternating(stack, jennrich(stack, seed=seed)), kuleshov(stack, seed)
    # where both end at the same directions, rounding does not choose between their orders
    best = projected if projected.residual < (1 - _ROUNDING) * refined.residual else refined
    return Decomposition(_signed(best.directions.T).T, best.residual)


def _signed(vectors: Tensor) -> Tensor:
    """Rows with the sign that makes their largest entry positive.

    LAPACK leaves the sign of singular vectors and eigenvectors open; it may differ from one call to the next.
    """
    return vectors * vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True)).sign()


def _compact(stack: Tensor) -> Tensor:
    """At most r matrices, leading singular vectors of the stack."""
    r = stack.shape[1]
    _, values, rows = torch.linalg.svd(stack.reshape(len(stack), -1), full_matrices=False)
    kept = min(r, len(values))
    leading: Tensor = (values[:kept, None] * _signed(rows[:kept])).reshape(kept, r, r)
    return leading


def _ffdiag(stack: Tensor, start: Tensor, iterations: int = 200) -> Tensor:
    """Directions whose inverse diagonalizes the stack: multiplicative updates I + W, W with zero diagonal."""
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


def _alternating(stack: Tensor, start: Decomposition) -> Decomposition:
    """At most 60 rounds of alternating least squares for S_l = Y diag(.) Z^T, with Y = Z at the end of each."""
    best, directions = start, start.directions
    length, r, _ = stack.shape
    columns = stack.permute(2, 0, 1).reshape(r * length, r)
    for _ in range(60):
        diagonals, _ = fit(stack, directions)
        design = torch.einsum("bi,il->bli", directions, diagonals).reshape(r * length, -1)
        directions = torch.nn.functional.normalize(least_squares(design, columns).T, dim=0)
        _, residual = fit(stack, directions)
        if residual > best.residual - 1e-12:
            break
        best = Decomposition(directions, residual)
    return best


def neuron_ica_start(projected: Tensor, seed: int = 0) -> Tensor:
    """Directions `(n, r)` by independent component analysis over the neurons, from the projected gradient `(m, r)`.

    Row j is a mixture sum_i s_ij c_i with the derivative s_ij of example i's loss by neuron j, nearly independent for
    different examples. Uses neither weights nor activation, so it also works for trained neurons.
    """
    from sklearn.decomposition import FastICA
    from sklearn.exceptions import ConvergenceWarning

    r = projected.shape[1]
    if r == 1:
        return projected.new_ones(1, 1)
    unmixing = FastICA(n_components=r, whiten="unit-variance", max_iter=400, tol=1e-5, random_state=seed)
    with warnings.catch_warnings():
        # a start need not have converged: success is decided by the certificate
        warnings.simplefilter("ignore", ConvergenceWarning)
        unmixing.fit((projected / projected.square().mean().sqrt()).numpy())
    return torch.nn.functional.normalize(torch.from_numpy(unmixing.mixing_.copy()).to(projected).T, dim=1)


#: |entry| below this, after whitening to unit mean square, counts as zero in float32.
ZERO = 1e-4
#: Smallest share of neurons with zero derivative of an example; one half is expected.
SHARE = 0.42
#: Number of neurons for a first test of a candidate; absolute cosine from which candidates count as equal.
_PROBES, _SAME = 400, 1 - 1e-6


def null_vector_start(projected: Tensor, seed: int = 0, max_samples: int = 200_000, chunk: int = 4000) -> Tensor | None:
    """Directions `(r, r)` of all features in their span, or None if `max_samples` samples did not yield all.

    The projected gradient `(m, r)` is P = D C with derivatives D of which about half are zero. If one example is
    inactive in all of r - 1 sampled neurons, their null vector q is orthogonal to every other feature, and P q is as
    sparse as that example's column of D. This takes 2^(r-1) / r samples on average.

    Source: Dimitrov et al. 2024 (SPEAR), with a whitened null vector and zeros counted over all neurons.
    """
    m, r = projected.shape
    whitened, mixing = torch.linalg.qr(projected)
    norms = projected.norm(dim=1)
    active = norms > 1e-9 * norms.max()
    candidates = (whitened * m**0.5)[active]
    if len(candidates) < r:
        return None
    if r == 1:
        return projected.new_ones(1, 1)
    share = (SHARE - float((~active).double().mean())) / float(active.double().mean())
    generator = torch.Generator().manual_seed(seed)
    probes = candidates[torch.randperm(len(candidates), generator=generator)[:_PROBES]]
    found: list[tuple[float, Tensor]] = []
    for _ in range(-(-max_samples // chunk)):
        rows = candidates[torch.randint(len(candidates), (chunk, r - 1), generator=generator)]
        null = torch.linalg.eigh(rows.transpose(1, 2) @ rows).eigenvectors[:, :, 0]
        promising = ((probes @ null.T).abs() < ZERO).double().mean(dim=0) > share
        for q in null[promising]:
            zeros = float(((candidates @ q).abs() < ZERO).double().mean())
            if zeros > share and all(float((q @ other).abs()) < _SAME for _, other in found):
                found.append((zeros, q))
        chosen = _independent(found, r)
        if len(chosen) == r:
            unmixing = torch.linalg.solve(mixing, torch.stack(chosen, dim=1))
            return torch.nn.functional.normalize(torch.linalg.inv(unmixing), dim=1)
    return None


def _independent(found: list[tuple[float, Tensor]], size: int) -> list[Tensor]:
    """The sparsest linearly independent vectors, at most `size`."""
    chosen: list[Tensor] = []
    for _, q in sorted(found, key=lambda pair: -pair[0]):
        if torch.linalg.svdvals(torch.stack([*chosen, q]))[-1] > 1e-3:
            chosen.append(q)
        if len(chosen) == size:
            break
    return chosen
