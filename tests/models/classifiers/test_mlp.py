"""The fully connected trunk against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_recon.errors import ConfigError
from lit_recon.models import MLP
from lit_recon.models.classifiers.networks import Biases


def test_it_is_linear_layers_and_activations() -> None:
    torch.manual_seed(0)
    trunk = MLP((2, 3, 5), hidden=[7, 4], activation="tanh")
    first, second = (module for module in trunk.modules() if isinstance(module, nn.Linear))
    images = torch.rand(6, 2, 3, 5)
    inner = torch.tanh(images.reshape(6, 30) @ first.weight.T + first.bias)
    torch.testing.assert_close(trunk(images), torch.tanh(inner @ second.weight.T + second.bias))
    assert trunk.out_features == 4


@pytest.mark.parametrize(("biases", "with_bias"), [("all", [0, 1, 2]), ("first", [0]), ("none", [])])
def test_biases_are_in_the_layers_that_shall_have_them(biases: Biases, with_bias: list[int]) -> None:
    linear = [layer for layer in MLP(hidden=[5, 4, 3], biases=biases).layers if isinstance(layer, nn.Linear)]
    assert [depth for depth, layer in enumerate(linear) if layer.bias is not None] == with_bias


def test_the_first_layer_starts_with_the_given_deviation() -> None:
    torch.manual_seed(0)
    first, _, second, _ = MLP(hidden=[50, 20], initial_std=1e-3).layers
    assert float(first.weight.detach().std()) == pytest.approx(1e-3, rel=0.02)  # 39,200 weights: 0.4 %
    assert float(first.bias.detach().std()) == pytest.approx(1e-3, rel=0.4)  # 50 biases: 10 %
    assert float(second.weight.detach().std()) == pytest.approx(50**-0.5 / 3**0.5, rel=0.1)


def test_arguments_of_older_checkpoints_mean_the_same_network() -> None:
    assert MLP(hidden=[8]).arguments == {"image_shape": [1, 28, 28], "hidden": [8], "activation": "relu"}


@pytest.mark.parametrize("wrong", [{"biases": "last"}, {"initial_std": 0.0}, {"initial_std": float("inf")}])
def test_wrong_biases_and_deviations_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="biases must be one of all, first, none and initial_std above 0"):
        MLP(**wrong)  # type: ignore[arg-type]  # a table of settings


@pytest.mark.parametrize("hidden", [[], [8, 0]])
def test_hidden_layers_must_be_positive(hidden: list[int]) -> None:
    with pytest.raises(ConfigError, match="positive layer sizes"):
        MLP(hidden=hidden)
