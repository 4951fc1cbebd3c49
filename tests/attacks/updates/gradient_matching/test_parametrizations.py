"""Pixels and their cosine coefficients."""

from __future__ import annotations

import pytest
import torch
from scipy.fft import idctn
from torch import Tensor

from lit_recon.attacks.updates import Pixels
from lit_recon.attacks.updates.gradient_matching.parametrizations import Restart
from lit_recon.errors import ConfigError
from lit_recon.records import Observation
from tests.attacks.updates.feature_maps.networks import observed


@pytest.fixture
def seen(photographs: Tensor) -> Observation:
    return observed(photographs[:2])


def test_coefficients_are_those_of_a_cosine_transform(seen: Observation) -> None:
    smooth, restart = Pixels(box=False, smooth=0.5), Restart(seen, 0)
    drawn = torch.randn(2, *seen.image_shape, generator=torch.Generator().manual_seed(1))
    frequencies = torch.tensor([[(i * i + j * j) ** 0.5 for j in range(32)] for i in range(32)])
    scale = (1 + frequencies) ** -0.5
    scale = scale / scale.square().mean().sqrt()
    mean, std = seen.normalization.tensors(drawn)
    expected = torch.from_numpy(idctn((drawn * scale).numpy(), axes=(2, 3), norm="ortho")) * std + mean
    torch.testing.assert_close(smooth.images({"pixels": drawn}, restart), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("smooth", [0.0, 0.5])
def test_images_come_back(photographs: Tensor, seen: Observation, smooth: float) -> None:
    pixels, restart = Pixels(smooth=smooth), Restart(seen, 0)
    variables = pixels.of(photographs[:2], seen)
    torch.testing.assert_close(pixels.images(variables, restart), photographs[:2], rtol=1e-4, atol=1e-5)
    # the box holds for pixels, not for what the solver moves
    variables["pixels"] *= 3
    pixels.project(variables, seen)
    images = pixels.images(variables, restart)
    assert images.amin() >= -1e-5
    assert images.amax() <= 1 + 1e-5


def test_refined_variables_are_the_pixels(photographs: Tensor, seen: Observation) -> None:
    pixels, restart = Pixels(smooth=0.5, coarse=0.25), Restart(seen, 0)
    others = {"labels": torch.zeros(2)}
    fine = pixels.refined({**pixels.of(photographs[:2], seen), **others})
    assert sorted(fine) == ["fine", "labels"]
    assert pixels.refined(fine) is fine
    mean, std = seen.normalization.tensors(photographs)
    torch.testing.assert_close(fine["fine"], (photographs[:2] - mean) / std, rtol=1e-4, atol=1e-5)
    fine["fine"] *= 3
    pixels.project(fine, seen)
    assert pixels.images(fine, restart).amin() >= -1e-5
    assert pixels.images(fine, restart).amax() <= 1 + 1e-5


def test_a_smooth_start_has_the_same_spread(seen: Observation) -> None:
    roughness = []
    for smooth in (0.0, 1.0):
        pixels, restart = Pixels(box=False, spread=0.2, smooth=smooth), Restart(seen, 0)
        mean, std = seen.normalization.tensors(seen.like)
        start = (pixels.images(pixels.start(restart), restart) - mean) / std
        assert float(start.square().mean().sqrt()) == pytest.approx(0.2, rel=0.25)
        roughness.append(float(start.diff(dim=-1).square().mean().sqrt()))
    assert roughness[1] < 0.7 * roughness[0]


def test_bad_settings() -> None:
    for settings in ({"spread": 0.0}, {"smooth": -0.5}):
        with pytest.raises(ConfigError, match="Pixels needs a spread above 0 and smooth of at least 0"):
            Pixels(**settings)
    for settings in ({"smooth": 0.5, "coarse": 1.5}, {"coarse": 0.5}):
        with pytest.raises(ConfigError, match="Pixels needs coarse in"):
            Pixels(**settings)
