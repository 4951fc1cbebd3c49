"""Recovered features inside gradient matching, on real digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import (
    Adam,
    DeepImagePrior,
    ExactRecovery,
    FeatureMatching,
    GradientMatching,
    KnownLabels,
    MomentRecovery,
    SignedCosine,
    SquaredCosine,
)
from lit_recon.attacks.updates.gradient_matching.objectives import Objective, ObservedUpdate
from lit_recon.attacks.updates.gradient_matching.parametrizations import Restart
from lit_recon.clients import Client
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone, ConvNet, WideFeatureLayer
from lit_recon.records import Knowledge, Normalization, Observation, Update

LABELS = torch.tensor([3, 8])


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Two real digits."""
    public, _ = Digits().load()
    return public.pixels(torch.stack([(public.labels == label).nonzero()[0, 0] for label in LABELS]))


def backbone(wide: bool = True) -> Backbone:
    torch.manual_seed(0)
    trunk = ConvNet((1, 8, 8), widths=[4, 8], norm="group", activation="elu")
    layer = WideFeatureLayer(trunk.out_features, n_neurons=1024, n_trained=0, activation="gelu") if wide else None
    return Backbone(trunk, 10, Normalization((0.3,), (0.38,)), layer)


def seen(images: Tensor, wide: bool = True) -> Observation:
    return Client(backbone(wide)).observe(images, LABELS, Knowledge(labels=True))


def attack(features: FeatureMatching | None, steps: int = 10, start: int = 0) -> GradientMatching:
    return GradientMatching(labels=KnownLabels(), features=features, steps=steps, seed=start, log_every=1)


def test_the_truth_has_no_penalty_and_no_direction(images: Tensor) -> None:
    observation = seen(images)
    penalty = FeatureMatching(ExactRecovery(), SignedCosine(weight=1.0)).prepare(observation)
    truth = images.clone().requires_grad_()
    targets = penalty.targets(truth, LABELS)
    value = penalty.penalty(truth, targets, 1.0)
    assert float(value.detach()) < 1e-6
    assert float(torch.autograd.grad(value, truth)[0].abs().max()) < 1e-4
    other = penalty.penalty(images.flip(0), targets, 1.0)
    assert float(other) > 1e-3


def test_targets_follow_the_candidates_order(images: Tensor) -> None:
    penalty = FeatureMatching(ExactRecovery(), SignedCosine(weight=1.0)).prepare(seen(images))
    one, other = penalty.targets(images, LABELS), penalty.targets(images.flip(0), LABELS.flip(0))
    torch.testing.assert_close(one, other.flip(0))


class Blind(Objective):
    """Sees nothing of the update."""

    def __call__(self, update: Update, target: ObservedUpdate) -> Tensor:
        return 0.0 * sum(value.sum() for value in update.values())


def test_the_penalty_alone_brings_candidates_to_the_recovered_features(images: Tensor) -> None:
    matching = FeatureMatching(ExactRecovery(), SignedCosine(weight=1.0))
    blind = GradientMatching(Blind(), labels=KnownLabels(), features=matching, steps=150, log_every=1)
    result = blind(seen(images))
    penalty = result.trace["features"]
    assert penalty[0] > 0.1
    assert penalty[-1] < 1e-3
    assert any("certificate" in note and "(holds)" in note for note in result.notes)
    assert "features" not in attack(None)(seen(images)).trace


def test_the_penalty_sets_in_where_it_should_and_curves_stay_equally_long(images: Tensor) -> None:
    late = FeatureMatching(ExactRecovery(), SquaredCosine(weight=1.0, start=0.5))
    trace = attack(late)(seen(images)).trace
    assert len({len(curve) for curve in trace.values()}) == 1
    assert trace["features"][:5] == [0.0] * 5
    assert min(trace["features"][5:]) > 0


def test_a_resumed_attack_keeps_the_assignment(images: Tensor) -> None:
    matching = FeatureMatching(ExactRecovery(), SquaredCosine(weight=1.0))
    observation, running = seen(images), attack(matching)
    whole = running(observation)
    state = running.init([observation])
    for _ in range(4):
        running.advance(state)
    resumed = running.init([observation])
    resumed.load_state_dict(state.state_dict())
    assert resumed.problems[0].feature_targets is not None
    while resumed.step < running.steps:
        running.advance(resumed)
    torch.testing.assert_close(running.result(resumed)[0].images, whole.images, rtol=0, atol=1e-5)


def test_signs_that_a_recovery_leaves_open_are_refused(images: Tensor) -> None:
    with pytest.raises(ConfigError, match="SquaredCosine"):
        FeatureMatching(MomentRecovery(), SignedCosine(weight=1.0)).prepare(seen(images))


def test_signs_that_an_exact_recovery_has_lost_are_done_without(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExactRecovery, "run", MomentRecovery().run)  # what it falls back on under heavy defenses
    penalty = FeatureMatching(ExactRecovery(), SignedCosine(weight=0.5, start=0.25)).prepare(seen(images))
    assert isinstance(penalty.term, SquaredCosine)
    assert (penalty.term.weight, penalty.term.start) == (0.5, 0.25)
    assert "SquaredCosine replaces SignedCosine" in penalty.notes[-1]


def test_a_model_without_a_wide_layer_is_refused_before_any_step(images: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match="feature"):
        attack(FeatureMatching()).init([seen(images, wide=False)])


def drawn_from_features(steps: int = 6) -> GradientMatching:
    prior = DeepImagePrior(channels=8, multipliers=[1, 1], attention_resolutions=[], conditioned=True)
    matching = FeatureMatching(ExactRecovery(), SignedCosine(weight=1.0))
    solver = Adam(lr=0.001, signed=False)
    return GradientMatching(
        parametrization=prior, solver=solver, labels=KnownLabels(), features=matching, steps=steps, keep="best"
    )


def test_an_image_is_drawn_from_the_feature_of_its_label(images: Tensor) -> None:
    observation = seen(images)
    state = drawn_from_features().init([observation])
    problem, truth = state.problems[0], FeatureMatching().prepare(observation).features_of(images)
    assert problem.restart.features is not None
    torch.testing.assert_close(problem.restart.features, truth, atol=1e-3, rtol=0)
    assert problem.feature_targets is problem.restart.features


def test_recovered_features_change_the_drawing(images: Tensor) -> None:
    observation = seen(images)
    prior = drawn_from_features().parametrization
    features = FeatureMatching().prepare(observation).condition(LABELS)
    restart = Restart(observation, 0, features)
    variables = prior.start(restart)
    one = prior.images(variables, restart)
    other = prior.images(variables, restart._replace(features=features.flip(0)))
    assert one.shape == images.shape
    assert float((one - other).abs().max()) > 1e-3


def test_a_drawing_attack_resumes_with_the_same_features(images: Tensor) -> None:
    observation, running = seen(images), drawn_from_features()
    whole = running(observation)
    state = running.init([observation])
    for _ in range(3):
        running.advance(state)
    resumed = drawn_from_features().init([observation])
    resumed.load_state_dict(state.state_dict())
    while resumed.step < running.steps:
        running.advance(resumed)
    torch.testing.assert_close(running.result(resumed)[0].images, whole.images, rtol=0, atol=1e-5)


def test_drawing_from_features_needs_features() -> None:
    with pytest.raises(ConfigError, match="recovers none"):
        GradientMatching(parametrization=DeepImagePrior(conditioned=True))


def test_the_weight_is_the_one_that_matches_the_gradient_best(images: Tensor) -> None:
    weights = [0.0, 0.3, 100.0]
    search = GradientMatching(
        labels=KnownLabels(),
        features=FeatureMatching(ExactRecovery(), SignedCosine(weight=9.0), weights),
        steps=25,
        restarts=3,
        seed=4,
    )
    observation = seen(images)
    found = search(observation)
    alone = []
    for restart, weight in enumerate(weights):
        features = FeatureMatching(ExactRecovery(), SignedCosine(weight=weight))
        single = GradientMatching(labels=KnownLabels(), features=features, steps=25, seed=4 + restart)(observation)
        alone.append(single)
    losses = [result.loss for result in alone]
    best = losses.index(min(losses))
    assert losses.count(losses[best]) == 1
    torch.testing.assert_close(found.images, alone[best].images)
    assert found.notes[-1] == f"of the feature weights 0, 0.3, 100, {weights[best]:g} matched the gradient best"


def test_every_weight_needs_a_restart() -> None:
    features = FeatureMatching(ExactRecovery(), SignedCosine(weight=1.0), [0.1, 1.0])
    with pytest.raises(ConfigError, match="each of the 2 weights of the features needs a restart; got restarts=1"):
        GradientMatching(features=features)
    with pytest.raises(ConfigError, match="weights of at least 0"):
        FeatureMatching(ExactRecovery(), weights=[-1.0])
