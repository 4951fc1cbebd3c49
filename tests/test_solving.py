"""Least squares that is the same in every run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lit_recon
from lit_recon.solving import least_squares, sum_of_squares


def test_the_solution_does_not_depend_on_what_was_in_memory() -> None:
    """By the default driver of PyTorch it takes about ten values, which differ in the last digits."""
    generator = torch.Generator().manual_seed(0)
    matrix, target = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (6, 1))
    found = set()
    for _ in range(2000):
        before = torch.randint(0, 2, (6,), dtype=torch.int32)
        del before  # its memory is taken next
        found.add(tuple(least_squares(matrix, target).flatten().tolist()))
    [solution] = found
    torch.testing.assert_close(matrix @ torch.tensor(solution, dtype=torch.float64)[:, None], target)


def test_the_shortest_of_many_solutions() -> None:
    matrix = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    torch.testing.assert_close(least_squares(matrix, torch.tensor([[2.0], [2.0]])), torch.ones(2, 1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    odd = torch.tensor([[value, 0.0], [0.0, 1.0]])
    assert least_squares(odd, torch.ones(2, 3)).isnan().all()
    assert least_squares(torch.eye(2).expand(4, 2, 2), odd).shape == (4, 2, 2)


def test_nothing_else_of_the_package_chooses_a_driver() -> None:
    package = Path(lit_recon.__file__).parent
    own = {path.name for path in package.rglob("*.py") if "torch.linalg.lstsq(" in path.read_text(encoding="utf-8")}
    assert own == {"solving.py"}


@pytest.mark.parametrize("n", [1, 127, 128_000, 130_001])
def test_sums_of_squares_of_many_values(n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(0))
    exact = float(values.double().square().sum())
    assert float(sum_of_squares(values)) == pytest.approx(exact, rel=2e-8 if n > 1000 else 1e-7)
