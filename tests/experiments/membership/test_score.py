"""Distances of the adversary's copies to released models."""

from __future__ import annotations

import torch

from lit_recon.experiments.membership.score import _copy_error


def test_candidates_with_equal_models_are_equally_near() -> None:
    """Two equal images in a game leave one model; the other game has a copy at a tenth of the distance."""
    released = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    right, wrong = torch.tensor([[1.0, 2.0], [0.1, 0.0]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]])
    bits = torch.zeros(2, dtype=torch.int64)
    assert _copy_error(released, right, wrong, bits) == 1
    assert abs(_copy_error(released[1:], right[1:], wrong[1:], bits[1:]) - 0.1) < 1e-6
