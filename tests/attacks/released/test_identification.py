"""Naming the image among candidates, where chances are known in closed form."""

from __future__ import annotations

import pytest
import torch
from scipy.special import ndtr

from lit_recon.attacks.released.diagnostics import identified
from lit_recon.errors import ConfigError, ShapeError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_two_candidates_are_told_apart_as_often_as_theory_says(noise: float) -> None:
    m = 800
    expected = torch.eye(m)
    observed = expected + noise * torch.randn(m, m, generator=generator())
    rate = float(identified(observed, expected, 2, generator(1)).double().mean())
    # Candidates lie sqrt(2) apart, so that half of it is the distance to the boundary.
    assert rate == pytest.approx(float(ndtr(2**0.5 / 2 / noise)), abs=0.05)  # a standard error of at most 0.017


def test_without_a_trace_it_is_a_guess() -> None:
    observed = torch.randn(2_000, 40, generator=generator())
    expected = torch.randn(2_000, 40, generator=generator(1))
    expected /= expected.norm(dim=1, keepdim=True)
    rate = float(identified(observed, expected, 10, generator(2)).double().mean())
    assert rate == pytest.approx(0.1, abs=0.03)  # a standard error of 0.007


def test_lengths_count() -> None:
    expected = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    assert identified(expected, expected, 2, generator()).tolist() == [True, True]


def test_the_draw_is_the_generators() -> None:
    observed, expected = (torch.randn(50, 5, generator=generator(seed)) for seed in (0, 1))
    assert torch.equal(identified(observed, expected, 4, generator(3)), identified(observed, expected, 4, generator(3)))


@pytest.mark.parametrize("n", [1, 4])
def test_impossible_candidates_are_refused(n: int) -> None:
    with pytest.raises(ConfigError, match="between 2 and the number of targets, 3"):
        identified(torch.eye(3), torch.eye(3), n, generator())
    with pytest.raises(ShapeError, match="must be"):
        identified(torch.eye(3), torch.eye(4), 2, generator())
