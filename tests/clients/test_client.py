"""What a client releases, and what an attacker sees of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lit_recon.clients import Client
from lit_recon.errors import ShapeError
from lit_recon.models import Backbone, ResNet18
from lit_recon.records import Batch, Knowledge, Normalization, Observation

SHAPE = (3, 8, 8)


@pytest.fixture
def model() -> Backbone:
    torch.manual_seed(0)
    return Backbone(ResNet18(SHAPE, width=4), 5, Normalization((0.5,) * 3, (0.25,) * 3))


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.tensor([4, 0, 2])


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("batch_norm", ["batch", "running", "none"])
def test_attacked_update_is_the_released_one(model: Backbone, batch: tuple, mode: str, batch_norm: str) -> None:
    client = Client(model, mode)
    released = client.release(*batch).update
    seen = client.observe(*batch, Knowledge(batch_norm=batch_norm)).update
    assert list(seen) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(seen[name], value) for name, value in released.items())


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_attacker_reproduces_the_update_bit_for_bit(model: Backbone, batch: tuple, mode: str) -> None:
    seen = Client(model, mode).observe(*batch)
    again = seen.operator(seen.weights, Batch(*batch))
    assert all(torch.equal(again[name], value) for name, value in seen.update.items())


def test_no_field_for_the_truth(model: Backbone, batch: tuple) -> None:
    images, labels = batch
    seen = Client(model).observe(images, labels)
    assert "images" not in {field.name for field in dataclasses.fields(Observation)}
    tensors = [value for value in vars(seen).values() if isinstance(value, torch.Tensor)]
    for group in (seen.update, seen.parameters, seen.buffers):
        tensors += list(group.values())
    assert not any(value.shape == images.shape for value in tensors)
    assert seen.labels is None
    assert seen.batch_statistics is None


def test_knowledge_decides_what_is_seen(model: Backbone, batch: tuple) -> None:
    full = Client(model).observe(*batch, Knowledge(labels=True, batch_norm="batch"))
    assert torch.equal(full.labels, batch[1])
    assert len(full.batch_statistics) == 20
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1)
    hidden = Client(model).observe(*batch, Knowledge(batch_norm="none"))
    means = [value for name, value in hidden.buffers.items() if name.endswith("running_mean")]
    assert means
    assert not any(value.any() for value in means)
    assert not any(value.any() for name, value in hidden.model.named_buffers() if name.endswith("running_mean"))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(3, 3, 9, 8), torch.tensor([0, 1, 2]), "takes images"),
        (torch.rand(3, 8, 8), torch.tensor([0]), "takes images"),
        (torch.rand(0, *SHAPE), torch.tensor([], dtype=torch.int64), "takes images"),
        (torch.rand(2, *SHAPE) * 255, torch.tensor([0, 1]), r"in \[0, 1\]"),
        (torch.rand(2, *SHAPE) - 0.5, torch.tensor([0, 1]), r"in \[0, 1\]"),
        (torch.rand(2, *SHAPE).index_fill(0, torch.tensor(1), torch.nan), torch.tensor([0, 1]), r"in \[0, 1\]"),
        (torch.zeros(2, *SHAPE, dtype=torch.uint8), torch.tensor([0, 1]), "float"),
        (torch.rand(2, *SHAPE), torch.tensor([0, 5]), r"0\.\.4"),
        (torch.rand(2, *SHAPE), torch.tensor([-1, 0]), r"0\.\.4"),
        (torch.rand(2, *SHAPE), torch.tensor([0]), "int64"),
        (torch.rand(2, *SHAPE), torch.tensor([0.0, 1.0]), "int64"),
    ],
)
def test_bad_batches_are_refused(model: Backbone, images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Client(model).release(images, labels)
