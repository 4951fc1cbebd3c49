"""Buffers of BatchNorm layers that take no part in the client's forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.experiments.audit.updates import convnet, doubts, images, interpreted, update


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
