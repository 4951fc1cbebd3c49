"""Adam in an update: noticed, simulated, and its rate and sign worked out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_recon.attacks.updates.labels.head import HeadGradient
from lit_recon.clients.record import RecordedUpdate, Recorder
from lit_recon.defenses import Defense, GaussianNoise, GradientClipping
from lit_recon.experiments.audit.interpretation import Interpretation
from lit_recon.experiments.audit.optimizer import is_reversed
from lit_recon.models import public_model
from lit_recon.records import Batch
from tests.experiments.audit.updates import (
    NORMALIZATION,
    SHAPE,
    convnet,
    doubts,
    gradient,
    images,
    interpreted,
    labels,
    update,
)


def after_adam(
    n: int, steps: int = 1, rule: type[torch.optim.Optimizer] = torch.optim.Adam, **known: object
) -> RecordedUpdate:
    """The update of a client that used Adam at the rate 0.001."""
    after = convnet()
    own = rule(after.parameters(), lr=1e-3)  # type: ignore[call-arg]  # of all of them
    for _ in range(steps):
        own.zero_grad()
        nn.functional.cross_entropy(after((images(n) - 0.5) / 0.25), labels(n)).backward()
        own.step()
    return Recorder(convnet(), batch_size=n, steps=steps, **known).record(after, images=images(n), labels=labels(n))


def replace_known(recorded: RecordedUpdate, **known: object) -> RecordedUpdate:
    return replace(recorded, known=replace(recorded.known, **known))  # type: ignore[arg-type]  # of several types


def agreement_of_signs(found: Interpretation, n: int) -> float:
    """Share of the larger entries of the update that have the sign of the true gradient."""
    true = gradient(convnet(), n)
    agree = [(found.update[name].sign() == value.sign())[value.abs() > 1e-5] for name, value in true.items()]
    return float(torch.cat([one.flatten() for one in agree]).double().mean())


@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_noticed(rule: type[torch.optim.Optimizer]) -> None:
    """Its first step moves every weight by the learning rate; only signs of the gradient are left."""
    found = interpreted(convnet(), after_adam(4, rule=rule, lr=0.1))
    [doubt] = doubts(found)
    assert "moved by the same amount, 0.001: the client used Adam" in doubt
    assert found.known.optimizer == "adam"
    assert found.known.lr == pytest.approx(1e-3, rel=1e-3)
    assert agreement_of_signs(found, 4) > 0.99


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_of_adam_are_simulated_as_the_client_made_them(steps: int) -> None:
    told = interpreted(convnet(), after_adam(4, steps, lr=1e-3, optimizer="adam"))
    assert doubts(told) == []
    assert told.known.optimizer == "adam"
    seen = told.observation(public_model(convnet(), SHAPE, NORMALIZATION), None, None)
    own = seen.operator(seen.weights, Batch(images(4), labels(4)))
    for name, value in own.items():
        # where gradients are nearly zero, their signs are those of rounding
        assert float(((value - told.update[name]).abs() < 0.05).double().mean()) > 0.99, name


def test_the_rate_of_adam_is_that_by_which_weights_moved() -> None:
    found = interpreted(convnet(), after_adam(4, lr=0.01, optimizer="adam"))
    [doubt] = doubts(found)
    assert doubt == "All weights moved by 0.001, and not by Adam's given rate 0.01: this is taken for the rate."
    assert found.known.lr == pytest.approx(1e-3, rel=1e-3)
    told = interpreted(convnet(), after_adam(4, optimizer="adam"))
    assert doubts(told) == []
    assert any(one.text == "All weights moved by 0.001: Adam's learning rate." for one in told.findings)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("defense", [GaussianNoise(1.0), GradientClipping(0.5)], ids=str)
def test_steps_of_adam_are_not_checked_behind_a_defense_that_changes_them(defense: Defense, steps: int) -> None:
    """Noise makes amounts differ, and clipping makes them smaller than the rate."""
    recorded = after_adam(4, steps, lr=1e-3, optimizer="adam")
    units = {name: (recorded.before[name] - value) / 1e-3 for name, value in recorded.sent.items()}
    changed = defense.transform_update(units, None, torch.Generator().manual_seed(0))  # type: ignore[arg-type]  # unused
    sent = {name: recorded.before[name] - 1e-3 * value for name, value in changed.items()}
    # three steps by less than half of the given rate are too large for it
    told = replace_known(replace(recorded, sent=sent), lr=1e-3 if steps == 1 else 1e-6)
    found = interpreted(convnet(), told, defense)
    assert doubts(found) == []
    assert (found.known.lr, found.known.optimizer) == (told.known.lr, "adam")
    [open_] = [one.text for one in found.findings if one.kind == "open"]
    assert open_.startswith("Optimizer, sign, scale, rank and weight decay were not checked: ")


def test_sgd_is_not_taken_for_adam() -> None:
    [doubt] = doubts(interpreted(convnet(), update(convnet(), 4, {"optimizer": "adam"})))
    assert doubt.startswith("One step of Adam moves nearly all weights by the same amount, and these were not")
    steps = update(convnet(), 4, {"optimizer": "adam", "steps": 3, "lr": 1e-4}, lr=0.3, steps=3)
    [doubt] = doubts(interpreted(convnet(), steps))
    assert doubt.startswith("3 steps of Adam at the rate 0.0001 move no weight by ")


def test_a_gradient_is_one_whatever_the_optimizer() -> None:
    recorded = update(convnet(), 4)
    sent = replace(recorded, sent=dict(gradient(convnet(), 4)), form="gradient")
    found = interpreted(convnet(), replace_known(sent, optimizer="adam", lr=1e-3))
    assert doubts(found) == []
    assert found.known.optimizer == "sgd"


def test_signs_after_minus_before_are_turned_around() -> None:
    recorded = after_adam(4, lr=1e-3, optimizer="adam")
    reverse = {name: value - recorded.before[name] for name, value in recorded.sent.items()}
    [doubt] = doubts(found := interpreted(convnet(), replace(recorded, sent=reverse, form="difference")))
    assert doubt.startswith("The sign is reversed")
    assert agreement_of_signs(found, 4) > 0.99


@pytest.mark.parametrize(
    ("non_negative", "rows", "told"),
    [
        (True, [[1.0, 1.0], [1.0, -1.0]], False),
        (True, [[-1.0, -1.0], [1.0, -1.0]], True),
        (True, [[1.0, -1.0], [-1.0, 1.0]], None),
        (False, [[-1.0, -1.0], [1.0, -1.0]], None),
    ],
)
def test_only_non_negative_features_show_reversed_signs(
    non_negative: bool, rows: list[list[float]], told: bool | None
) -> None:
    gradient, none = torch.tensor(rows), torch.zeros(2)
    assert is_reversed(HeadGradient(gradient, none, gradient, none, 1, non_negative, none)) is told
