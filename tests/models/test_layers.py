"""Activations and norms by name."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lit_recon.errors import ConfigError
from lit_recon.models.layers import Activation, Norm, activation_layer, layers_with_weights, norm_layer


@pytest.mark.parametrize("name", get_args(Activation))
def test_every_named_activation_is_pytorchs_and_leaves_its_input_alone(name: str) -> None:
    inputs = torch.linspace(-3, 3, 13)
    before = inputs.clone()
    assert torch.equal(activation_layer(name)(inputs), getattr(nn.functional, name)(before))
    assert torch.equal(inputs, before)


def test_norms_by_name() -> None:
    assert {name: type(norm_layer(name, 8)).__name__ for name in get_args(Norm)} == {
        "batch": "BatchNorm2d",
        "group": "GroupNorm",
        "none": "Identity",
    }


@pytest.mark.parametrize(("channels", "groups"), [(64, 4), (512, 32), (16, 1), (8, 1), (24, 1), (5, 1)])
def test_group_norm_never_has_small_groups(channels: int, groups: int) -> None:
    norm = norm_layer("group", channels)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups
    one_pixel = norm(torch.randn(4, channels, 1, 1, generator=torch.Generator().manual_seed(0)))
    assert one_pixel.unique().numel() > 4 * channels // 2


@pytest.mark.parametrize(("build", "word"), [(activation_layer, "activation"), (norm_layer, "norm")])
def test_an_unknown_name_is_refused(build: object, word: str) -> None:
    arguments = ("swish",) if build is activation_layer else ("swish", 4)
    with pytest.raises(ConfigError, match=f"{word} must be .* got 'swish'"):
        build(*arguments)  # type: ignore[operator]  # two signatures in one table


def test_weights_of_one_layer_alone() -> None:
    """Not those that are parametrized, or tied, under whichever name; a layer with two names is one layer."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    assert list(layers_with_weights(model)) == ["0", "2", "3", "4"]
    model[4].weight = model[2].weight
    assert list(layers_with_weights(model)) == ["0", "3"]
    model.head = model[3]
    assert list(layers_with_weights(model)) == ["0", "3"]
    weight_norm(model[0])
    assert list(layers_with_weights(model)) == ["3"]
    assert list(layers_with_weights(model[3])) == [""]
