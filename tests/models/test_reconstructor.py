"""The paper's networks for color images have its sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_recon.errors import ConfigError
from lit_recon.models.reconstructors import PatchDiscriminator, ReconstructorCNN, ReconstructorMLP


def test_the_transposed_convolutions_have_the_papers_sizes() -> None:
    with torch.device("meta"):
        network = ReconstructorCNN(55_208, (3, 32, 32))
    # Balle et al. 2022, table V: 226 million parameters.
    assert sum(value.numel() for value in network.parameters()) / 1e6 == pytest.approx(226, abs=0.5)
    first = network.layers[0]
    assert isinstance(first, nn.Linear)
    assert first.out_features == 4_096
    maps = [layer for layer in network.layers if isinstance(layer, nn.ConvTranspose2d)]
    assert [(m.in_channels, m.out_channels, m.kernel_size, m.stride) for m in maps] == [
        (64, 32, (5, 5), (2, 2)),
        (32, 3, (5, 5), (2, 2)),
    ]


def test_images_have_their_shape_and_range() -> None:
    images = ReconstructorCNN(5, (1, 8, 12))(torch.randn(7, 5))
    assert images.shape == (7, 1, 8, 12)
    assert (images > 0).all()
    assert (images < 1).all()
    with pytest.raises(ConfigError, match="multiples of 4; got 9 x 8"):
        ReconstructorCNN(5, (1, 9, 8))


def test_the_discriminator_is_that_of_table_viii() -> None:
    discriminator = PatchDiscriminator(3)
    found = [m for m in discriminator.layers if isinstance(m, nn.Conv2d)]
    assert [(m.out_channels, m.kernel_size, m.stride) for m in found] == [
        (64, (4, 4), (2, 2)),
        (128, (4, 4), (2, 2)),
        (256, (4, 4), (2, 2)),
        (512, (4, 4), (1, 1)),
        (1, (4, 4), (1, 1)),
    ]
    assert discriminator(torch.rand(2, 3, 32, 32)).shape == (2, 1, 2, 2)
    assert PatchDiscriminator(1)(torch.rand(1, 1, 24, 24)).shape == (1, 1, 1, 1)


def test_the_activation_is_a_choice() -> None:
    network = ReconstructorMLP(4, (1, 2, 2), [3, 3], "gelu")
    assert sum(isinstance(layer, nn.GELU) for layer in network.layers) == 2
