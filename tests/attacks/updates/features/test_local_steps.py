"""Updates of several local steps: the simulation against the client, and features from real clients."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.features.exact import ExactRecovery, UnrolledTraining
from lit_recon.attacks.updates.features.layer import layer_gradient
from lit_recon.attacks.updates.features.moments import MomentRecovery
from lit_recon.clients import Client, LocalSteps, SecureAggregation
from lit_recon.metrics import feature_cosines
from lit_recon.models import MLP, Backbone, WideFeatureLayer
from lit_recon.records import BatchNormMode, ForwardOperator, Loss, Normalization, Observation

SHAPE = (1, 8, 8)
LABELS = torch.tensor([3, 7, 0, 1])
#: Too little for the trunk to move in single precision.
STILL = 1e-12


def observed(
    activation: Literal["relu", "gelu"],
    double: bool = False,
    trunk_rate: float = STILL,
    release: Literal["gradient", "difference"] = "gradient",
    batches: int = 1,
    n_clients: int = 1,
    steps: int = 3,
    head_rate: float = 0.02,
) -> tuple[Observation, Tensor]:
    torch.manual_seed(0)
    layer = WideFeatureLayer(24, 512, 64, activation)
    model = Backbone(MLP(SHAPE, [24], "tanh"), 10, Normalization((0.5,), (0.3,)), layer)
    images = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(2))
    if double:
        model, images = model.double(), images.double()
    layer.set_center(model.features(images.flip(3)).detach())
    rates = {"trunk": trunk_rate, "head": head_rate}

    def rule(public: nn.Module, mode: BatchNormMode, _: Loss) -> ForwardOperator:
        own = LocalSteps(public, steps, 0.05, 0.5, rates, batches, release, batch_norm=mode)
        return own if n_clients == 1 else SecureAggregation(own, n_clients)

    client = Client(model.eval(), rule=rule)
    truth = layer.directions(model.features(images)).detach()
    return client.observe(images, LABELS), truth.double()


@pytest.mark.parametrize("release", ["gradient", "difference"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_truth_explains_the_update(
    activation: Literal["relu", "gelu"], release: Literal["gradient", "difference"]
) -> None:
    seen, truth = observed(activation, double=True, release=release)
    assert isinstance(seen.operator, LocalSteps)
    basis = torch.linalg.qr(truth.T).Q
    training = UnrolledTraining(layer_gradient(seen), basis, seen.operator)
    assert training.certificate(truth @ basis, LABELS) < 1e-9
    assert training.certificate(truth @ basis, LABELS.flip(0)) > 0.1
    assert 0 < training.rounding < 1e-2


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_unrolling_recovers_features(activation: Literal["relu", "gelu"]) -> None:
    seen, truth = observed(activation)
    one_step = ExactRecovery(("moments",)).recover(layer_gradient(seen))
    found = ExactRecovery(("moments",))(seen)
    assert found.exact
    assert "3 local steps were unrolled" in found.notes
    worst = 1 - float(feature_cosines(found.features, truth).min())
    # single-precision weight differences leave 1e-9; taken for a gradient, the update leaves 1e-6 to 1e-4
    assert worst < 1e-7
    assert worst < 0.1 * (1 - float(feature_cosines(one_step.features, truth).min()))


@pytest.mark.parametrize("head_rate", [0.002, 2.0])
def test_a_difference_of_weights_tells_the_same_whatever_the_rates_of_its_layers(head_rate: float) -> None:
    both: list[Literal["gradient", "difference"]] = ["gradient", "difference"]
    for recovery in (ExactRecovery(("moments",)), MomentRecovery()):
        gradient, difference = (
            recovery(observed("gelu", double=True, release=one, steps=1, head_rate=head_rate)[0]) for one in both
        )
        torch.testing.assert_close(difference.features, gradient.features, rtol=0.0, atol=1e-6)
        if gradient.labels is not None:
            assert difference.labels is not None
            assert difference.labels.tolist() == gradient.labels.tolist()
        assert difference.exact == gradient.exact


def test_a_moving_trunk_is_not_called_exact() -> None:
    seen, truth = observed("gelu", trunk_rate=0.1)
    found = ExactRecovery(("moments",))(seen)
    assert not found.exact
    assert float(feature_cosines(found.features, truth).min()) > 0.9


def test_mini_batches_are_not_unrolled() -> None:
    seen, _ = observed("gelu", batches=2)
    found = ExactRecovery(("moments",))(seen)
    assert "only whole batches" in " ".join(found.notes)
    assert found.features.isfinite().all()


def test_steps_of_several_clients_are_neither_unrolled_nor_noise() -> None:
    seen, truth = observed("gelu", n_clients=2)
    found = ExactRecovery(("moments",))(seen)
    assert "only whole batches of one client" in " ".join(found.notes)
    assert not found.exact
    assert float(feature_cosines(found.features, truth).min()) > 0.9
