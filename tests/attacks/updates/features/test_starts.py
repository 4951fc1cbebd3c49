"""Joint diagonalization of matrices whose common directions the tests choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.starts import _ffdiag, fit, jennrich


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_the_residual_is_relative_to_the_stack(size: float) -> None:
    stack = drawn(6, 3, 3)
    stack = size * (stack + stack.transpose(1, 2))
    directions = torch.nn.functional.normalize(drawn(3, 3, seed=1), dim=0)
    diagonals, residual = fit(stack, directions)
    columns = np.stack([np.outer(one, one).ravel() for one in directions.T.numpy()], axis=1)
    flat = stack.reshape(6, -1).T.numpy()
    least = np.linalg.lstsq(columns, flat, rcond=None)
    np.testing.assert_allclose(diagonals.numpy(), least[0], rtol=1e-9)
    assert residual == pytest.approx(np.linalg.norm(columns @ least[0] - flat) / np.linalg.norm(flat), rel=1e-9)


def test_updates_converge_quadratically() -> None:
    directions = torch.nn.functional.normalize(drawn(4, 4), dim=0)
    stack = torch.einsum("ia,la,ja->lij", directions, drawn(8, 4, seed=1), directions)
    start = directions + 0.02 * drawn(4, 4, seed=2)
    found = _ffdiag(stack, start, iterations=6)
    # measured: 3e-15 from 0.02; linear convergence would leave about 1e-3
    assert float((1 - (found * directions).sum(dim=0).abs()).max()) < 1e-12


def test_merged_directions_stay_in_their_plane() -> None:
    # two directions that diagonalize all matrices, and a plane in which nothing does: complex eigenvectors
    blocks = torch.zeros(6, 4, 4, dtype=torch.float64)
    blocks[:, 0, 0], blocks[:, 1, 1] = drawn(2, 6)
    inner = drawn(6, 2, 2, seed=1)
    blocks[:, 2:, 2:] = inner + inner.transpose(1, 2)
    axes = torch.linalg.qr(drawn(4, 4, seed=2))[0]
    for seed in range(8):
        found = jennrich(axes @ blocks @ axes.T, trials=1, seed=seed).directions
        shares = (axes[:, 2:].T @ found).norm(dim=0).sort().values
        torch.testing.assert_close(shares, torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64), rtol=0, atol=1e-6)
