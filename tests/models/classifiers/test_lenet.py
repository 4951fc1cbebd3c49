"""LeNet as in Zhu et al. 2019."""

from __future__ import annotations

import pytest
import torch

from lit_recon.errors import ConfigError
from lit_recon.models import Backbone, LeNet
from lit_recon.records import Normalization


def test_size_of_the_published_network() -> None:
    """Zhu et al.: 3 x 32 x 32 images, 768 features, 100 classes."""
    model = Backbone(LeNet(), 100, Normalization((0.0,) * 3, (1.0,) * 3))
    assert model.trunk.out_features == 768
    assert sum(parameter.numel() for parameter in model.parameters()) == 912 + 2 * 3_612 + 76_900


def test_weights_and_biases_start_uniform_in_half() -> None:
    torch.manual_seed(0)
    for parameter in LeNet(width=40).parameters():
        assert parameter.abs().max() <= 0.5
    weights = torch.cat([parameter.detach().flatten() for parameter in LeNet(width=40).parameters()])
    assert float(weights.std()) == pytest.approx(12**-0.5, rel=0.02)
    assert weights.abs().max() > 0.49


@pytest.mark.parametrize(
    ("shape", "n_features"), [((1, 8, 8), 48), ((1, 28, 28), 588), ((3, 33, 35), 972), ((1, 5, 6), 48)]
)
def test_features_of_any_image_size(shape: tuple[int, int, int], n_features: int) -> None:
    trunk = LeNet(shape)
    assert trunk.out_features == n_features
    assert trunk(torch.rand(2, *shape)).shape == (2, n_features)


def test_sigmoid_is_the_default() -> None:
    features = LeNet()(torch.randn(2, 3, 32, 32))
    assert features.min() > 0
    assert features.max() < 1
    assert LeNet(activation="elu")(torch.randn(2, 3, 32, 32)).min() < 0


def test_initial_range_is_that_of_all_weights() -> None:
    torch.manual_seed(0)
    weights = torch.cat([parameter.detach().flatten() for parameter in LeNet(initial_range=0.05).parameters()])
    assert 0.049 < weights.abs().max() <= 0.05


@pytest.mark.parametrize("wrong", [0.0, -0.5, float("nan"), float("inf")])
def test_initial_range_must_be_positive_and_finite(wrong: float) -> None:
    with pytest.raises(ConfigError, match="initial_range must be above 0 and finite"):
        LeNet(initial_range=wrong)


def test_width_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="width must be at least 1"):
        LeNet(width=0)
