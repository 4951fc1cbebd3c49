"""Updates behind a defense of the client that was told, and behind noise that was not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lit_recon
from lit_recon.attacks.updates.gradient_matching.matching import update_distance
from lit_recon.defenses import (
    DPSGD,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    MixUp,
    NetworkDropout,
    OptimalGradientPruning,
    PercentilePrivacy,
    PerExampleClipping,
    SVTPrivacy,
)
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.experiments.audit import run
from lit_recon.experiments.audit.interpretation import keeps_values
from lit_recon.records import Observation, Update
from tests.experiments.audit.updates import (
    NORMALIZATION,
    SHAPE,
    convnet,
    defended,
    doubts,
    gradient,
    images,
    interpreted,
    labels,
    mlp,
    unlabelled,
    update,
)


def assert_same(one: Update, two: Update) -> None:
    for name, value in two.items():
        assert torch.equal(one[name], value), name


CHANGES = [DPSGD(1.0, 0.5), GradientClipping(0.5), PerExampleClipping(0.5), PercentilePrivacy(10.0, 0.01)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("defense", CHANGES, ids=str)
def test_an_update_that_a_told_defense_changed_stays_as_it_is(defense: Defense, seed: int) -> None:
    """No whole numbers of labels are in it, and no sign or scale follows from them."""
    recorded = defended(mlp(seed), 16, defense)
    found = interpreted(mlp(seed), recorded, defense)
    assert_same(found.update, recorded.sent)
    assert doubts(found) == []
    [told] = [one.text for one in found.findings if one.kind == "open"]
    assert told == f"Sign, scale, rank and weight decay were not checked: {defense} changes the values of the update."
    unnamed = interpreted(mlp(seed), unlabelled(recorded, dict(recorded.sent)), defense)
    assert "Give form if it is a gradient" in unnamed.findings[-1].text


@pytest.mark.parametrize(
    ("known", "unit"), [({}, 0.1), ({"steps": 3, "momentum": 0.5}, 0.425), ({"lr": None}, None)], ids=str
)
def test_units_of_told_strengths_are_said(known: dict[str, object], unit: float | None) -> None:
    recorded = update(mlp(), 4, known)
    found = interpreted(mlp(), recorded, GaussianNoise(1.0))
    change = {name: recorded.before[name] - value for name, value in recorded.sent.items()}
    torch.testing.assert_close(found.update, {name: value / (unit or 1.0) for name, value in change.items()})
    [told] = [one.text for one in found.findings if "changes the values" in one.text]
    assert ("divide absolute ones of the change of the weights by" in told) is (unit is not None)
    assert f"weights by {unit}, by which" in told or unit is None


def test_steps_of_adam_behind_noise_are_not_turned_around() -> None:
    recorded = update(mlp(), 4, {"optimizer": "adam"})
    sent = {name: value - recorded.before[name] for name, value in recorded.sent.items()}
    recorded = replace(unlabelled(recorded, sent), form="difference")
    plain, told = (interpreted(mlp(), recorded, defense) for defense in (None, GaussianNoise(1.0)))
    assert any("sign is reversed" in one for one in doubts(plain))
    assert not any("sign is reversed" in one for one in doubts(told))


@pytest.mark.parametrize("seed", range(3))
def test_an_update_with_noise_that_was_not_told_is_not_turned_around_or_scaled(seed: int) -> None:
    recorded = defended(mlp(seed), 16, DPSGD(1.0, 0.5))
    found = interpreted(mlp(seed), recorded)
    assert_same(found.update, recorded.sent)
    [doubt] = doubts(found)
    assert "noise of about" in doubt
    assert any("the bias tells no whole numbers of labels" in one.text for one in found.findings)


KEEPS = [MixUp(1.0), GradientPruning(0.5), GradientDropout(0.5), ExcludedVariables(["3.weight"]), GradientClipping()]


@pytest.mark.parametrize(
    ("defense", "kept"),
    [
        *((defense, True) for defense in [*KEEPS, OptimalGradientPruning(0.5), Chain(KEEPS[1:3]), Chain(KEEPS[:2])]),
        *((defense, False) for defense in [*CHANGES, SVTPrivacy(), GradientDropout(0.5, rescale=True)]),
        *((defense, False) for defense in [GaussianNoise(0.1), GaussianNoise(0.1, relative=True), Chain(CHANGES[1:2])]),
    ],
    ids=str,
)
def test_which_defenses_leave_values_as_they_are(defense: Defense, kept: bool) -> None:
    released = dict(gradient(mlp(), 4))
    released["3.weight"] = torch.zeros_like(released["3.weight"])
    assert keeps_values(defense, released, 4) is kept


def test_a_wrong_learning_rate_is_noticed_behind_a_told_pruning() -> None:
    recorded = update(mlp(), 4, {"lr": 1.0})
    found = interpreted(mlp(), recorded, GradientPruning(0.01))
    assert any("a wrong learning rate" in one for one in doubts(found))


@pytest.mark.parametrize(
    ("defense", "taken"),
    [
        *((defense, True) for defense in (GaussianNoise(1e-6), GradientPruning(0.01), DPSGD(100.0, 1e-6))),
        *((defense, False) for defense in (GradientClipping(0.1), Chain([GradientClipping(0.1), GaussianNoise(1e-6)]))),
    ],
    ids=str,
)
def test_told_weight_decay_stays_in_an_update_that_a_defense_scaled(defense: Defense, taken: bool) -> None:
    """It was scaled too; DP-SGD clips gradients, to which the optimizer adds it."""
    recorded = update(mlp(), 4, {"weight_decay": 0.02}, weight_decay=0.02)
    found = interpreted(mlp(), recorded, defense)
    whole = {name: (recorded.before[name] - value) / 0.1 for name, value in recorded.sent.items()}
    for name, value in gradient(mlp(), 4).items():
        torch.testing.assert_close(found.update[name], value if taken else whole[name], rtol=1e-3, atol=1e-5)
    told = [one.text for one in found.findings if one.text.startswith("Weight decay of 0.02 was not taken off")]
    assert len(told) == (not taken)


def test_attacks_simulate_a_defense_of_the_network_that_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks are read from the update; else true images explain it to a cosine distance of 0.1 and more."""
    attacked: list[Observation] = []
    monkeypatch.setattr(run, "run_attacks", lambda seen, *_: attacked.append(seen) or [])
    defense = NetworkDropout(0.5, ["3"])
    recorded = defended(mlp(), 1, defense)
    for told in (defense, None):
        lit_recon.audit(mlp(), recorded, SHAPE, NORMALIZATION, defense=told)
    known, unknown = (update_distance(seen, images(1), labels(1)) for seen in attacked)
    assert known < 1e-5
    assert unknown > 0.1


def test_a_defense_that_no_such_client_has_is_refused() -> None:
    recorded = update(mlp(), 4, {"steps": 3}, steps=3)
    with pytest.raises(ConfigError, match="acts on the gradient of every single example"):
        lit_recon.audit(mlp(), recorded, SHAPE, NORMALIZATION, defense=DPSGD(0.1))
    normed = convnet(norm=True)
    with pytest.raises(UnsupportedModelError, match="mixes the examples of a batch"):
        lit_recon.audit(normed, update(normed, 4), SHAPE, NORMALIZATION, defense=PerExampleClipping(0.1))


TOLD = NetworkDropout(0.5, ["4"])


@pytest.mark.parametrize(
    ("p", "defense", "said"),
    [
        *((0.5, defense, True) for defense in (None, GradientPruning(0.5), Chain([GradientPruning(0.5)]))),
        *((0.5, defense, False) for defense in (TOLD, Chain([TOLD, GradientPruning(0.5)]))),
        (0.0, None, False),
    ],
)
def test_dropout_that_may_have_been_on_is_said_unless_it_is_simulated(
    p: float, defense: Defense | None, said: bool
) -> None:
    model = nn.Sequential(*list(mlp())[:3], nn.Dropout(p), nn.Linear(32, 10))
    found = interpreted(model, update(model, 1), defense)
    told = [one.text for one in found.findings if "dropout" in one.text]
    assert len(told) == said
    assert all(text.startswith("The attacks simulate the client without dropout (3): ") for text in told)
