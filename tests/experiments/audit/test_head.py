"""Weight decay in the head's gradient, and what the rounding of an update hides of it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_recon.clients.record import RecordedUpdate, Recorder
from lit_recon.records import Update
from tests.experiments.audit.updates import (
    convnet,
    doubts,
    gradient,
    images,
    interpreted,
    labels,
    mlp,
    trained,
    unlabelled,
    update,
)

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


HALF = [torch.bfloat16, torch.float16]


def halved(sent: Update, dtype: torch.dtype) -> Update:
    return {name: value.to(dtype) for name, value in sent.items()}


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_rounding_to_half_precision_is_no_noise(dtype: torch.dtype, n: int, size: float) -> None:
    """A difference of weights is small, and few digits of half precision are left of it."""
    recorded = update(convnet(), n, {"lr": size})
    sent = halved({name: size * value for name, value in gradient(convnet(), n).items()}, dtype)
    found = interpreted(convnet(), replace(unlabelled(recorded, sent), form="gradient" if size == 1 else "difference"))
    assert doubts(found) == []


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_differences_of_weights_in_half_precision_are_no_noise(dtype: torch.dtype, sign: int) -> None:
    """A difference has more digits than the weights whose rounding is in it."""
    model = mlp().to(dtype)
    after = copy.deepcopy(model)
    nn.functional.cross_entropy(after(((images(4) - 0.5) / 0.25).to(dtype)), labels(4)).backward()
    torch.optim.SGD(after.parameters(), lr=0.1).step()
    state = after.state_dict()
    sent = {name: sign * (value - state[name]) for name, value in model.state_dict().items()}
    found = interpreted(mlp(), Recorder(model, batch_size=4, lr=0.1).record(sent, form="difference"))
    assert len(doubts(found)) == (sign < 0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_noise_on_a_difference_of_weights_that_a_server_rounded_is_noticed(dtype: torch.dtype) -> None:
    """The client trains in single precision, whatever the precision of the weights that it received."""
    received = mlp()
    received.load_state_dict({name: value.to(dtype) for name, value in received.state_dict().items()})
    state = trained(received, 4).state_dict()
    noise = torch.Generator().manual_seed(0)
    sent = {
        name: value - state[name] + 1e-4 * torch.randn(value.shape, generator=noise)
        for name, value in received.state_dict().items()
    }
    found = interpreted(received, Recorder(received, batch_size=4, lr=0.1).record(sent, form="difference"))
    assert any("has rank 10, but 4 images" in text for text in doubts(found))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_more_images_than_claimed_are_noticed_in_half_precision(dtype: torch.dtype) -> None:
    recorded = replace(update(mlp(), 6, {"batch_size": 2}), sent=halved(gradient(mlp(), 6), dtype), form="gradient")
    assert any("has rank 6, but 2 images can give rank 2" in doubt for doubt in doubts(interpreted(mlp(), recorded)))


@pytest.mark.parametrize("lr", [1e-4, 1e-5, 1e-6])
def test_rounding_of_weights_that_moved_by_little_is_no_noise(lr: float) -> None:
    found = interpreted(convnet(), update(convnet(), 1, {"lr": lr}, lr=lr))
    assert doubts(found) == []
    assert any("rounding left few digits" in one.text for one in found.findings) is (lr == 1e-6)


def test_a_record_in_double_precision_keeps_its_digits() -> None:
    """Weights that moved by little are subtracted before they are rounded to the model's precision."""
    model = mlp().double()
    after = copy.deepcopy(model)
    nn.functional.cross_entropy(after(((images(1) - 0.5) / 0.25).double()), labels(1)).backward()
    torch.optim.SGD(after.parameters(), lr=1e-5).step()
    recorded = Recorder(model, batch_size=1, lr=1e-5).record(after)
    found = interpreted(mlp(), recorded)
    assert doubts(found) == []
    assert found.update["1.weight"].dtype is torch.float32
    assert_close(found.update, gradient(mlp(), 1), rtol=1e-5)
