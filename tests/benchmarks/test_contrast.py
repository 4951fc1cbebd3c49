"""The contrast of an image: the one direction that statistics of the batch hide."""

from __future__ import annotations

import pytest
import torch

from benchmarks import contrast
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Normalization

NORMALIZATION = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def image(size: int = 8) -> torch.Tensor:
    return torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_the_contrast_alone_is_hidden() -> None:
    found = {}
    for norm in ("batch", "none"):
        torch.manual_seed(0)
        model = Backbone(ConvNet((3, 8, 8), [64, 64], norm=norm), 10, NORMALIZATION)
        found[norm] = contrast.hidden(model, image(), torch.tensor([3]), contrast.HIDING["drop"], "drop")
    assert found["batch"]["unknown"] == 1
    assert found["batch"]["cosine"] > 0.999  # the number that BatchNorm adds to the variance is small, not zero
    assert found["none"]["unknown"] == 0
    assert found["none"]["cosine"] is None


def test_an_image_of_usual_contrast_has_no_error() -> None:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (NORMALIZATION.mean, NORMALIZATION.std))
    signs = torch.sign(image() - 0.5)
    assert contrast.contrast_error(mean + std * signs, NORMALIZATION) == pytest.approx(0, abs=1e-7)
    # half the contrast: every pixel is off by half a standard deviation
    expected = float((0.5 * std.expand(3, 8, 8)).square().mean().sqrt())
    assert contrast.contrast_error(mean + 0.5 * std * signs, NORMALIZATION) == pytest.approx(expected, rel=1e-5)
