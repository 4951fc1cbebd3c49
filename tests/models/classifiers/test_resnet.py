"""ResNet-18 against torchvision's, given the same weights."""

from __future__ import annotations

import lit_recon._torchvision

import pytest
import torch
from torch import nn

from lit_recon.errors import ConfigError
from lit_recon.models import Backbone, ResNet18
from lit_recon.records import Normalization

PLAIN = Normalization((0.0,) * 3, (1.0,) * 3)


def test_number_of_parameters() -> None:
    model = Backbone(ResNet18(), 10, PLAIN)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962


@pytest.mark.parametrize("training", [False, True])
def test_it_computes_what_torchvisions_does(training: bool) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    ours = Backbone(ResNet18((3, 12, 12)), 10, PLAIN).double()
    theirs = resnet18(num_classes=10).double()
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False).double(), nn.Identity()
    state = dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True))
    theirs.load_state_dict(state)
    images = torch.rand(2, 3, 12, 12, dtype=torch.float64)
    torch.testing.assert_close(ours.train(training)(images), theirs.train(training)(images))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("activation", ["relu", "elu", "gelu"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (4, 9, 17)])
def test_features_of_any_image_size(norm: str, activation: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    trunk = ResNet18(shape, norm=norm, activation=activation, width=4)  # type: ignore[arg-type]  # names in a table
    features = trunk(torch.randn(2, *shape))
    assert features.shape == (2, trunk.out_features) == (2, 32)
    assert not torch.allclose(features[0], features[1])


def test_group_norm_does_not_mix_the_images_of_a_batch() -> None:
    torch.manual_seed(0)
    trunk = ResNet18((3, 8, 8), norm="group", width=16)
    images = torch.rand(3, 3, 8, 8)
    torch.testing.assert_close(trunk(images)[:1], trunk(images[:1]))


def test_width_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="width must be at least 1"):
        ResNet18(width=0)
