"""Wide residual networks against the sizes that their authors print, and their parts."""

from __future__ import annotations

import lit_recon._torchvision

import pytest
import torch

from lit_recon.errors import ConfigError
from lit_recon.models import Backbone, WideResNet
from lit_recon.models.classifiers.networks import WideBlock
from lit_recon.records import Normalization

PLAIN = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(("depth", "widening", "millions"), [(28, 10, 36.5), (40, 4, 8.9), (16, 8, 11.0), (40, 1, 0.6)])
def test_sizes_are_those_of_the_paper(depth: int, widening: int, millions: float) -> None:
    """As Zagoruyko and Komodakis print them, for ten classes."""
    with torch.device("meta"):
        trunk = WideResNet(depth=depth, widening=widening)
        head = torch.nn.Linear(trunk.out_features, 10)
    count = sum(parameter.numel() for module in (trunk, head) for parameter in module.parameters())
    assert round(count / 1e6, 1) == millions
    convolutions = [m for m in trunk.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions) == depth - 3  # the stem, and two in every block


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (4, 9, 17)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_features_of_any_image_size(norm: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    trunk = WideResNet(shape, 10, 1, norm=norm)  # type: ignore[arg-type]  # names in a table
    features = trunk(torch.randn(2, *shape))
    assert features.shape == (2, trunk.out_features) == (2, 64)
    assert not torch.allclose(features[0], features[1])


def test_a_block_without_its_last_convolution_is_its_shortcut() -> None:
    torch.manual_seed(0)
    for block in (WideBlock(4, 4, 1, "batch", "relu", 0.0), WideBlock(4, 8, 2, "batch", "relu", 0.0)):
        torch.nn.init.zeros_(block.convolutions[-1].weight)
        images = torch.randn(2, 4, 6, 6)
        block.eval()
        # In eval mode a fresh BatchNorm divides by the root of 1 + 1e-5.
        activated = torch.relu(images / (1 + 1e-5) ** 0.5)
        expected = images if block.shortcut is None else block.shortcut(activated)
        torch.testing.assert_close(block(images), expected)


def test_it_goes_through_a_checkpoints_arguments() -> None:
    trunk = WideResNet((3, 8, 8), 16, 2, activation="elu", dropout=0.3)
    again = WideResNet(**trunk.arguments)  # type: ignore[arg-type]  # what JSON can hold
    again.load_state_dict(trunk.state_dict())
    images = torch.rand(2, 3, 8, 8)
    first, second = (Backbone(each, 4, PLAIN).eval().features(images) for each in (trunk, again))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("wrong", [{"depth": 27}, {"depth": 4}, {"widening": 0}, {"dropout": 1.0}])
def test_what_is_no_such_network_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="depth must be 6 n"):
        WideResNet(**wrong)  # type: ignore[arg-type]
