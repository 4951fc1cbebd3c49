"""What every reconstructor promises: copies instead of changes, and one refusal of bad shadow models.

A new reconstructor joins the table; a test below notices one that did not.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released import (
    AndersonRetraining,
    Background,
    Ensemble,
    FirstLayerRidge,
    KernelRidge,
    NewtonRetraining,
    ReconstructedTargets,
    Reconstructor,
    Retraining,
)
from lit_recon.attacks.released.ensemble import Adapted
from lit_recon.attacks.released.networks import ComponentsReconstructor, ConvolutionalReconstructor, NeuralReconstructor
from lit_recon.attacks.released.networks.convolutional import PerceptualLoss
from lit_recon.attacks.shadow import GradientDescent, ShadowPlan
from lit_recon.data import InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.errors import ShapeError, ThreatModelError
from lit_recon.models.released import ReleasedMLP
from tests.contracts.discovery import missing

N_SHADOWS, N_TARGETS = 40, 3


class NearestShadow(Reconstructor):
    """The image of the nearest shadow model: a reconstructor as someone writes it outside the package."""

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.shadows = differences, images, labels

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        known, images, labels = self.shadows
        distances, nearest = torch.cdist(differences, known).min(dim=1)
        return ReconstructedTargets(images[nearest], labels[nearest], distances)


class AlwaysGray(Reconstructor):
    """An image without content: a reconstructor that is fitted without shadow models."""

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        pass

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        n = len(differences)
        return ReconstructedTargets(torch.full((n, 1, 8, 8), 0.5), torch.zeros(n, dtype=torch.int64), torch.ones(n))


RECONSTRUCTORS: dict[str, Reconstructor] = {
    "from outside the package": NearestShadow(),
    "kernel ridge": KernelRidge(),
    "first layer": FirstLayerRidge(),
    "descent": Retraining(NearestShadow(), steps=2),
    "fixed point": AndersonRetraining(steps=2, restarts=0),
    "newton": NewtonRetraining(trainings=2, evaluations=10),
    "ensemble": Ensemble([NearestShadow(), FirstLayerRidge()]),
    "perceptron": NeuralReconstructor([8], epochs=1, accelerator="cpu"),
    "components": ComponentsReconstructor(4, [8], epochs=1, accelerator="cpu"),
    "convolutional": ConvolutionalReconstructor(
        PerceptualLoss("none"), adversarial=0.0, epochs=1, batch_size=N_SHADOWS, accelerator="cpu"
    ),
    "corrected on the shadow models": Adapted(AlwaysGray(), NearestShadow()),
}


@pytest.fixture(params=RECONSTRUCTORS.values(), ids=RECONSTRUCTORS.keys())
def attack(request: pytest.FixtureRequest) -> Reconstructor:
    return copy.deepcopy(request.param)


@pytest.fixture(scope="module")
def split() -> InformedSplit:
    return draw_informed_split(Digits(), InformedSplitSettings(fixed=60, shadow=N_SHADOWS, targets=N_TARGETS))


@pytest.fixture(scope="module")
def plan(split: InformedSplit) -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 8, 8), 10, [6]), split.fixed, GradientDescent(steps=20))


@pytest.fixture(scope="module")
def shadows(plan: ShadowPlan, split: InformedSplit) -> tuple[Tensor, Tensor, Tensor, int]:
    differences = plan.train(split.shadow, range(N_SHADOWS), "batched_mlp", plan.reference())
    return differences, split.shadow.pixels(), split.shadow.labels, 10


def test_the_table_holds_every_reconstructor() -> None:
    assert missing(Reconstructor, RECONSTRUCTORS.values()) == []


def state(attack: Reconstructor) -> dict[str, Any]:
    return {name: id(value) for name, value in vars(attack).items()}


def test_binding_and_fitting_leave_the_original_as_it_was(
    attack: Reconstructor, plan: ShadowPlan, split: InformedSplit, shadows: tuple[Tensor, Tensor, Tensor, int]
) -> None:
    before = repr(attack), state(attack)
    bound = attack.bind(Background(plan))
    assert (repr(attack), state(attack)) == before
    between = state(bound)
    fitted = bound.fitted(*shadows)
    assert state(bound) == between
    released = plan.train(split.targets, range(N_TARGETS), "batched_mlp", plan.reference())
    found = fitted.reconstruct(released)
    assert found.images.shape == (N_TARGETS, 1, 8, 8)
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert found.labels.dtype == torch.int64
    assert found.labels.shape == found.uncertainty.shape == (N_TARGETS,)
    assert all(isinstance(value, float) for value in fitted.facts.values())
    assert all(note.endswith(".") for note in fitted.notes)
    again = bound.fitted(*shadows).reconstruct(released)
    assert torch.equal(again.images, found.images)


def test_bad_shadow_models_are_refused(
    attack: Reconstructor, plan: ShadowPlan, shadows: tuple[Tensor, Tensor, Tensor, int]
) -> None:
    differences, images, labels, n_classes = shadows
    bound = attack.bind(Background(plan))
    with pytest.raises(ShapeError, match="two or more shadow models"):
        bound.fitted(differences, images[1:], labels, n_classes)
    with pytest.raises(ShapeError, match=r"in \[0, 1\]"):
        bound.fitted(differences, images + 1, labels, n_classes)
    with pytest.raises(ShapeError, match="labels must be 0 to 1"):
        bound.fitted(differences, images, labels, 2)


def test_what_needs_a_background_says_so(attack: Reconstructor, shadows: tuple[Tensor, Tensor, Tensor, int]) -> None:
    if not attack.needs_background:
        pytest.skip("it needs none")
    with pytest.raises(ThreatModelError, match=rf"{type(attack).__name__} needs .* call bind\(Background\(plan\)\)"):
        attack.fitted(*shadows)


def test_facts_and_notes_of_a_first_guess_are_handed_on(
    plan: ShadowPlan, shadows: tuple[Tensor, Tensor, Tensor, int]
) -> None:
    fitted = AndersonRetraining(FirstLayerRidge(), steps=2, restarts=0).bind(Background(plan)).fitted(*shadows)
    assert {"rank_one_share", "bandwidth", "ridge", "validation_mse"} == fitted.facts.keys()
    (note,) = fitted.notes
    assert "up to 2 trainings" in note
