"""The Cocktail Party Attack on a convolutional network: features unmixed, then inverted, on real digits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import (
    CocktailParty,
    ExactRecovery,
    FeatureMatching,
    FeatureRecovery,
    FeaturesOnly,
    GlobalCosine,
    GradientMatching,
    HeadCounts,
    JointLabels,
    KnownLabels,
    Objective,
    SignedCosine,
    TotalVariation,
)
from lit_recon.attacks.updates.gradient_matching.objectives import ObservedUpdate
from lit_recon.attacks.updates.gradient_matching.priors import BatchNormPrior
from lit_recon.clients import Client
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone, ConvNet, WideFeatureLayer
from lit_recon.records import Knowledge, Normalization, Observation, Update

LABELS = torch.tensor([3, 8])


class Blind(Objective):
    """Computes the update and sees nothing of it."""

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        return 0.0 * torch.stack([value.sum() for value in candidate.values()]).sum()


@pytest.fixture(scope="module")
def images() -> Tensor:
    public, _ = Digits().load()
    return public.pixels(torch.stack([(public.labels == label).nonzero()[0, 0] for label in LABELS]))


@pytest.fixture(scope="module")
def seen(images: Tensor) -> Observation:
    torch.manual_seed(0)
    trunk = ConvNet((1, 8, 8), widths=[4, 8], norm="group", activation="relu")
    layer = WideFeatureLayer(trunk.out_features, n_neurons=256, n_trained=256, activation="relu")
    model = Backbone(trunk, 10, Normalization((0.3,), (0.38,)), layer)
    public, _ = Digits().load()
    with torch.no_grad():
        layer.set_center(model.features(public.pixels(torch.arange(64))))
    return Client(model).observe(images, LABELS, Knowledge(labels=True))


def attack(
    objective: Objective, recovery: FeatureRecovery, steps: int = 40, restarts: int = 1, seed: int = 0
) -> GradientMatching:
    return GradientMatching(
        objective,
        [TotalVariation(0.001)],
        labels=KnownLabels(),
        features=FeatureMatching(recovery, SignedCosine(weight=1.0)),
        steps=steps,
        restarts=restarts,
        seed=seed,
        log_every=1,
    )


def test_features_alone_give_what_an_ignored_update_gives(seen: Observation) -> None:
    ours, ignored = (attack(objective, ExactRecovery())(seen) for objective in (FeaturesOnly(), Blind()))
    torch.testing.assert_close(ours.images, ignored.images, rtol=0.0, atol=1e-6)
    assert set(ours.trace["matching"]) == {0.0}
    assert ours.trace["features"][-1] < 0.4 * ours.trace["features"][0]


def test_restarts_without_matching_are_compared_by_their_whole_loss(seen: Observation) -> None:
    single = [attack(FeaturesOnly(), ExactRecovery(), 5, seed=seed)(seen).loss for seed in (0, 1)]
    both = attack(FeaturesOnly(), ExactRecovery(), 5, restarts=2)(seen)
    assert min(single) > 0
    assert both.loss == pytest.approx(min(single), rel=1e-4)


@pytest.mark.parametrize("objective", [FeaturesOnly(), GlobalCosine()], ids=["direct", "with the gradient"])
def test_unmixed_features_lead_to_images(objective: Objective, seen: Observation, images: Tensor) -> None:
    recovery = CocktailParty(decorrelation=0.01, sharpness=2.0, steps=300, lr=0.02)
    result = attack(objective, recovery, 80)(seen)
    found = [note for note in result.notes if "by cocktail_party" in note]
    assert len(found) == 1
    error = (result.images - images).square().mean().sqrt()
    guess = (images.mean() - images).square().mean().sqrt()
    assert error < 0.8 * guess  # measured 0.65 and 0.61 of it


def test_labels_that_are_optimized_stay_where_they_are_without_matching(seen: Observation) -> None:
    features = FeatureMatching(ExactRecovery(), SignedCosine(weight=1.0))
    running = GradientMatching(FeaturesOnly(), labels=JointLabels(), features=features, steps=3)
    state = running.init([replace(seen, knowledge=Knowledge(), labels=None)])
    before = state.problems[0].variables["labels"].detach().clone()
    running.advance(state)
    torch.testing.assert_close(state.problems[0].variables["labels"].detach(), before)


def test_nothing_to_match_is_refused() -> None:
    with pytest.raises(ConfigError, match="FeaturesOnly needs something else to match"):
        GradientMatching(FeaturesOnly())


def test_only_attacks_that_match_updates_are_timed() -> None:
    """A measurement sets the attack up, with its recovery of features and labels, once more for every victim."""
    alone = GradientMatching(FeaturesOnly(), features=FeatureMatching())
    assert alone.execution_for(8) == "loop"
    assert (
        GradientMatching(FeaturesOnly(), [BatchNormPrior(1.0)], features=FeatureMatching()).execution_for(8) == "auto"
    )
    assert GradientMatching(features=FeatureMatching()).execution_for(8) == "auto"


@pytest.mark.slow
def test_labels_of_exact_features_replace_estimates(seen: Observation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve images of ten classes: their counts are not determined by the head's gradient alone."""
    public, _ = Digits().load()
    labels = public.labels[:12]
    many = Client(seen.model).observe(public.pixels(torch.arange(12)), labels)
    running = GradientMatching(FeaturesOnly(), labels=HeadCounts(), features=FeatureMatching(), steps=1)
    found = running(many)
    assert found.labels.sort().values.tolist() == labels.sort().values.tolist()
    assert "labels: those of the exact features" in found.notes
    inexact = replace(ExactRecovery()(many), exact=False)
    monkeypatch.setattr(ExactRecovery, "__call__", lambda self, given: inexact)
    assert any("class counts" in note for note in running(many).notes)
