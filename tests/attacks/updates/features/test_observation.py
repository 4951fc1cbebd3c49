"""End to end: a client with a real backbone and a wide feature layer, a defense, and the attacker's observation."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.layer import LayerGradient, RecoveredFeatures, layer_gradient
from lit_recon.attacks.updates.features.moments import MomentRecovery
from lit_recon.clients import Client, SecureAggregation
from lit_recon.defenses import (
    Chain,
    Defense,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
)
from lit_recon.errors import ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.metrics import feature_cosines, span_error
from lit_recon.models import MLP, Backbone, LeNet, Trunk, WideFeatureLayer
from lit_recon.records import Normalization, Observation

SHAPE = (1, 8, 8)
LABELS = (3, 7, 1, 1)


@pytest.fixture(scope="module")
def digits() -> Tensor:
    """Real 8x8 digits in [0, 1]."""
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().images).float()[:, None] / 16


def backbone(
    digits: Tensor,
    trunk: Literal["mlp", "lenet"] = "mlp",
    activation: Literal["relu", "gelu"] = "gelu",
    n_trained: int = 128,
    n_neurons: int = 1024,
) -> Backbone:
    torch.manual_seed(0)
    body: Trunk = MLP(SHAPE, [48]) if trunk == "mlp" else LeNet(SHAPE)
    layer = WideFeatureLayer(body.out_features, n_neurons, n_trained, activation)
    model = Backbone(body, 10, Normalization((0.3,), (0.35,)), layer).eval()
    layer.set_center(model.features(digits[100:400]).detach())
    return model


def attacked(model: Backbone, images: Tensor, defense: Defense | None = None) -> tuple[Observation, Tensor]:
    """What the attacker sees, and the true inputs of the feature layer."""
    seen = Client(model, defense=defense).observe(images, torch.tensor(LABELS[: len(images)]))
    assert model.feature_layer is not None
    truth = model.feature_layer.directions(model.features(images)).detach().double()
    return seen, torch.nn.functional.normalize(truth, dim=1)


def worst(found: RecoveredFeatures, truth: Tensor) -> float:
    return 1 - float(feature_cosines(found.features, truth).min())


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("trunk", ["mlp", "lenet"])
def test_features_of_real_images(
    digits: Tensor, trunk: Literal["mlp", "lenet"], activation: Literal["relu", "gelu"]
) -> None:
    seen, truth = attacked(backbone(digits, trunk, activation), digits[:4])
    found = ExactRecovery()(seen)
    assert found.exact
    assert found.signed
    assert worst(found, truth) < 1e-8  # measured 1e-13
    assert float(span_error(found.span.T, truth).mean()) < 1e-5
    assert float((found.features @ truth.T).amax(dim=0).min()) > 1 - 1e-8  # the sign, too
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(LABELS)
    # each feature carries the label of its own image
    order = (found.features @ truth.T).argmax(dim=0)
    assert found.labels[order].tolist() == list(LABELS)


@pytest.mark.parametrize("blocks", ["trained", "random"])
def test_one_kind_of_neurons_is_enough(digits: Tensor, blocks: str) -> None:
    # weights at initialization are so small that a GELU is nearly a square, behind which features cannot be told apart
    model = backbone(digits, activation="relu", n_trained=1024 if blocks == "trained" else 0)
    seen, truth = attacked(model, digits[:4])
    assert worst(ExactRecovery(("neurons",))(seen), truth) < 1e-8


@pytest.mark.parametrize(
    ("defense", "bound"),
    [
        (GradientClipping(1e-3), 1e-8),
        (GradientDropout(0.3, rescale=True), 1e-6),
        (GradientPruning(0.3, scope="tensor"), 1e-6),
        (Chain([GradientClipping(1.0), GaussianNoise(1e-3, relative=True)]), 1e-3),
    ],
    ids=["clipping", "dropout", "pruning", "noise"],
)
def test_defended_updates(digits: Tensor, defense: Defense, bound: float) -> None:
    seen, truth = attacked(backbone(digits), digits[:4], defense)
    assert worst(ExactRecovery()(seen), truth) < bound


def test_moments_of_an_observation(digits: Tensor) -> None:
    seen, truth = attacked(backbone(digits, n_neurons=8192, n_trained=0), digits[:2])
    assert float(span_error(MomentRecovery(control_variates=True)(seen).span.T, truth).mean()) < 0.3


def test_secure_aggregation_is_a_larger_batch(digits: Tensor) -> None:
    model = backbone(digits)
    client = Client(model, rule=lambda m, mode, loss: SecureAggregation(Client(m, mode, loss=loss)._operator, 2))
    seen = client.observe(digits[:4], torch.tensor(LABELS))
    assert model.feature_layer is not None
    assert worst(ExactRecovery()(seen), model.feature_layer.directions(model.features(digits[:4])).detach()) < 1e-8


def test_models_without_the_layer_are_refused(digits: Tensor) -> None:
    model = Backbone(MLP(SHAPE, [16]), 10, Normalization((0.3,), (0.35,)))
    seen = Client(model).observe(digits[:2], torch.tensor([1, 2]))
    with pytest.raises(UnsupportedModelError, match="build the backbone with feature_layer"):
        ExactRecovery()(seen)


def test_a_missing_head_is_refused(digits: Tensor) -> None:
    seen, _ = attacked(backbone(digits), digits[:2])
    seen.model.head = nn.Identity()
    with pytest.raises(UnsupportedModelError, match="head"):
        ExactRecovery()(seen)


def test_a_zero_gradient_is_refused(digits: Tensor) -> None:
    seen, _ = attacked(backbone(digits), digits[:2], GradientClipping(0.0))
    with pytest.raises(ThreatModelError, match="zero everywhere"):
        ExactRecovery()(seen)


def test_more_examples_than_features_are_refused(digits: Tensor) -> None:
    torch.manual_seed(0)
    model = Backbone(MLP(SHAPE, [3]), 10, Normalization((0.3,), (0.35,)), WideFeatureLayer(3, 64, 0))
    with pytest.raises(UnsupportedModelError, match="at most 3"):
        ExactRecovery()(attacked(model, digits[:4])[0])


def test_shapes_are_checked(digits: Tensor) -> None:
    seen = layer_gradient(attacked(backbone(digits), digits[:2])[0])
    with pytest.raises(ShapeError, match="bias_gradient"):
        LayerGradient(**{**vars(seen), "bias_gradient": seen.bias_gradient[:-1]})
