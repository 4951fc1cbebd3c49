"""Feature scores on configurations whose scores are known."""

from __future__ import annotations

import math

import pytest
import torch

from lit_recon.errors import ShapeError
from lit_recon.metrics import feature_cosines, span_error


def test_span_error_is_the_sine_of_the_angle() -> None:
    angles = torch.tensor([0.0, 1e-9, 0.3, math.pi / 2], dtype=torch.float64)
    features = 5 * torch.stack([angles.cos(), angles.sin(), torch.zeros(4).double()], dim=1)
    found = span_error(torch.tensor([[-2.0, 0.0, 0.0]], dtype=torch.float64), features)
    torch.testing.assert_close(found, angles.sin(), atol=1e-15, rtol=1e-6)


def test_span_error_depends_on_the_span_only() -> None:
    generator = torch.Generator().manual_seed(0)
    basis, features = torch.randn(3, 8, generator=generator), torch.randn(5, 8, generator=generator)
    mixed = torch.randn(3, 3, generator=generator) @ basis
    torch.testing.assert_close(span_error(basis, features), span_error(mixed, features), atol=1e-5, rtol=1e-5)
    # repeated directions span no more
    torch.testing.assert_close(span_error(torch.cat([basis, basis]), features), span_error(basis, features))
    # against least squares
    unit = torch.nn.functional.normalize(features, dim=1)
    solution = torch.linalg.lstsq(basis.T, unit.T)
    expected = (basis.T @ solution.solution - unit.T).norm(dim=0).double()
    torch.testing.assert_close(span_error(basis, features), expected, atol=1e-6, rtol=1e-5)


def test_nothing_recovered() -> None:
    features = torch.eye(3)
    assert span_error(torch.zeros(2, 3), features).tolist() == pytest.approx([1, 1, 1])
    assert span_error(torch.zeros(0, 3), features).tolist() == pytest.approx([1, 1, 1])
    assert feature_cosines(torch.zeros(0, 3), features).tolist() == [0, 0, 0]


def test_cosines_are_matched_for_the_greatest_total() -> None:
    # greedy matching would give the first feature its best and leave 0 for the second
    features = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0]])
    recovered = torch.tensor([[0.0, 0.0, 3.0], [-2.0, 0.0, 0.0]])
    assert feature_cosines(recovered, features).tolist() == pytest.approx([1, 0], abs=1e-12)
    recovered = torch.tensor([[1.0, 0.0, 0.0], [0.6, -0.8, 0.0]])
    cosines = feature_cosines(recovered, features)
    assert cosines.tolist() == pytest.approx([0.6, 0.8], abs=1e-6)


def test_order_sign_and_norm_are_free() -> None:
    features = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    changed = features[[2, 0, 3, 1]] * torch.tensor([[-1.0], [2.0], [-0.1], [1.0]])
    torch.testing.assert_close(feature_cosines(changed, features), torch.ones(4).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("score", [span_error, feature_cosines])
@pytest.mark.parametrize(
    ("recovered", "features", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), "must be"),
        (torch.ones(3), torch.ones(1, 3), "must be"),
        (torch.ones(1, 3), torch.ones(0, 3), "n >= 1"),
        (torch.full((1, 3), math.nan), torch.ones(1, 3), "finite"),
        (torch.ones(1, 3), torch.zeros(1, 3), "is zero"),
    ],
)
def test_bad_input(score: object, recovered: torch.Tensor, features: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        score(recovered, features)  # type: ignore[operator]
