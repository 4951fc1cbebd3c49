"""Updates behind a defense of the client that was told, and behind noise that was not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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
    OptimalGradientPruning,
    PercentilePrivacy,
    PerExampleClipping,
    SVTPrivacy,
)
from lit_recon.experiments.audit.interpretation import keeps_values
from lit_recon.records import Update
from tests.experiments.audit.updates import defended, doubts, gradient, interpreted, mlp, unlabelled, update


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
        *((defense, True) for defense in [*KEEPS, OptimalGradientPruning(0.5), Chain(KEEPS[1:3])]),
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
