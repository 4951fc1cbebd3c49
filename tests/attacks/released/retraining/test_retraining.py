"""A guess becomes the image itself when the training is repeated until its weights agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.retraining import descent as module
from lit_recon.attacks.released.retraining.descent import DescentState, Retraining, pulled_back, training_path
from lit_recon.attacks.shadow import GradientDescent, PrivateDescent, ShadowPlan, train_models
from lit_recon.data import ImageSet, InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, CorruptFileError, ThreatModelError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP, ReleasedNetwork


class Gray(Reconstructor):
    """An image without content, with the first label."""

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.shape = images.shape[1:]

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        n = len(differences)
        return ReconstructedTargets(torch.full((n, *self.shape), 0.5), torch.zeros(n, dtype=torch.int64), torch.ones(n))


def random_images(n: int, side: int = 10) -> ImageSet:
    images = torch.rand(n, 1, side, side, generator=torch.Generator().manual_seed(0))
    return ImageSet((255 * images).byte(), torch.arange(n) % 3, ["a", "b", "c"], "noise")


@pytest.fixture(scope="module")
def split() -> InformedSplit:
    return draw_informed_split(Digits(), InformedSplitSettings(fixed=20, shadow=60, targets=4))


@pytest.fixture(scope="module")
def plan(split: InformedSplit) -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 8, 8), 10, [6]), split.fixed, GradientDescent(steps=8))


def test_the_path_of_weights_is_the_training(plan: ShadowPlan, split: InformedSplit) -> None:
    images, labels = split.targets.pixels(), split.targets.labels
    start = plan.initial_weights()
    theirs = train_models(plan.known, start, images, labels, "loop")  # torch.optim.SGD's own arithmetic
    for image, label, weights in zip(images, labels, theirs, strict=True):
        path = list(training_path(plan.known, start, image, label))
        assert len(path) == 9
        torch.testing.assert_close(path[-1], weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [ReleasedMLP, ReleasedCNN])
def test_its_derivative_is_that_of_finite_differences(
    kind: type[ReleasedNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 7)  # of 20 images
    images = random_images(21)
    plan = ShadowPlan(kind((1, 10, 10), 3), images.subset(torch.arange(20)), GradientDescent(steps=8, lr=0.05))
    known = plan.known.on("cpu", torch.float64)
    start, label, image = plan.initial_weights().double(), images.labels[20], images.pixels()[20].double()
    covector = torch.randn(known.n_parameters, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def product(image: Tensor) -> float:
        *_, last = training_path(known, start, image, label)
        return float(last @ covector)

    found = pulled_back(known, list(training_path(known, start, image, label))[:-1], image, label, covector)
    for pixel in (10, 35):
        step = torch.zeros_like(image).flatten()
        step[pixel] = 1e-6
        difference = (product(image + step.view_as(image)) - product(image - step.view_as(image))) / 2e-6
        assert float(found.flatten()[pixel]) == pytest.approx(difference, rel=1e-5, abs=1e-8)


@pytest.mark.slow
def test_a_first_guess_becomes_the_image(plan: ShadowPlan, split: InformedSplit) -> None:
    reference = plan.reference()
    shadows = plan.train(split.shadow, range(60), "batched_mlp", reference)
    released = dataclasses.replace(plan, purpose="released").train(split.targets, range(4), "batched_mlp", reference)
    background, shadow = Background(plan), split.shadow
    first = KernelRidge().fitted(shadows, shadow.pixels(), shadow.labels, 10).reconstruct(released)
    fitted = Retraining(KernelRidge(), steps=40, lr=0.03).bind(background)
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
    assert found.certified is not None
    assert torch.equal(found.certified, found.uncertainty <= 0.01)
    assert best.facts["validation_mse"] > 0
    assert "40 steps on the distance" in best.notes[-1]


def test_a_killed_search_goes_on_where_it_stopped(
    plan: ShadowPlan, split: InformedSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, labels = plan.train(split.targets, range(2), "loop", plan.reference()), split.shadow.labels[:2]

    def found(folder: Path | None, announced: list[int]) -> tuple[Tensor, Tensor]:
        background = Background(plan, folder, lambda total, label, unit: announced.append)
        fitted = Retraining(Gray(), steps=12).bind(background).fitted(released, split.shadow.pixels()[:2], labels, 10)
        result = fitted.reconstruct(released)
        return result.images, result.uncertainty

    whole = found(None, [])
    after, done, begun = DescentState.next, [], []

    def killed(self: DescentState, *arguments: Any) -> DescentState:
        begun.append(int(self.step))
        if len(begun) == 21:  # the eighth step for the second image
            raise KeyboardInterrupt
        return after(self, *arguments)

    with monkeypatch.context() as context:
        context.setattr(DescentState, "next", killed)
        with pytest.raises(KeyboardInterrupt):
            found(tmp_path, [])
    assert len(list(tmp_path.glob("descent_*.safetensors"))) == 2
    again = found(tmp_path, done)
    assert torch.equal(again[0], whole[0])
    assert torch.equal(again[1], whole[1])
    assert done == [13, 5] + 8 * [1]
    for path in tmp_path.glob("descent_*.safetensors"):
        path.write_bytes(b"nothing")
    with pytest.raises(CorruptFileError, match="delete it to start over"):
        found(tmp_path, [])


def test_nothing_is_certified_where_other_images_give_the_same_weights() -> None:
    """Convolutions with a stride of 2 leave out the last row and column of images with odd sides."""
    for side, unseen in ((10, False), (11, True)):
        fixed = random_images(12, side)
        plan = ShadowPlan(ReleasedCNN((1, side, side), 3), fixed, GradientDescent(steps=2))
        released = plan.train(fixed.subset(torch.tensor([0])), range(1), "loop", plan.reference())
        fitted = Retraining(Gray(), steps=1, certain=0.999).bind(Background(plan))
        found = fitted.fitted(released.expand(2, -1), fixed.pixels()[:2], fixed.labels[:2], 3).reconstruct(released)
        assert found.uncertainty.max() < 0.999
        assert found.certified is not None
        assert bool(found.certified.all()) is not unseen
        assert ("No image is certified: 21 of 121 pixels do not enter the network." in fitted.notes) is unseen


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
    for wrong in ({"steps": 0}, {"lr": 0.0}, {"certain": 0.0}, {"certain": 1.0}):
        with pytest.raises(ConfigError, match="steps must be at least 1, lr above 0 and certain between 0 and 1"):
            Retraining(**wrong)
