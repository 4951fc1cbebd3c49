"""The fully connected trunk against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_recon.errors import ConfigError
from lit_recon.models import MLP


def test_it_is_linear_layers_and_activations() -> None:
    torch.manual_seed(0)
    trunk = MLP((2, 3, 5), hidden=[7, 4], activation="tanh")
    first, second = (module for module in trunk.modules() if isinstance(module, nn.Linear))
    images = torch.rand(6, 2, 3, 5)
    inner = torch.tanh(images.reshape(6, 30) @ first.weight.T + first.bias)
    torch.testing.assert_close(trunk(images), torch.tanh(inner @ second.weight.T + second.bias))
    assert trunk.out_features == 4


@pytest.mark.parametrize("hidden", [[], [8, 0]])
def test_hidden_layers_must_be_positive(hidden: list[int]) -> None:
    with pytest.raises(ConfigError, match="positive layer sizes"):
        MLP(hidden=hidden)
