"""Feature terms by hand, by their derivatives, and on a real model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.layer import RecoveredFeatures
from lit_recon.attacks.updates.features.matching import (
    FeatureMap,
    FeatureMatching,
    FeatureTerm,
    SignedCosine,
    SquaredCosine,
    SubspaceDistance,
    assigned,
)
from lit_recon.clients import Client
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import MLP, Backbone, ResNet18, WideFeatureLayer
from lit_recon.records import BatchNormMode, Normalization
from tests.attacks.updates.feature_maps.patch_victims import two_clients

SHAPE = (1, 8, 8)


def recovered(features: Tensor, signed: bool = True, labels: list[int] | None = None) -> RecoveredFeatures:
    basis = torch.linalg.qr(features.double().T).Q
    classes = None if labels is None else torch.tensor(labels)
    return RecoveredFeatures(features.double(), basis, "test", signed=signed, labels=classes)


def test_values_by_hand() -> None:
    targets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    features = torch.tensor([[3.0, 0.0, 0.0], [0.0, -1.0, 1.0]])
    assert float(SquaredCosine(1.0)(features, targets)) == pytest.approx(0.25)
    assert float(SignedCosine(1.0)(features, targets)) == pytest.approx((1 + 1 / math.sqrt(2)) / 2)
    span = SubspaceDistance(1.0).targets_for(recovered(targets), features)
    assert float(SubspaceDistance(1.0)(features, span)) == pytest.approx(0.25)


@pytest.mark.parametrize("term", [SquaredCosine(1.0), SignedCosine(1.0), SubspaceDistance(1.0)])
def test_derivatives(term: FeatureTerm) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    found = recovered(torch.randn(3, 6, generator=generator))
    targets = term.targets_for(found, features)
    assert torch.autograd.gradcheck(lambda x: term(x, targets), features)
    assert float(term(found.features, term.targets_for(found, found.features))) == pytest.approx(0, abs=1e-12)


def test_only_the_squared_form_is_blind_to_the_sign() -> None:
    targets = torch.eye(3)[:2]
    assert float(SquaredCosine(1.0)(-targets, targets)) == pytest.approx(0)
    assert float(SignedCosine(1.0)(-targets, targets)) == pytest.approx(2)
    with pytest.raises(ConfigError, match="known sign"):
        SignedCosine(1.0).check(recovered(targets, signed=False))
    SignedCosine(1.0).check(recovered(targets))
    SquaredCosine(1.0).check(recovered(targets, signed=False))


def test_assignment_by_likeness_and_by_label() -> None:
    found = recovered(torch.eye(3)[:2], labels=[5, 7])
    candidates = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.2, 0.0]])
    assert assigned(found, candidates).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert assigned(found, candidates, torch.tensor([5, 7])).tolist() == [[1, 0, 0], [0, 1, 0]]
    mirrored = torch.tensor([[-1.0, 0.2, 0.0], [0.1, 0.1, 0.0]])
    assert assigned(recovered(torch.eye(3)[:2], signed=False), mirrored).tolist() == [[1, 0, 0], [0, 1, 0]]
    # three candidates and two features: the third shares
    three = torch.cat([candidates, torch.tensor([[0.0, 1.0, 0.0]])])
    assert assigned(found, three).tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]


def test_features_of_candidates_are_those_that_were_recovered() -> None:
    torch.manual_seed(0)
    layer = WideFeatureLayer(24, 512, 0, "gelu")
    model = Backbone(MLP(SHAPE, [24]), 10, Normalization((0.5,), (0.3,)), layer).eval()
    images = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1))
    layer.set_center(model.features(images.flip(3)).detach())
    seen = Client(model).observe(images, torch.tensor([1, 2, 3]))
    found = ExactRecovery()(seen)
    candidates = images.clone().requires_grad_()
    features = FeatureMap(seen)(candidates)
    term = SignedCosine(1.0)
    targets = term.targets_for(found, features, torch.tensor([1, 2, 3]))
    value = term(features, targets)
    assert float(value.detach()) < 1e-5
    (slope,) = torch.autograd.grad(value, candidates)
    assert slope.isfinite().all()
    assert float(term(FeatureMap(seen)(images.flip(0)), targets)) > 0.05


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_features_of_clients_are_those_by_the_statistics_of_their_own_images(mode: BatchNormMode) -> None:
    torch.manual_seed(0)
    layer = WideFeatureLayer(32, 512, 0, "gelu")
    model = Backbone(ResNet18((3, 8, 8), width=4), 10, Normalization((0.5,) * 3, (0.3,) * 3), layer).eval()
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    layer.set_center(model.features(images.flip(3)).detach())
    seen = Client(model, mode, rule=two_clients).observe(images, torch.arange(4))
    penalty = FeatureMatching(ExactRecovery(), SignedCosine(1.0)).prepare(seen)
    assert penalty.recovered.exact
    targets = penalty.targets(images, torch.arange(4))
    assert float(penalty.penalty(images, targets, 0.0)) < 1e-5


def test_models_without_the_layer_are_refused() -> None:
    torch.manual_seed(0)
    model = Backbone(ResNet18((3, 8, 8), width=4), 10, Normalization((0.5,) * 3, (0.3,) * 3)).eval()
    seen = Client(model).observe(torch.rand(1, 3, 8, 8), torch.tensor([1]))
    with pytest.raises(UnsupportedModelError, match="drop the feature term"):
        FeatureMap(seen)


@pytest.mark.parametrize("arguments", [(-1.0, 0.0), (1.0, 1.0), (1.0, -0.1)])
def test_settings_out_of_range(arguments: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="SquaredCosine needs"):
        SquaredCosine(*arguments)
