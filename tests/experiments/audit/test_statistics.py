"""Buffers of BatchNorm: layers that the client does not use or freezes, and rounding to half precision."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lit_recon.clients.record import Recorder
from tests.experiments.audit.updates import convnet, doubts, images, interpreted, labels, update

HALF = (torch.float16, torch.bfloat16)


class Spare(nn.Module):
    """A network with a BatchNorm layer that it does not use, before or behind the others by name."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        parts = {"body": convnet(norm=True), "spare": nn.BatchNorm2d(8)}
        for name in sorted(parts, reverse=first):
            self.add_module(name, parts[name])

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.get_submodule("body")(inputs)
        return outputs


@pytest.mark.parametrize("first", [False, True])
def test_a_layer_that_is_not_used_has_no_statistics(first: bool) -> None:
    model = Spare(first)
    found = interpreted(model, update(model, 4))
    assert doubts(found) == []
    assert found.known.steps == 1
    assert found.statistics is not None
    assert list(found.statistics) == ["body.1"]
    inputs = model.get_submodule("body.0")((images(4) - 0.5) / 0.25)
    torch.testing.assert_close(found.statistics["body.1"].mean, inputs.mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_a_layer_without_momentum_has_no_statistics() -> None:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, momentum=0.0), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))
    found = interpreted(model, update(model, 4))
    assert found.statistics is not None
    assert list(found.statistics) == ["4"]
    assert bool(found.statistics["4"].mean.isfinite().all())


@pytest.mark.parametrize("frozen", [[1], [4], []])
def test_layers_that_stayed_in_evaluation_mode_leave_no_statistics(frozen: list[int]) -> None:
    """The running means of such a layer are no means of the batch, and behind it the simulation is another one."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))
    recorded = update(model, 4)
    kept = {name: recorded.before[name] for name in recorded.before for i in frozen if name.startswith(f"{i}.")}
    found = interpreted(model, replace(recorded, sent={**recorded.sent, **kept}))
    if not frozen:
        assert doubts(found) == []
        assert found.statistics is not None
        return
    [doubt] = doubts(found)
    assert doubt.startswith(f"BatchNorm used the statistics of the batch, but its running ones in {frozen[0]}: ")
    assert found.statistics is None
    assert found.known.batch_norm == "train"


def _used() -> nn.Module:
    """A network whose running statistics are near those of images."""
    model = convnet(norm=True).train()
    for seed in range(30):
        model((images(16, seed) - 0.5) / 0.25)
    return model


def _rounded(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_is_not_taken_for_moved_statistics(dtype: torch.dtype) -> None:
    model = _used()
    after = copy.deepcopy(model).eval()
    nn.functional.cross_entropy(after((images(4) - 0.5) / 0.25), labels(4)).backward()
    torch.optim.SGD(after.parameters(), lr=0.1).step()
    recorder = Recorder(model, batch_size=4, lr=0.1, batch_norm="eval")
    found = interpreted(model, recorder.record(_rounded(after.state_dict(), dtype)))
    assert doubts(found) == []
    assert found.known.batch_norm == "eval"
    assert found.statistics is None


@pytest.mark.parametrize("dtype", HALF)
def test_statistics_of_the_batch_are_known_only_where_rounding_left_their_digits(dtype: torch.dtype) -> None:
    model = _used()
    recorded = update(model, 4)
    exact = interpreted(model, recorded).statistics
    found = interpreted(model, replace(recorded, sent=_rounded(dict(recorded.sent), dtype)))
    assert doubts(found) == []
    assert found.known.batch_norm == "train"
    if dtype is torch.bfloat16:
        assert found.statistics is None
        assert any("do not follow in 1, so few digits" in finding.text for finding in found.findings)
        return
    assert exact is not None
    assert found.statistics is not None
    torch.testing.assert_close(found.statistics["1"].var, exact["1"].var, rtol=0.02, atol=0)
