"""Joint diagonalization of stacks that were built from known directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.starts import fit, jennrich, joint_diagonalization, kuleshov


def stack_of(r: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(r, r, generator=generator, dtype=torch.float64)
    directions = torch.nn.functional.normalize(directions, dim=0)
    diagonals = torch.randn(12, r, generator=generator, dtype=torch.float64)
    stack = torch.einsum("ai,li,bi->lab", directions, diagonals, directions)
    disturbance = noise * torch.randn(stack.shape, generator=generator, dtype=torch.float64)
    return stack + (disturbance + disturbance.transpose(1, 2)) / 2, directions


def worst_cosine(found: Tensor, truth: Tensor) -> float:
    return float((found.T @ truth).abs().amax(dim=0).min())


@pytest.mark.parametrize("method", [jennrich, kuleshov, joint_diagonalization])
@pytest.mark.parametrize("r", [2, 6])
def test_exact_stacks(method: object, r: int) -> None:
    stack, directions = stack_of(r, noise=0.0)
    found = method(stack)  # type: ignore[operator]
    assert found.residual < 1e-8
    assert worst_cosine(found.directions, directions) > 1 - 1e-10


def test_noise_and_the_better_of_two() -> None:
    stack, directions = stack_of(5, noise=0.01)
    best = joint_diagonalization(stack)
    # residuals that differ by 1e-9 of themselves count as equal
    assert best.residual <= min(jennrich(stack).residual, kuleshov(stack).residual) * (1 + 2e-9)
    assert worst_cosine(best.directions, directions) > 0.999


def test_one_direction() -> None:
    found = joint_diagonalization(torch.ones(3, 1, 1, dtype=torch.float64))
    assert found.directions.tolist() == [[1.0]]


def test_singular_combinations_are_passed_over() -> None:
    # rank one throughout: no pair of combinations has an inverse, and the best guess is returned, finite
    stack = torch.zeros(3, 2, 2, dtype=torch.float64)
    stack[:, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    assert jennrich(stack).directions.isfinite().all()


def test_diagonals_by_hand() -> None:
    diagonals, residual = fit(torch.diag(torch.tensor([2.0, -1.0]).double())[None], torch.eye(2, dtype=torch.float64))
    assert diagonals[:, 0].tolist() == pytest.approx([2.0, -1.0])
    assert residual < 1e-12


def test_the_largest_entry_of_a_direction_is_positive() -> None:
    # LAPACK leaves signs open; which it takes depended on where the memory lay
    directions = joint_diagonalization(stack_of(4, noise=0.01)[0]).directions
    assert (directions.amax(dim=0) >= -directions.amin(dim=0)).all()
