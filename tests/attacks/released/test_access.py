"""What an adversary sees of a model is a function of its weights, and enough to find the image."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lit_recon.attacks.released import BlackBox, LayersOnly, ModelAccess, WholeModel
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.shadow import GradientDescent, ShadowPlan
from lit_recon.data import ImageSet, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, LitReconError, ShapeError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP
from tests.attacks.shadow.conftest import random_images

OUTPUTS: tuple[Literal["logits", "probabilities"], ...] = ("logits", "probabilities")


@pytest.fixture(scope="module")
def plan() -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 5, 5), 4, [6]), random_images(15, 0), GradientDescent(steps=8, snapshots=[3]))


@pytest.fixture(scope="module")
def public() -> ImageSet:
    return random_images(7, 1)


@pytest.fixture(scope="module")
def trained(plan: ShadowPlan, public: ImageSet) -> Tensor:
    """Differences of the models of the public images, of two steps each."""
    return plan.train(public, range(7), "batched_mlp", plan.reference())


@pytest.mark.parametrize("output", OUTPUTS)
def test_answers_are_those_of_the_released_models(
    plan: ShadowPlan, public: ImageSet, trained: Tensor, output: Literal["logits", "probabilities"]
) -> None:
    features = BlackBox(output, images=3).feature_map(plan, public)(trained)
    assert features.shape == (7, 2 * 3 * 4)
    network, asked = ReleasedMLP((1, 5, 5), 4, [6]).double(), public.pixels()[:3].double()

    def answers(weights: Tensor) -> Tensor:
        vector_to_parameters(weights, network.parameters())
        logits: Tensor = network(asked).detach()
        return logits if output == "logits" else logits.softmax(1)

    for step, (weights, usual) in enumerate(
        zip(trained.double().split(184, 1), plan.reference().split(184), strict=True)
    ):
        expected = torch.stack([answers(usual + own) - answers(usual) for own in weights])
        # Measured 1e-8; differences are rounded to float32.
        torch.testing.assert_close(features.view(7, 2, 3, 4)[:, step], expected.float(), rtol=1e-5, atol=1e-7)
    with pytest.raises(ShapeError, match="models must have 368 weights"):
        BlackBox(output, images=3).feature_map(plan, public)(trained[:, 1:])


def test_layers_are_those_of_the_network(plan: ShadowPlan, public: ImageSet, trained: Tensor) -> None:
    early, late = trained.split(184, dim=1)
    assert torch.equal(WholeModel().feature_map(plan, public)(trained), trained)
    for names, part in {
        ("last",): slice(156, 184),
        ("layers.3.bias",): slice(180, 184),
        ("first",): slice(0, 156),
        ("first", "layers.3", "layers.1.bias"): slice(0, 184),
    }.items():
        seen = LayersOnly(names).feature_map(plan, public)(trained)
        assert torch.equal(seen, torch.cat([early[:, part], late[:, part]], dim=1))
    convolutions = LayersOnly(["layers.0", "layers.2"]).describe(ReleasedCNN(), public)
    assert convolutions.shown == "the weights of layers.0 and layers.2, 9008 of 55208"
    assert convolutions.hidden == "The weights of its other layers."
    assert not LayersOnly(["layers"]).describe(plan.network, public).hidden
    assert len(parameters_to_vector(plan.network.parameters())) == 184


@pytest.mark.parametrize(
    ("access", "error", "complaint"),
    [
        (LayersOnly(["layers.2"]), ConfigError, r"first, last, or layers .* layers.1.weight, .*; got \['layers.2'\]"),
        (LayersOnly(["last", "layer"]), ConfigError, r"got \['layer'\]"),
        (LayersOnly([]), ConfigError, "got none"),
        (BlackBox(images=8), ConfigError, "at most split.shadow=7; got 8"),
    ],
)
def test_views_of_nothing_are_refused(
    plan: ShadowPlan, public: ImageSet, access: ModelAccess, error: type[LitReconError], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        access.describe(plan.network, public)
    with pytest.raises(error, match=complaint):
        access.feature_map(plan, public)
    with pytest.raises(ConfigError, match="access.images must be at least 1"):
        BlackBox(images=0)


def test_one_store_of_models_serves_every_view() -> None:
    split = draw_informed_split(Digits(), InformedSplitSettings(fixed=80, shadow=300, targets=60))
    plan = ShadowPlan(ReleasedMLP((1, 8, 8), 10, [10]), split.fixed, GradientDescent(steps=40))
    reference, targets = plan.reference(), split.targets.pixels()
    shadow = plan.train(split.shadow, range(300), "batched_mlp", reference)
    released = dataclasses.replace(plan, purpose="released").train(split.targets, range(60), "batched_mlp", reference)
    mean_image = float((split.shadow.pixels().mean(0) - targets).square().mean())

    def error(access: ModelAccess) -> float:
        feature_map = access.feature_map(plan, split.shadow)
        fitted = KernelRidge().fitted(feature_map(shadow), split.shadow.pixels(), split.shadow.labels, 10)
        return float((fitted.reconstruct(feature_map(released)).images - targets).square().mean()) / mean_image

    # Measured 0.24, 0.28, 0.29 and 0.38 of the mean image's error.
    whole, last = error(WholeModel()), error(LayersOnly(["last"]))
    logits, probabilities = (error(BlackBox(output, images=100)) for output in OUTPUTS)
    assert whole < min(last, logits) < max(last, logits) < 0.4
    assert logits < probabilities < 0.5
