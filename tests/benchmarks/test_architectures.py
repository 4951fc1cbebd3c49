"""Photographs of the benchmark of other architectures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.architectures import RATE, OtherNetwork, entries_per_pixel, photographs, record
from lit_recon.clients import Client
from lit_recon.clients.record import RecordedUpdate
from lit_recon.records import Normalization


def test_photographs_are_the_squares_in_the_middle(tmp_path: Path) -> None:
    wide, tall = np.zeros((4, 8, 3), np.uint8), np.zeros((8, 4, 3), np.uint8)
    wide[:, 2:6], tall[2:6] = 255, 100
    for name, pixels in (("b.png", wide), ("a.png", tall)):
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    found = photographs(tmp_path, 2)
    assert found.shape == (4, 3, 2, 2)  # and scikit-learn's two
    torch.testing.assert_close(found[:2], torch.tensor([100 / 255, 1.0]).view(2, 1, 1, 1).expand(-1, 3, 2, 2))


def test_a_recorded_update_is_that_of_the_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), torch.rand(3, 3, 2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(images).sum().backward()  # what an earlier training leaves behind
    record(model, images, OtherNetwork("ResNet-18, 64x64", 2, 1), tmp_path)
    found = RecordedUpdate.load(tmp_path / "resnet_18_64x64_2.safetensors")
    assert torch.equal(found.before["1.weight"], before["1.weight"])
    model.load_state_dict(before)
    client = Client(model, image_shape=(3, 2, 2), normalization=Normalization((0.5,) * 3, (0.25,) * 3))
    gradient = client.observe(images[:2], torch.arange(2)).update
    moved = (found.before["1.weight"] - found.sent["1.weight"]) / RATE
    torch.testing.assert_close(moved, gradient["1.weight"], atol=1e-5, rtol=1e-4)
    assert (found.known.batch_size, found.known.lr) == (2, RATE)
    assert torch.equal(found.truth["images"], images[:2])


def test_entries_are_those_that_the_second_convolution_sees() -> None:
    first = nn.Conv2d(3, 2, 2, stride=2, bias=False)
    nn.init.constant_(first.weight, 1.0)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(2, 1, 1), nn.Flatten(), nn.Linear(4, 10)).eval()
    images = torch.zeros(2, 3, 4, 4)
    images[0, :, :2], images[1] = 1.0, 1.0  # of the first image the upper half
    client = Client(model, image_shape=(3, 4, 4), normalization=Normalization((0.5,) * 3, (0.25,) * 3))
    seen = client.observe(images, torch.arange(2))
    assert entries_per_pixel(seen, images) == pytest.approx([4 / 48, 8 / 48])
    single = Client(nn.Sequential(nn.Conv2d(3, 1, 2), nn.Flatten(), nn.Linear(9, 10)), image_shape=(3, 4, 4))
    assert entries_per_pixel(single.observe(images, torch.arange(2)), images) == []
