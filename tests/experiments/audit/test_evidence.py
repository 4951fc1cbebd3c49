"""Updates as users send them: what can be mended is mended and said, the rest ends in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.gradient_matching.matching import update_distance
from lit_recon.clients.local_steps import Optimizer
from lit_recon.clients.record import RecordedUpdate, Recorder
from lit_recon.errors import LitReconError
from lit_recon.experiments.audit.evidence import read_evidence
from lit_recon.models import public_model
from tests.experiments.audit.updates import (
    NORMALIZATION,
    SHAPE,
    convnet,
    doubts,
    images,
    interpreted,
    labels,
    mlp,
    update,
)

State = dict[str, Tensor]


def changed(change: Callable[[State], State], part: str = "sent") -> RecordedUpdate:
    recorded = update(convnet(norm=True), 4)
    return replace(recorded, **{part: change(dict(getattr(recorded, part)))})


def texts(recorded: RecordedUpdate) -> str:
    return " ".join(finding.text for finding in read_evidence(convnet(norm=True), recorded).findings)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "client.net."])
def test_the_prefix_of_a_wrapper_is_taken_off(prefix: str) -> None:
    wrapped = changed(lambda state: {prefix + name: value for name, value in state.items()})
    plain, mended = (read_evidence(convnet(norm=True), one) for one in (changed(dict), wrapped))
    assert all(torch.equal(value, mended.sent[name]) for name, value in plain.sent.items())
    assert f"begin with {prefix!r}" in texts(wrapped)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "float16"), (torch.bfloat16, "bfloat16")])
def test_half_precision_is_said(dtype: torch.dtype, name: str) -> None:
    halved = changed(lambda state: {key: v.to(dtype) if v.is_floating_point() else v for key, v in state.items()})
    assert f"rounded to {name}" in texts(halved)
    sent = read_evidence(convnet(norm=True), halved).sent
    assert all(value.dtype == torch.float32 for value in sent.values())
    assert "rounded" not in texts(changed(dict))


def test_missing_buffers_are_said() -> None:
    without = changed(lambda state: {name: v for name, v in state.items() if "running" not in name}, "before")
    assert "the model's own values stand in" in texts(without)


def test_parameters_that_were_not_sent_are_said() -> None:
    without = changed(lambda state: {name: v for name, v in state.items() if not name.startswith("0.")})
    assert "2 of 8 parameters were not sent (0.weight, 0.bias)" in texts(without)


@pytest.mark.parametrize("form", ["weights", "gradient"])
def test_frozen_layers_that_were_sent_are_unknown(form: Literal["weights", "gradient"]) -> None:
    """True images explain the update; else to a cosine distance of 0.03 and more."""
    frozen = convnet()
    frozen[0].requires_grad_(False)
    recorded = update(frozen, 2)
    if form == "gradient":
        sent = {name: (recorded.before[name] - value) / 0.1 for name, value in recorded.sent.items()}
        recorded = replace(recorded, sent=sent, form="gradient")
    assert "0.weight" in recorded.sent
    found = interpreted(convnet(), recorded)
    assert "2 of 6 parameters that were sent did not change (0.weight, 0.bias)" in str(found.findings)
    seen = found.observation(public_model(convnet(), SHAPE, NORMALIZATION), None, None)
    assert update_distance(seen, images(2), labels(2)) < 1e-5


def test_a_bias_that_batch_norm_takes_away_is_no_frozen_layer() -> None:
    recorded = update(convnet(norm=True), 4)
    recorded = replace(recorded, sent={**recorded.sent, "0.bias": recorded.before["0.bias"]})
    assert "did not change" not in str(interpreted(convnet(norm=True), recorded).findings)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    return lambda state: {**state, name: make(state[name])}


def nan(value: Tensor) -> Tensor:
    return torch.full_like(value, float("nan"))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("sent", lambda state: {}, "what was sent hold no tensor"),
        ("before", lambda state: {}, "the weights before hold no tensor"),
        ("sent", put("4.weight", lambda v: v.T), "axes are in another order"),
        ("sent", put("0.weight", lambda v: v.permute(2, 3, 1, 0)), "axes are in another order"),
        ("sent", put("0.weight", lambda v: v[:4]), r"\(4, 1, 3, 3\), but \(8, 1, 3, 3\) in the model: change"),
        ("before", put("6.bias", lambda v: v[:4]), r"6.bias is \(4,\), but \(10,\) in the model"),
        ("sent", put("0.weight", nan), "NaN or infinite values in 0.weight"),
        ("before", put("0.weight", nan), "the weights before hold NaN"),
        ("sent", put("0.bias", lambda v: v / 0), "NaN or infinite values in 0.bias"),
        ("sent", lambda s: {name: torch.zeros_like(v) for name, v in s.items()}, "everything that was sent is zero"),
        (
            "sent",
            lambda s: {f"layer{i}": v for i, v in enumerate(s.values())},
            "name layer0, layer1, layer2",
        ),
        ("sent", lambda s: {name.replace("0.", "conv/"): v for name, v in s.items()}, "name conv/weight, conv/bias"),
        ("sent", lambda s: {name: v for name, v in s.items() if "running" in name}, "nothing that was sent is a param"),
        ("before", lambda s: {name: v for name, v in s.items() if name != "0.bias"}, "the weights before lack 0.bias"),
        ("sent", put("0.weight", lambda v: v.to(torch.complex64)), "of type torch.complex64"),
        ("sent", put("0.weight", lambda v: v > 0), "of type torch.bool"),
    ],
)
def test_what_cannot_be_mended_ends_in_one_sentence(part: str, change: Callable[[State], State], message: str) -> None:
    with pytest.raises(LitReconError, match=message) as caught:
        read_evidence(convnet(norm=True), changed(change, part))
    assert "\n" not in str(caught.value)


def dropped(rate: float, seed: int, sign: int = 1) -> tuple[nn.Module, RecordedUpdate]:
    """New weights of a client of one image, of which a share was left as it was."""
    model, generator = mlp(seed), torch.Generator().manual_seed(seed)
    recorded = update(model, 1)
    sent = {}
    for name, before in recorded.before.items():
        moved = sign * (recorded.sent[name] - before)
        sent[name] = before + moved * (torch.rand(before.shape, generator=generator) >= rate)
    return model, replace(recorded, sent=sent)


@pytest.mark.parametrize(("rate", "seed"), [(0.5, 4), (0.9, 0), (0.9, 5)])
def test_missing_entries_of_the_head_are_not_taken_for_zeros(rate: float, seed: int) -> None:
    model, recorded = dropped(rate, seed)
    found = interpreted(model, recorded)
    assert found.simulated is not None
    assert doubts(found) == []
    moved = (recorded.before["1.weight"] - recorded.sent["1.weight"]) / 0.1
    torch.testing.assert_close(found.update["1.weight"], moved)


def test_what_is_left_of_the_head_tells_the_sign() -> None:
    told = [doubts(interpreted(*dropped(0.2, seed, sign=-1))) for seed in range(4)]
    assert sum("sign is reversed" in " ".join(own) for own in told) >= 3  # measured 4


def of_head(recorded: RecordedUpdate) -> RecordedUpdate:
    """The body was not sent."""
    return replace(recorded, sent={name: value for name, value in recorded.sent.items() if name.startswith("3.")})


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_layers_that_stayed_are_frozen_in_simulated_steps(optimizer: Optimizer, sent: bool) -> None:
    """Trained with the others, they would change what later steps see: a cosine distance of 0.08 and more."""
    model = mlp()
    after = copy.deepcopy(model)
    kind, lr = (torch.optim.SGD, 0.1) if optimizer == "sgd" else (torch.optim.Adam, 0.01)
    by_hand = kind(after[3].parameters(), lr=lr)
    for _ in range(10):
        by_hand.zero_grad()
        nn.functional.cross_entropy(after((images(4) - 0.5) / 0.25), labels(4)).backward()
        by_hand.step()
    recorded = Recorder(model, batch_size=4, lr=lr, steps=10, optimizer=optimizer).record(after)
    if not sent:
        recorded = of_head(recorded)
        model[1].requires_grad_(False)
    found = interpreted(model, recorded)
    assert found.frozen == ("1.weight", "1.bias")
    seen = found.observation(public_model(model, SHAPE, NORMALIZATION), None, None)
    assert update_distance(seen, images(4), labels(4)) < 1e-6


@pytest.mark.parametrize(
    ("steps", "still", "said"), [(10, [], True), (10, [1], False), (10, [1, 3], True), (1, [], False)], ids=str
)
def test_steps_of_layers_that_were_not_sent_are_said(steps: int, still: list[int], said: bool) -> None:
    """Where even what changed has no gradient in the model, its flags are not the client's."""
    model, recorded = mlp(), of_head(update(mlp(), 4, {"steps": steps}, steps=steps))
    for number in still:
        model[number].requires_grad_(False)
    found = interpreted(model, recorded)
    text = f"assume that all {steps} steps trained the parameters that were not sent, too (1.weight, 1.bias)"
    assert any(text in one.text for one in found.findings if one.kind == "open") is said
    assert found.frozen == (("1.weight", "1.bias") if still == [1] else ())
