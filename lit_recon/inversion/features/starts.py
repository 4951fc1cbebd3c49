"""Where the polish may start: directions of features within their span, up to sign and order."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lit_recon.inversion.features.diagonalization import joint_diagonalization
from lit_recon.inversion.features.layer import LayerGradient
from lit_recon.inversion.features.moments import slices


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
