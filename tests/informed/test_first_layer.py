"""What an image itself left in the first layer is found exactly, and shows it better than the whole model does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lit_recon.data import Digits, ImageSet, InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.errors import ConfigError, LitReconError, ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.informed.first_layer import FirstLayer, FirstLayerRidge
from lit_recon.informed.kernel_ridge import KernelRidge
from lit_recon.informed.reconstructor import Background, FittedReconstructor, Reconstructor
from lit_recon.informed.shadow import GradientDescent, PrivateDescent, ShadowPlan
from lit_recon.models.released import ReleasedCNN, ReleasedMLP


def small_split(fixed: int = 30, shadow: int = 250, targets: int = 40) -> InformedSplit:
    return draw_informed_split(Digits(), InformedSplitSettings(fixed, shadow, targets))


@pytest.fixture(scope="module")
def split() -> InformedSplit:
    return small_split()


@pytest.fixture(scope="module")
def plan(split: InformedSplit) -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 8, 8), 10, [10]), split.fixed, GradientDescent(steps=40))


@pytest.fixture(scope="module")
def models(plan: ShadowPlan, split: InformedSplit) -> tuple[Tensor, Tensor]:
    """Shadow and released models."""

    def trained(purpose: str, images: ImageSet) -> Tensor:
        own = dataclasses.replace(plan, purpose=purpose)
        return own.train(images, range(len(images)), "hand", plan.reference())

    return trained("shadow", split.shadow), trained("released", split.targets)


def fit(attack: Reconstructor, plan: ShadowPlan, split: InformedSplit, shadows: Tensor) -> FittedReconstructor:
    informed = attack.informed(Background(plan))
    return informed.fit(shadows, split.shadow.pixels(), split.shadow.labels, 10)


def test_outside_the_fixed_set_there_is_the_image_alone(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    layer = FirstLayer.of(plan)
    fixed, own = split.fixed.pixels().flatten(1).double(), split.shadow.pixels().flatten(1).double()
    assert (fixed @ layer.outside).abs().max() < 1e-6
    torch.testing.assert_close(layer.outside.T @ layer.outside, torch.eye(layer.outside.shape[1]).double())
    trace = layer.trace(models[0])
    # Independent of the above: what least squares by the fixed images leaves of the true image.
    residual = own - (torch.linalg.lstsq(fixed.T, own.T, driver="gelsd").solution.T @ fixed)
    cosine = torch.nn.functional.cosine_similarity(trace.outside, residual).abs()
    assert cosine.min() > 0.999  # measured 0.99999
    assert trace.share.min() > 0.999


def test_the_weight_of_the_image_in_every_neuron_is_found(plan: ShadowPlan, split: InformedSplit) -> None:
    layer = FirstLayer.of(plan)
    images = split.fixed.pixels().flatten(1)
    generator = torch.Generator().manual_seed(0)
    own, weights, others = torch.rand(64, generator=generator), torch.randn(10, generator=generator), 0.1
    rows = weights[:, None] * own + others * torch.randn(10, 30, generator=generator) @ images
    rest = torch.randn(plan.known.n_parameters - 640, generator=generator)
    trace = layer.trace(torch.cat([rows.flatten(), rest])[None])
    sign = torch.sign((trace.neurons[0] * weights).sum())
    torch.testing.assert_close(sign * trace.neurons[0], (weights / weights.norm()).double(), rtol=0, atol=1e-5)
    # Features do not depend on the sign that the decomposition happens to give, once it is fixed by the image.
    torch.testing.assert_close(trace.features(torch.ones(1), 2.0), -trace.features(-torch.ones(1), 2.0))
    assert trace.features(torch.ones(1), 2.0).norm() == pytest.approx(1, abs=1e-6)


def test_it_beats_kernel_ridge_on_whole_models(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    targets = split.targets.pixels()
    errors = {}
    for name, attack in {"whole": KernelRidge(), "layer": FirstLayerRidge()}.items():
        fitted = fit(attack, plan, split, models[0])
        found = fitted.reconstruct(models[1])
        errors[name] = float((found.images - targets).square().mean())
        assert found.labels.shape == (40,)
    assert errors["layer"] < 0.7 * errors["whole"]
    assert fitted.facts["rank_one_share"] > 0.999
    assert fitted.facts["validation_mse"] > 0
    assert fitted.notes == ()


def test_signs_of_released_models_are_found(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    fitted = fit(FirstLayerRidge(), plan, split, models[0])
    found = fitted.reconstruct(models[0])
    # Of a shadow model both signs are tried, too; the right one gives its own image back.
    assert (found.images - split.shadow.pixels()).abs().max() < 0.05
    assert torch.equal(found.labels, split.shadow.labels)


def test_what_it_cannot_work_on_is_refused(plan: ShadowPlan, split: InformedSplit) -> None:
    def refused(error: type[LitReconError], match: str, **changes: object) -> None:
        with pytest.raises(error, match=match):
            FirstLayerRidge().informed(Background(dataclasses.replace(plan, **changes)))  # type: ignore[arg-type]

    wide = small_split(fixed=400, shadow=2, targets=1)
    refused(ConfigError, "images that span all", fixed=ImageSet(*spanning(wide)))
    refused(ConfigError, "got fresh weights", initialization="fresh")
    refused(ConfigError, "adam", descent=GradientDescent(optimizer="adam"))
    noisy = GradientDescent(dp=PrivateDescent(noise_multiplier=1.0))
    refused(ConfigError, "with known initial weights and without noise", descent=noisy)
    refused(UnsupportedModelError, "got ReleasedCNN", network=ReleasedCNN((1, 10, 10)))
    with pytest.raises(ThreatModelError, match="sees the whole model"):
        FirstLayerRidge().informed(Background())
    with pytest.raises(ThreatModelError, match="call informed"):
        FirstLayerRidge().fit(torch.zeros(2, 3), split.shadow.pixels()[:2], split.shadow.labels[:2], 10)
    with pytest.raises(ConfigError, match="emphasis must be above 0"):
        FirstLayerRidge(emphasis=0.0)
    with pytest.raises(ShapeError, match="whole models"):
        FirstLayer.of(plan).trace(torch.zeros(2, 7))


def spanning(split: InformedSplit) -> tuple[Tensor, Tensor, list[str], str]:
    """Images of which no pixel is always black."""
    noise = torch.randint(0, 255, split.fixed.images.shape, generator=torch.Generator().manual_seed(0))
    return noise.to(torch.uint8), split.fixed.labels, list(split.fixed.class_names), "noise"


def test_models_of_another_training_are_refused(plan: ShadowPlan, split: InformedSplit) -> None:
    noise = torch.randn(250, plan.known.n_parameters, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match=r"has rank one for \d+\.\d% only"):
        fit(FirstLayerRidge(), plan, split, noise)
