from __future__ import annotations

import pytest
import torch
from scipy.stats import truncnorm
from torch import nn

from lit_recon.errors import ConfigError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP, ReleasedNetwork


def weights(network: ReleasedNetwork, seed: int) -> torch.Tensor:
    network.initialize(torch.Generator().manual_seed(seed))
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_sizes_are_those_of_the_paper() -> None:
    # Balle et al. 2022, tables V and VI.
    assert sum(parameter.numel() for parameter in ReleasedMLP().parameters()) == 7_960
    assert sum(parameter.numel() for parameter in ReleasedCNN().parameters()) == 55_208
    assert sum(parameter.numel() for parameter in ReleasedCNN(hidden=20).parameters()) == 101_398
    assert ReleasedCNN(hidden=20).architecture["hidden"] == 20
    assert "hidden" not in ReleasedCNN().architecture  # stores from before it could be set stay valid


@pytest.mark.parametrize("network", [ReleasedMLP(), ReleasedMLP((1, 8, 8), 3, [5, 4], "tanh"), ReleasedCNN()])
def test_weights_are_a_function_of_the_generator(network: ReleasedNetwork) -> None:
    assert torch.equal(weights(network, 1), weights(network, 1))
    assert not torch.equal(weights(network, 1), weights(network, 2))
    assert network(torch.zeros(2, *network.arguments["image_shape"])).shape == (2, network.arguments["n_classes"])


def test_weights_follow_the_truncated_normal_distribution() -> None:
    network = ReleasedMLP(hidden=[50])
    network.initialize(torch.Generator().manual_seed(0))
    first, second = network.linear_layers
    for layer in (first, second):
        assert layer.bias.abs().max() == 0
    scaled = first.weight * 784**0.5
    # 39,200 draws: the standard error of the deviation is 0.003.
    assert scaled.std().item() == pytest.approx(1, abs=0.015)
    assert scaled.abs().max().item() == pytest.approx(2 / truncnorm(-2, 2).std(), rel=1e-3)


def test_a_seed_gives_the_same_weights_with_every_version_of_pytorch() -> None:
    network = ReleasedCNN()
    network.initialize(torch.Generator().manual_seed(0))
    weights = [value.detach().double() for name, value in network.named_parameters() if name.endswith("weight")]
    first = [float(value.flatten()[0]) for value in weights]
    assert first == pytest.approx([0.2254514, -0.0261602, 0.0105791, -0.2792253], abs=1e-6)
    # values that were drawn again change all sums
    assert [float(value.sum()) for value in weights] == pytest.approx(
        [-2.430126, -11.962455, 4.446576, -0.246727], abs=1e-4
    )


def test_the_mlp_is_the_chain_it_says() -> None:
    network = ReleasedMLP((1, 2, 3), 4, [5], "elu")
    images = torch.rand(7, 1, 2, 3)
    first, second = network.linear_layers
    hidden = torch.nn.functional.elu(images.flatten(1) @ first.weight.T + first.bias)
    torch.testing.assert_close(network(images), hidden @ second.weight.T + second.bias)
    assert network.architecture == {
        "class": "ReleasedMLP",
        "image_shape": [1, 2, 3],
        "n_classes": 4,
        "hidden": [5],
        "activation": "elu",
    }


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="hidden must be positive"):
        ReleasedMLP(hidden=[0])
    with pytest.raises(ConfigError, match="at least 10 x 10 pixels; got 8 x 8"):
        ReleasedCNN((1, 8, 8))
    with pytest.raises(ConfigError, match="hidden must be at least 1 and n_classes at least 2; got 0 and 10"):
        ReleasedCNN(hidden=0)


def test_classes_of_others_with_one_name_are_told_apart() -> None:
    def own(activation: type[nn.Module], module: str) -> ReleasedNetwork:
        class Own(ReleasedNetwork):
            def __init__(self) -> None:
                super().__init__()
                self.arguments = {"image_shape": [1, 8, 8], "n_classes": 10}
                self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), activation(), nn.Linear(10, 10))

            def initialize(self, generator: torch.Generator) -> None: ...

        Own.__module__ = module
        return Own()

    first = own(nn.ReLU, "one").architecture
    assert first == own(nn.ReLU, "one").architecture
    assert first != own(nn.ReLU, "two").architecture
    assert first != own(nn.Tanh, "one").architecture  # as after an edit
    assert "code" not in ReleasedMLP().architecture
