"""Where the polish may start: directions of features within their span, up to sign and order."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lit_recon.attacks.updates.features.diagonalization import joint_diagonalization
from lit_recon.attacks.updates.features.layer import LayerGradient
from lit_recon.attacks.updates.features.moments import slices


def moment_start(seen: LayerGradient, basis: Tensor, seed: int = 0) -> Tensor:
    """Directions `(n, r)` that diagonalise the moments of the head's gradient over the Gaussian neurons.

    Raises:
        UnsupportedModelError: the activation has no usable moments.
    """
    rows = seen.gaussian_rows()
    stack = slices(rows.head_gradient, rows.weight @ basis, seen.activation, basis.shape[1], seed=seed)
    return joint_diagonalization(stack, seed).directions.T


def neuron_ica_start(projected: Tensor, seed: int = 0) -> Tensor:
    """Directions `(n, r)` by independent component analysis over the neurons, from the projected gradient `(m, r)`.

    Row j is a mixture sum_i s_ij c_i with the derivative s_ij of example i's loss by neuron j, and these vary from
    neuron to neuron nearly independently for different examples. Uses neither weights nor activation, so that it works
    for trained neurons too.
    """
    from sklearn.decomposition import FastICA
    from sklearn.exceptions import ConvergenceWarning

    r = projected.shape[1]
    if r == 1:
        return projected.new_ones(1, 1)
    unmixing = FastICA(n_components=r, whiten="unit-variance", max_iter=400, tol=1e-5, random_state=seed)
    with warnings.catch_warnings():
        # a start need not have converged: the certificate judges what becomes of it
        warnings.simplefilter("ignore", ConvergenceWarning)
        unmixing.fit((projected / projected.square().mean().sqrt()).numpy())
    return torch.nn.functional.normalize(torch.from_numpy(unmixing.mixing_.copy()).to(projected).T, dim=1)


#: |entry| below this, after whitening to unit mean square, is a zero of a single-precision gradient.
ZERO = 1e-4
#: Share of all neurons at which one example's derivative has to be zero; one half is expected.
SHARE = 0.42
#: Neurons on which a candidate is tried before it is tried on all.
_PROBES = 400
#: Candidates closer than this are one.
_SAME = 1 - 1e-6


def null_vector_start(projected: Tensor, seed: int = 0, max_samples: int = 200_000, chunk: int = 4000) -> Tensor | None:
    """Directions `(r, r)` of all features in their span, or None if `max_samples` samples did not give all.

    The projected gradient `(m, r)` is P = D C with derivatives D of which about half are zero. Whenever one example is
    inactive in all of r - 1 sampled neurons, their null vector q is orthogonal to every other feature, and P q is as
    sparse as that example's column of D. A hit takes 2^(r-1) / r samples on average. Zeros of neurons at which nobody
    is active count too, as they are zeros of every column.

    Args:
        projected: layer gradient in an orthonormal basis of its span.
        seed: of the samples.
        max_samples: before giving up.
        chunk: samples at once.

    Source: Dimitrov et al. 2024 (SPEAR), with a whitened null vector and zeros counted over all neurons.
    """
    m, r = projected.shape
    whitened, mixing = torch.linalg.qr(projected)
    whitened = whitened * m**0.5
    active = projected.norm(dim=1) > 1e-9 * projected.norm(dim=1).max()
    candidates = whitened[active]
    if len(candidates) < r:
        return None
    share = (SHARE - float((~active).double().mean())) / float(active.double().mean())
    generator = torch.Generator().manual_seed(seed)
    probes = candidates[torch.randperm(len(candidates), generator=generator)[:_PROBES]]
    found: list[tuple[float, Tensor]] = []
    for _ in range(-(-max_samples // chunk)):
        rows = candidates[torch.randint(len(candidates), (chunk, max(r - 1, 1)), generator=generator)]
        if r == 1:
            return projected.new_ones(1, 1)
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
