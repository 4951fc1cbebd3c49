"""The small ConvNet: sizes it takes, and its layers written out by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lit_recon.errors import ConfigError
from lit_recon.models import ConvNet


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize(
    ("shape", "n_features"),
    [((3, 32, 32), 6 * 8 * 8), ((1, 28, 28), 6 * 7 * 7), ((1, 8, 8), 6 * 2 * 2), ((2, 9, 13), 6 * 3 * 4)],
)
def test_features_of_any_image_size(norm: str, shape: tuple[int, int, int], n_features: int) -> None:
    trunk = ConvNet(shape, widths=[4, 5, 6], norm=norm)  # type: ignore[arg-type]  # names in a table
    assert trunk.out_features == n_features
    assert trunk(torch.rand(2, *shape)).shape == (2, n_features)


def test_default_network_takes_the_smallest_images() -> None:
    assert ConvNet((1, 8, 8))(torch.rand(1, 1, 8, 8)).shape == (1, 512)


def test_it_is_convolution_activation_and_pooling() -> None:
    torch.manual_seed(0)
    trunk = ConvNet((1, 8, 8), widths=[4, 5], norm="none", activation="elu")
    first, second = (module for module in trunk.modules() if isinstance(module, nn.Conv2d))
    images = torch.rand(2, 1, 8, 8)
    maps = nn.functional.elu(nn.functional.conv2d(images, first.weight, first.bias, padding=1))
    maps = nn.functional.elu(nn.functional.conv2d(maps, second.weight, second.bias, padding=1))
    by_hand = torch.stack([maps[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).mean(dim=0).flatten(1)
    torch.testing.assert_close(trunk(images), by_hand)


def test_largest_values_are_pooled_also_behind_the_first_convolution_and_hidden_layers_follow() -> None:
    torch.manual_seed(0)
    options = {"norm": "none", "activation": "leaky_relu", "pooling": "max", "pool_first": True, "hidden": [7, 6]}
    trunk = ConvNet((1, 8, 8), widths=[4, 5], **options)  # type: ignore[arg-type]  # names in a table
    maps = images = torch.rand(2, 1, 8, 8)
    for layer in (module for module in trunk.modules() if isinstance(module, nn.Conv2d)):
        maps = nn.functional.leaky_relu(nn.functional.conv2d(maps, layer.weight, layer.bias, padding=1))
        maps = torch.stack([maps[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(dim=0)
    features = maps.flatten(1)
    for dense in (module for module in trunk.modules() if isinstance(module, nn.Linear)):
        features = nn.functional.leaky_relu(features @ dense.weight.T + dense.bias)
    assert trunk.out_features == features.shape[1] == 6
    torch.testing.assert_close(trunk(images), features)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"pooling": "min"}, "'average' or 'max'"), ({"hidden": [0]}, "hidden")]
)
def test_pooling_and_hidden_layers_that_there_are_not(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConvNet((1, 8, 8), **wrong)


def test_a_bias_only_where_no_norm_follows() -> None:
    for norm, expected in (("batch", [False, False]), ("none", [True, True])):
        layers = ConvNet((1, 8, 8), widths=[4, 5], norm=norm).modules()  # type: ignore[arg-type]  # names in a table
        assert [layer.bias is not None for layer in layers if isinstance(layer, nn.Conv2d)] == expected


def test_every_pixel_of_an_odd_image_reaches_the_features() -> None:
    torch.manual_seed(0)
    trunk = ConvNet((1, 9, 9), widths=[8, 8, 8], activation="gelu").eval()
    image = torch.rand(1, 1, 9, 9, requires_grad=True)
    trunk(image).sum().backward()
    assert image.grad is not None
    assert (image.grad != 0).all()


def test_too_many_layers_for_the_image() -> None:
    assert ConvNet((1, 8, 8), widths=[4] * 4).out_features == 4
    for n, pool_first in ((5, False), (4, True)):
        with pytest.raises(ConfigError, match="at least 16 pixels; got 8x8: give fewer widths"):
            ConvNet((1, 8, 8), widths=[4] * n, pool_first=pool_first)


@pytest.mark.parametrize("widths", [[], [4, 0]])
def test_widths_must_be_positive(widths: list[int]) -> None:
    with pytest.raises(ConfigError, match="positive channel numbers"):
        ConvNet(widths=widths)


def test_deeper_trunks_of_one_width_chain() -> None:
    convolutions = [module for module in ConvNet(widths=[3, 5, 7]).modules() if isinstance(module, nn.Conv2d)]
    assert all(left.out_channels == right.in_channels for left, right in pairwise(convolutions))
