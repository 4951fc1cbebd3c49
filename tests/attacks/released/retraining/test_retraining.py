"""A guess becomes the image itself when the training is repeated until its weights agree."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lit_recon.attacks.released.base import Background
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.retraining.descent import Retraining, trained_weights
from lit_recon.attacks.shadow import GradientDescent, PrivateDescent, ShadowPlan, train_models
from lit_recon.data import InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.models.released import ReleasedMLP


@pytest.fixture(scope="module")
def split() -> InformedSplit:
    return draw_informed_split(Digits(), InformedSplitSettings(fixed=20, shadow=60, targets=4))


@pytest.fixture(scope="module")
def plan(split: InformedSplit) -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 8, 8), 10, [6]), split.fixed, GradientDescent(steps=8))


def test_the_differentiable_training_is_the_training(plan: ShadowPlan, split: InformedSplit) -> None:
    images, labels = split.targets.pixels(), split.targets.labels
    start = plan.initial_weights()
    ours = trained_weights(plan.known, start, images, labels)
    theirs = train_models(plan.known, start, images, labels, "loop")  # torch.optim.SGD's own arithmetic
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_its_gradient_is_that_of_finite_differences(plan: ShadowPlan, split: InformedSplit) -> None:
    known = plan.known.on("cpu", torch.float64)
    start, labels = plan.initial_weights().double(), split.targets.labels[:1]
    images = split.targets.pixels()[:1].double().requires_grad_(True)
    direction = torch.randn(known.n_parameters, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradient = torch.autograd.grad((trained_weights(known, start, images, labels) @ direction).sum(), images)[0]
    for pixel in (10, 35):
        step = torch.zeros_like(images).flatten()
        step[pixel] = 1e-6
        values = [
            trained_weights(known, start, images.detach() + sign * step.view_as(images), labels) @ direction
            for sign in (1, -1)
        ]
        difference = float((values[0] - values[1]).sum() / 2e-6)
        assert float(gradient.flatten()[pixel]) == pytest.approx(difference, rel=1e-5, abs=1e-9)


@pytest.mark.slow
def test_a_first_guess_becomes_the_image(plan: ShadowPlan, split: InformedSplit) -> None:
    reference = plan.reference()
    shadows = plan.train(split.shadow, range(60), "batched_mlp", reference)
    released = dataclasses.replace(plan, purpose="released").train(split.targets, range(4), "batched_mlp", reference)
    background, shadow = Background(plan), split.shadow
    first = KernelRidge().fitted(shadows, shadow.pixels(), shadow.labels, 10).reconstruct(released)
    fitted = Retraining(KernelRidge(), steps=40, lr=0.03, together=3).bind(background)
    best = fitted.fitted(shadows, shadow.pixels(), shadow.labels, 10)
    found = best.reconstruct(released)
    right = first.labels == split.targets.labels
    assert right.any()
    before, after = (
        (one.images - split.targets.pixels()).square().mean((1, 2, 3))[right].mean() for one in (first, found)
    )
    assert after < 0.2 * before
    assert torch.equal(found.labels, first.labels)
    assert found.uncertainty[right].max() < 0.5
    assert best.facts["validation_mse"] > 0
    assert "40 steps on the distance" in best.notes[-1]


def test_what_it_cannot_repeat_is_refused(plan: ShadowPlan, split: InformedSplit) -> None:
    for descent in (
        GradientDescent(dp=PrivateDescent(noise_multiplier=0.0)),
        GradientDescent(batch_size=5),
        GradientDescent(snapshots=[3]),
    ):
        with pytest.raises(ConfigError, match="needs a deterministic training"):
            Retraining().bind(Background(dataclasses.replace(plan, descent=descent)))
    with pytest.raises(ConfigError, match="needs a deterministic training"):
        Retraining().bind(Background(dataclasses.replace(plan, initialization="fresh")))
    with pytest.raises(ConfigError, match="gradient descent with momentum; got adam"):
        Retraining().bind(Background(dataclasses.replace(plan, descent=GradientDescent(optimizer="adam"))))
    with pytest.raises(ThreatModelError, match="sees the whole model"):
        Retraining().bind(Background())
    with pytest.raises(ThreatModelError, match=r"call bind\(Background\(plan\)\) before"):
        Retraining().fitted(torch.zeros(2, 3), split.shadow.pixels()[:2], split.shadow.labels[:2], 10)
    for wrong in ({"steps": 0}, {"together": 0}, {"lr": 0.0}):
        with pytest.raises(ConfigError, match="steps and together"):
            Retraining(**wrong)
