"""Maps and images from the last layer to the first, where few entries of an update are left."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import (
    LBFGS,
    FeaturesOnly,
    FirstApplicable,
    GradientMatching,
    MapMatching,
    PatchMatching,
    Pixels,
    TopDownMatching,
    TotalVariation,
)
from lit_recon.attacks.updates.feature_maps.relu_network import ReluNetwork
from lit_recon.attacks.updates.feature_maps.top_down import TopDown
from lit_recon.attacks.updates.feature_maps.top_down_matching import TopDownPenalty
from lit_recon.clients.client import Client, ClientSettings
from lit_recon.defenses import Defense, GaussianNoise, GradientDropout, GradientPruning, OptimalGradientPruning
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone, WideFeatureLayer
from lit_recon.models.classifiers.networks import ConvNet, ResNet18
from lit_recon.records import Knowledge, Normalization, Observation

SIDE = 16
LABEL = torch.tensor([2])


def network(activation: str = "relu", norm: str = "batch") -> Backbone:
    """ResNet-18 of a half of its width with a wide layer, and statistics that images have about."""
    torch.manual_seed(0)
    trunk = ResNet18((3, SIDE, SIDE), norm=norm, activation=activation, width=32)  # type: ignore[arg-type]
    layer = WideFeatureLayer(trunk.out_features, 1024, 512, activation="gelu")
    model = Backbone(trunk, 5, Normalization((0.5,) * 3, (0.25,) * 3), layer)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.rand(32, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5)))
    return model.eval()


def observed(image: Tensor, defense: Defense, model: Backbone | None = None, mode: str = "eval") -> Observation:
    client = Client(model or network(), mode, defense=defense)  # type: ignore[arg-type]
    return client.observe(image, LABEL, Knowledge(), torch.Generator().manual_seed(0))


@pytest.fixture
def image(photographs: Tensor) -> Tensor:
    return photographs[:1, :, ::2, ::2].contiguous()


def searching(seen: Observation) -> tuple[TopDownPenalty, TopDown]:
    """The penalty before the label is known, and the search, whose network has the features."""
    penalty = TopDownMatching().prepare(seen)
    search = TopDown(seen, penalty.network, LABEL)
    center = seen.model.get_buffer("feature_layer.center").double()
    length = search.length(center, penalty.direction)
    assert length is not None
    penalty.network.features = center + length * penalty.direction
    return penalty, search


@pytest.mark.parametrize("defense", [OptimalGradientPruning(0.9), GradientDropout(0.9)])
def test_features_have_their_length(image: Tensor, defense: Defense) -> None:
    seen = observed(image, defense)
    penalty, _ = searching(seen)
    with torch.no_grad():
        truth = seen.model.trunk((image - 0.5) / 0.25)[0].double()  # type: ignore[operator, union-attr]
    found = penalty.network.features
    assert found is not None
    assert float((found - truth).norm() / truth.norm()) < 1e-4


def test_derivatives_behind_the_true_maps_are_those_of_the_gradient(image: Tensor) -> None:
    seen = observed(image, GradientDropout(0.9))
    penalty, search = searching(seen)
    maps = penalty.network.activations(image)
    active = {number: (one > 0).double() for number, one in enumerate(maps)}
    for step in penalty.network.steps:
        derivative = penalty.network.derivative(step, active, maps, LABEL) * active[step.relu]
        weight = f"{step.convolution.name}.weight"
        fitted = torch.nn.grad.conv2d_weight(
            maps[step.before][None],
            seen.parameters[weight].shape,
            derivative[None],
            stride=step.convolution.stride,
            padding=step.convolution.padding,
        )
        kept = seen.update[weight] != 0
        torch.testing.assert_close(fitted[kept], seen.update[weight][kept].double(), rtol=1e-3, atol=1e-7)
        sums = search._sums(step)
        assert sums is not None
        known = sums != 0
        torch.testing.assert_close(derivative.sum((1, 2))[known], sums[known], rtol=1e-3, atol=1e-7)


if __name__ == "__main__":
    import time
    from tests.conftest import *
