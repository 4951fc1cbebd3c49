"""Filling and denoising, against SciPy's cosine transform and the statistics of photographs."""

from __future__ import annotations

import pytest
import torch
from scipy.fft import dct
from torch import Tensor

from lit_recon.attacks.updates.imprint.rows import cosine_basis, filled, spectrum, wiener


@pytest.mark.parametrize("size", [1, 7, 32])
def test_the_basis_is_the_orthonormal_cosine_transform(size: int) -> None:
    signal = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.from_numpy(dct(signal.numpy(), norm="ortho"))
    torch.testing.assert_close(cosine_basis(size) @ signal, expected, rtol=0.0, atol=1e-12)


def test_the_spectrum_has_the_power_of_unit_pixels_and_falls() -> None:
    power = spectrum(16, 24)
    assert power.sum().item() == pytest.approx(16 * 24)
    assert (power.diff(dim=0) <= 0).all()
    assert (power.diff(dim=1) <= 0).all()


def test_denoising_brings_photographs_closer(photographs: Tensor) -> None:
    images = ((photographs[:20] - 0.5) / 0.25).double()
    for std, share in ((0.1, 0.95), (0.5, 0.5), (1.0, 0.3)):
        noisy = images + std * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        restored = wiener(noisy, torch.full((20,), std, dtype=torch.float64))
        assert (restored - images).square().mean() < share * std**2
    torch.testing.assert_close(wiener(images, torch.zeros(20)), images, rtol=0.0, atol=0.0)


def test_gaps_become_the_mean_of_their_neighbours() -> None:
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    known = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    known[..., 2:5, 3:6] = False
    torch.testing.assert_close(filled(torch.where(known, ramp, 99.0), known), ramp, rtol=0.0, atol=1e-4)
    assert filled(ramp, torch.ones_like(known)) is ramp
    nothing = filled(torch.full((1, 1, 4, 4), 9.0), torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    torch.testing.assert_close(nothing, torch.zeros(1, 1, 4, 4))
