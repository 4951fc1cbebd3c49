"""Completion of matrices whose rank and hidden entries the tests make."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps import completion
from lit_recon.attacks.updates.feature_maps.completion import CompletedMatrix, complete

RANK = 4


def made(rows: int = 60, columns: int = 180, seed: int = 0, condition: float = 30.0) -> Tensor:
    """A matrix of rank 4 with entries of single precision."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, RANK, generator=generator, dtype=torch.float64) for size in (rows, columns))
    scale = torch.logspace(0, -torch.tensor(condition).log10(), RANK, dtype=torch.float64)
    return (torch.linalg.qr(left)[0] * scale @ torch.linalg.qr(right)[0].T).float().double()


def shown(matrix: Tensor, share: float, seed: int = 1) -> Tensor:
    return torch.rand(matrix.shape, generator=torch.Generator().manual_seed(seed)) < share


def sine(found: CompletedMatrix, matrix: Tensor) -> float:
    """Sine of the largest angle between the completed row space and the true one, on the known columns."""
    truth = torch.linalg.svd(matrix, full_matrices=False)[2][:RANK].T[found.known]
    basis, own = torch.linalg.qr(truth)[0], found.basis[found.known]
    return float(torch.linalg.svdvals(own - basis @ (basis.T @ own))[0])


@pytest.mark.parametrize("condition", [1.0, 100.0])
def test_the_row_space_follows_from_some_entries(condition: float) -> None:
    matrix = made(condition=condition)
    observed = shown(matrix, 0.3)
    found = complete(torch.where(observed, matrix, torch.nan), observed, RANK)
    assert isinstance(found, CompletedMatrix)
    assert found.known.double().mean() > 0.95  # measured 0.99 and more
    assert sine(found, matrix) < 1e-4  # measured 2e-7 and 1e-5
    assert found.misfit < 1e-7  # measured 3e-8
    assert found.predicted < 1e-6
    assert not found.basis[~found.known].any()


def test_expected_errors_of_columns_are_their_errors() -> None:
    matrix = made(condition=3.0)
    observed = shown(matrix, 0.3)
    found = complete(matrix, observed, RANK)
    assert isinstance(found, CompletedMatrix)
    # what is left of each column outside of the completed rows' space, for columns in the coordinates of the basis
    truth = torch.linalg.svd(matrix, full_matrices=False)[2][:RANK].T[found.known]
    turn = torch.linalg.lstsq(found.basis[found.known], truth).solution
    actual = (found.basis[found.known] @ turn - truth).norm(dim=1) / truth.square().sum(1).mean().sqrt()
    ratio = float(actual.square().mean().sqrt() / found.errors[found.known].square().mean().sqrt())
    assert 0.2 < ratio < 5  # measured 0.6


def test_largest_entries_are_enough() -> None:
    matrix = made(condition=5.0)
    observed = matrix.abs() > matrix.abs().flatten().quantile(0.6)
    found = complete(matrix, observed, RANK)
    assert isinstance(found, CompletedMatrix)
    assert sine(found, matrix) < 1e-4
    assert found.known.double().mean() > 0.5


def test_a_larger_core_is_tried_where_a_small_one_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, refined, cores = made(columns=400), completion._refined, []

    def first_in_vain(problem: completion._Problem, left: Tensor) -> tuple[Tensor, Tensor, float]:
        cores.append(problem.values.shape[1])
        found = refined(problem, left)
        return (*found[:2], 1.0) if len(cores) == 1 else found

    monkeypatch.setattr(completion, "_refined", first_in_vain)
    found = complete(matrix, shown(matrix, 0.2), RANK)
    assert isinstance(found, CompletedMatrix)
    assert sine(found, matrix) < 1e-4
    assert cores[0] < cores[1], cores


def test_too_few_entries_are_refused_with_their_number() -> None:
    matrix = made()
    reason = complete(matrix, shown(matrix, 0.08), RANK)
    assert isinstance(reason, str)
    assert "too little is left" in reason
    assert "keep 12 entries each" in reason
    assert complete(matrix, torch.zeros_like(matrix, dtype=torch.bool), RANK) == reason


def test_a_wrong_rank_is_refused() -> None:
    matrix = made()
    reason = complete(matrix, shown(matrix, 0.5), RANK - 1)
    assert isinstance(reason, str)
    assert "no matrix of rank 3" in reason


def test_an_undetermined_column_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = made(condition=3.0)
    matrix[:8] = matrix[0]  # eight rows that say the same
    observed = shown(matrix, 0.5)
    observed[8:, 7], observed[:8, 7] = False, True  # more entries than the rank, of one row's information
    found = complete(matrix, observed, RANK)
    assert isinstance(found, CompletedMatrix)
    assert not found.known[7]
    assert sine(found, matrix) < 1e-4
    monkeypatch.setattr(completion, "DETERMINED", torch.inf)
    found = complete(matrix, observed, RANK)
    assert isinstance(found, str) or not found.known[7] or sine(found, matrix) > 1e-2


def test_every_guard_holds_back_a_matrix_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(40, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    observed = shown(matrix, 0.6)
    assert "no matrix of rank 4" in str(complete(matrix, observed, RANK))
    monkeypatch.setattr(completion, "MISFIT", torch.inf)
    assert "columns are determined" in str(complete(matrix, observed, RANK))
    monkeypatch.setattr(completion, "DETERMINED", torch.inf)
    assert "left out are not predicted" in str(complete(matrix, observed, RANK))
    monkeypatch.setattr(completion, "PREDICTED", torch.inf)
    assert isinstance(complete(matrix, observed, RANK), CompletedMatrix)
