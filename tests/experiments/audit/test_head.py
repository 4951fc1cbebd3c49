"""Weight decay in the head's gradient, and what the rounding of an update hides of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_recon.clients.record import RecordedUpdate, Recorder
from lit_recon.records import Update
from tests.experiments.audit.updates import convnet, doubts, gradient, interpreted, mlp, trained, unlabelled

DECAY = 0.02


def without_bias() -> nn.Module:
    model = mlp()
    model[3] = nn.Linear(32, 10, bias=False)
    return model


def recorded(model: nn.Module, sent: Update) -> RecordedUpdate:
    """A gradient of four images by a client that told its weight decay."""
    return Recorder(model, batch_size=4, lr=0.03, weight_decay=DECAY).record(dict(sent), form="gradient")


def assert_close(one: Update, two: Update, rtol: float) -> None:
    for name, value in two.items():
        torch.testing.assert_close(one[name], value, rtol=rtol, atol=rtol * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("make", [mlp, without_bias])
def test_no_weight_decay_is_taken_off_a_gradient(make: type[nn.Module]) -> None:
    """It is the optimizer that adds it."""
    model = make()
    found = interpreted(model, recorded(model, gradient(model, 4)))
    assert doubts(found) == []
    assert_close(found.update, gradient(model, 4), rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_weight_decay_is_taken_off_a_gradient_that_was_not_named(sign: int) -> None:
    sent = {name: sign * value for name, value in gradient(mlp(), 4).items()}
    found = interpreted(mlp(), unlabelled(recorded(mlp(), sent), sent))
    assert found.form == "gradient"
    assert len(doubts(found)) == (sign < 0)
    assert_close(found.update, gradient(mlp(), 4), rtol=1e-5)


def test_a_gradient_that_holds_the_told_weight_decay_is_freed_of_it() -> None:
    """Such as a difference of weights that the client divided by its rate."""
    new = dict(trained(mlp(), 4, lr=0.03, weight_decay=DECAY).named_parameters())
    sent = {name: (value - new[name]).detach() / 0.03 for name, value in mlp().named_parameters()}
    found = interpreted(mlp(), recorded(mlp(), sent))
    assert doubts(found) == []
    assert any("holds the weight decay that was told" in one.text for one in found.findings)
    assert_close(found.update, gradient(mlp(), 4), rtol=1e-3)
