"""The attack as a whole: it converges, its choices are the attacker's, and it can stop anywhere and go on."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import (
    LBFGS,
    Adam,
    AnalyticInversion,
    BatchNormPrior,
    CocktailPartyAttack,
    DeepImagePrior,
    FeatureMatching,
    FeaturesOnly,
    GradientMatching,
    GroupConsistency,
    InputMatching,
    JointLabels,
    KnownLabels,
    LabelRecovery,
    MapMatching,
    Pixels,
    Prior,
    SquaredError,
    TotalVariation,
)
from lit_recon.attacks.updates.gradient_matching.state import MatchingState
from lit_recon.clients import Client, LocalSteps
from lit_recon.defenses import GradientDropout
from lit_recon.errors import ConfigError, ShapeError, ThreatModelError
from lit_recon.models import Backbone
from lit_recon.records import Batch, Knowledge, Normalization, Observation, Reconstruction
from tests.attacks.updates.feature_maps.networks import Shallow

Observe = Callable[..., Observation]
Pair = tuple[torch.Tensor, torch.Tensor]
SMALL_UNET: dict[str, Any] = {"channels": 8, "multipliers": [1, 2], "noise_channels": 4}


def rmse(result: Reconstruction, images: torch.Tensor) -> float:
    return float((result.images - images).square().mean().sqrt())


def test_recovers_the_batch(observe: Observe, batch: Pair) -> None:
    attack = GradientMatching(labels=KnownLabels(), steps=300)
    result = attack(observe("mlp"))
    baseline = float((batch[0] - 0.5).square().mean().sqrt())
    assert rmse(result, batch[0]) < 0.25 * baseline
    assert result.loss < 1e-2
    assert result.images.amin() >= 0
    assert result.images.amax() <= 1


def test_joint_labels_and_line_search_find_labels_and_images(observe: Observe, batch: Pair) -> None:
    attack = GradientMatching(SquaredError(), [], Pixels(box=False), LBFGS(), JointLabels(), steps=40, keep="best")
    result = attack(observe("mlp", labels=False))
    assert sorted(result.labels.tolist()) == sorted(batch[1].tolist())
    order = result.labels.argsort()
    baseline = float((batch[0] - 0.5).square().mean().sqrt())
    assert rmse(Reconstruction(result.images[order], result.labels[order], 0.0), batch[0]) < 0.5 * baseline


@pytest.mark.parametrize("recovery", [None, JointLabels()])
def test_labels_that_are_given_are_used_where_a_defense_hides_them(recovery: LabelRecovery | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 10))
    photos = Normalization((0.5,) * 3, (0.25,) * 3)
    client = Client(model, image_shape=(3, 4, 4), normalization=photos, defense=GradientDropout(0.9))
    for label in range(10):
        seen = client.observe(torch.rand(1, 3, 4, 4), torch.tensor([label]), Knowledge(labels=True))
        found = GradientMatching(labels=recovery, steps=2)(seen)
        assert found.labels.tolist() == [label]
        assert found.notes == ()


def test_images_of_another_attack_come_with_their_labels(observe: Observe, batch: Pair) -> None:
    images, labels = batch
    other = torch.tensor([1, 0])
    found = Reconstruction(images[other], labels[other], 0.0)
    attack = GradientMatching(labels=KnownLabels(), steps=1)
    result = attack.follow([found], [observe("mlp")]).finish()[0]
    assert result.labels.tolist() == labels[other].tolist()
    assert result.trace["matching"][0] < 1e-6  # measured 0; with the labels of each other 0.97
    joint = GradientMatching(labels=JointLabels(), steps=1)
    state = joint.follow([found], [observe("mlp", labels=False)]).state
    assert isinstance(state, MatchingState)
    assert "labels" in state.problems[0].variables


@pytest.mark.parametrize("keep", ["last", "best"])
def test_restarts_are_chosen_by_the_attackers_loss(observe: Observe, keep: str) -> None:
    options: dict[str, Any] = {"labels": KnownLabels(), "steps": 25, "keep": keep}
    alone = [GradientMatching(**options, seed=seed)(observe("mlp")) for seed in range(3)]
    together = GradientMatching(**options, restarts=3, execution="loop")(observe("mlp"))
    best = min(alone, key=lambda result: result.loss)
    assert together.loss == best.loss
    assert torch.equal(together.images, best.images)


def test_victims_do_not_disturb_each_other(observe: Observe) -> None:
    first = observe("mlp")
    second = Observation(**{**vars(first), "update": {n: v.flip(0) for n, v in first.update.items()}})
    attack = GradientMatching(labels=KnownLabels(), steps=10, execution="loop")
    together = attack.many([first, second])
    for seen, result in zip((first, second), together, strict=True):
        assert torch.equal(attack(seen).images, result.images)


def test_the_best_iterate_is_not_one_from_before_a_penalty_starts(observe: Observe) -> None:
    attack = GradientMatching(
        priors=[GroupConsistency(10.0, start=0.5)], steps=20, restarts=2, keep="best", execution="loop", log_every=1
    )
    state = attack.init([observe("mlp")])
    while state.step < attack.steps:
        attack.advance(state)
    attack.result(state)
    for problem in state.problems:
        losses, matching = problem.trace["loss"], problem.trace["matching"]
        assert min(losses[:10]) < min(losses[10:])
        assert problem.best_loss == min(losses[10:])
        assert problem.best_matching == matching[losses.index(problem.best_loss)]


@pytest.mark.slow
def test_group_consistency_compares_nothing_in_further_starts(photographs: torch.Tensor) -> None:
    """They have one problem for each victim."""
    torch.manual_seed(0)
    client = Client(Backbone(Shallow(side=8, channels=64), 5, Normalization((0.5,) * 3, (0.25,) * 3)))
    victims = [client.observe(pair[:, :, ::4, ::4], torch.tensor([0, 1])) for pair in photographs.split(2)[:2]]
    attack = GradientMatching(
        FeaturesOnly(), [GroupConsistency(10.0, start=0.0)], features=MapMatching(further=1), steps=2, restarts=2
    )
    together = attack.many(victims)
    for seen, result in zip(victims, together, strict=True):
        assert result.n_certified == 0
        assert torch.equal(attack(seen).images, result.images)
        assert any(note.startswith("further start 1") for note in result.notes)


ATTACKS = {
    "loop": lambda: GradientMatching(
        priors=[TotalVariation(0.1)], labels=KnownLabels(), steps=12, restarts=2, execution="loop"
    ),
    "vmap": lambda: GradientMatching(
        priors=[TotalVariation(0.1)], labels=KnownLabels(), steps=12, restarts=2, execution="vmap"
    ),
    "lbfgs": lambda: GradientMatching(SquaredError(), [], Pixels(box=False), LBFGS(inner=4), JointLabels(), steps=12),
    "refined": lambda: GradientMatching(
        SquaredError(), [], Pixels(box=False, smooth=0.5, coarse=0.25), LBFGS(inner=4), JointLabels(), steps=12
    ),
    "group": lambda: GradientMatching(
        SquaredError(relative=True),
        [BatchNormPrior(0.1), GroupConsistency(0.1)],
        labels=KnownLabels(),
        steps=12,
        restarts=2,
        execution="loop",
    ),
    "unet": lambda: GradientMatching(
        parametrization=DeepImagePrior(**SMALL_UNET),
        solver=Adam(1e-3, signed=False),
        labels=KnownLabels(),
        steps=12,
        keep="best",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("stop", [1, 7])
def test_stopped_and_resumed_equals_left_alone(observe: Observe, name: str, stop: int) -> None:
    seen = observe("resnet" if name == "group" else "mlp", labels=name not in ("lbfgs", "refined"))
    whole = ATTACKS[name]()(seen)

    attack = ATTACKS[name]()
    state = attack.init([seen])
    while state.step < stop:
        attack.advance(state)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    del state
    attack = ATTACKS[name]()
    state = attack.init([seen])
    state.load_state_dict(torch.load(file, weights_only=True))
    while state.step < attack.steps:
        attack.advance(state)
    resumed = attack.result(state)[0]
    assert torch.equal(resumed.images.clamp(0, 1), whole.images)
    assert resumed.loss == whole.loss
    assert resumed.trace == whole.trace


def test_the_solver_begins_anew_with_pixels_where_the_images_are(observe: Observe) -> None:
    attack = ATTACKS["refined"]()
    state = attack.init([observe("mlp", labels=False)])
    problem, moved = state.problems[0], []
    while state.step < attack.steps:
        if state.step == 3:
            before = problem.images(attack.parametrization).detach()
            problem.move(attack.parametrization.refined(problem.variables))
            after = problem.images(attack.parametrization).detach()
            torch.testing.assert_close(after, before, rtol=0.0, atol=1e-6)
            assert not problem.optimizer.state_dict()["state"]  # no memory of steps in other variables
        attack.advance(state)
        moved.append(sorted(problem.variables))
    assert moved == [["labels", "pixels"]] * 3 + [["fine", "labels"]] * 9


def test_divergence_is_noted_and_survived(observe: Observe) -> None:
    attack = GradientMatching(
        parametrization=Pixels(box=False), solver=Adam(1e30, signed=False), labels=KnownLabels(), steps=20
    )
    result = attack(observe("mlp"))
    assert torch.isfinite(result.images).all()
    assert any("diverged" in note for note in result.notes)


@pytest.mark.parametrize("signed", [True, False])
def test_a_loss_without_a_derivative_is_noted(observe: Observe, signed: bool) -> None:
    class Kink(Prior):
        def __call__(self, images: torch.Tensor, *_: Any) -> torch.Tensor:
            return (0 * images).flatten(1).sum(1).sqrt()

    attack = GradientMatching(priors=[Kink(1.0)], solver=Adam(signed=signed), labels=KnownLabels(), steps=4)
    result = attack(observe())
    assert result.notes == ("1 of 1 restarts diverged, first at step 0",)
    assert torch.isfinite(result.images).all()


def test_trace_has_every_term(observe: Observe) -> None:
    attack = GradientMatching(
        priors=[TotalVariation(0.1), BatchNormPrior(0.01)], labels=KnownLabels(), steps=9, log_every=4
    )
    trace = attack(observe("resnet")).trace
    assert trace["step"] == [0, 4, 8, 9]
    for i in range(4):
        parts = sum(trace[name][i] for name in ("matching", "batch_norm", "TotalVariation"))
        assert trace["loss"][i] == pytest.approx(parts, rel=1e-5)


def test_wrong_knowledge_is_refused_before_any_step(observe: Observe) -> None:
    with pytest.raises(ThreatModelError, match="BatchNormPrior"):
        GradientMatching(priors=[BatchNormPrior(1.0)])(observe("resnet", batch_norm="none"))
    with pytest.raises(ThreatModelError):
        GradientMatching(labels=KnownLabels())(observe("mlp", labels=False))


def test_observations_of_different_clients_are_refused(observe: Observe) -> None:
    with pytest.raises(ShapeError, match="same client"):
        GradientMatching(labels=KnownLabels()).many([observe("mlp"), observe("mlp")])
    with pytest.raises(ShapeError, match="at least one"):
        GradientMatching().many([])


def test_the_output_of_an_attack_is_checked(observe: Observe) -> None:
    class Broken(Attack):
        def run(self, observations: Any) -> list[Reconstruction]:
            return [Reconstruction(torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.int64), 0.0)]

    with pytest.raises(ShapeError, match="must return"):
        Broken()(observe("mlp"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"restarts": 0}, "restarts"),
        ({"log_every": 0}, "log_every"),
        ({"priors": [GroupConsistency(0.1)]}, "at least 2"),
        ({"priors": [GroupConsistency(0.1)], "restarts": 2, "solver": LBFGS()}, "line search"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientMatching(**options)


def after_adam(seen: Observation, images: torch.Tensor, steps: int) -> Observation:
    """What the client sends after steps of Adam."""
    operator = LocalSteps(seen.model, steps, 1e-3, optimizer="adam")
    assert seen.labels is not None
    update = operator(seen.weights, Batch(images, seen.labels))
    return replace(seen, operator=operator, update=update)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_steps_of_adam_are_matched(observe: Observe, batch: Pair, steps: int) -> None:
    """RMSE 0.024 and 0.019; by taking them for a gradient, 0.42."""
    attack = GradientMatching(labels=KnownLabels(), steps=300)
    seen = after_adam(observe("convnet"), batch[0], steps)
    taken_for_sgd = replace(seen, operator=observe("convnet").operator)
    assert rmse(attack(seen), batch[0]) < 0.2 * rmse(attack(taken_for_sgd), batch[0])


@pytest.mark.parametrize("features", [InputMatching(), MapMatching(), FeatureMatching()])
def test_features_need_more_than_the_signs_that_adam_leaves(observe: Observe, batch: Pair, features: Any) -> None:
    with pytest.raises(ThreatModelError, match="Matching takes the update for a sum of gradients, .* Adam"):
        GradientMatching(features=features)(after_adam(observe("mlp"), batch[0], 1))


@pytest.mark.parametrize("attack", [AnalyticInversion(), CocktailPartyAttack()])
def test_so_do_attacks_on_a_linear_layer(observe: Observe, batch: Pair, attack: Attack) -> None:
    with pytest.raises(ThreatModelError, match="takes the update for a sum of gradients, .* Adam"):
        attack(after_adam(observe("mlp"), batch[0], 1))
