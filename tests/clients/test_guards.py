"""Guards, and values at the edge of their range."""

from __future__ import annotations

import pytest
import torch

from lit_recon.clients import ClientSettings, LocalSteps, LocalTraining
from lit_recon.clients.aggregate import SecureAggregation
from lit_recon.clients.gradient import PureBatchNorm, pure_copy
from lit_recon.errors import UnsupportedModelError
from lit_recon.models import MLP, Backbone
from lit_recon.records import Normalization


def test_statistics_are_recorded_while_recording() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    images = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    pure = pure_copy(model, "train")
    layer = pure[0]
    assert isinstance(layer, PureBatchNorm)
    pure(images)
    assert layer.recorded is None
    layer.recording = True
    pure(images)
    values = images.numpy().transpose(1, 0, 2, 3).reshape(3, -1)
    torch.testing.assert_close(layer.recorded.mean, torch.from_numpy(values.mean(axis=1)))
    torch.testing.assert_close(layer.recorded.var, torch.from_numpy(values.var(axis=1)))


def test_one_client_is_not_behind_secure_aggregation() -> None:
    torch.manual_seed(0)
    model = Backbone(MLP((1, 6, 6), [16]), 4, Normalization((0.5,), (0.25,)))
    training = LocalTraining(steps=2, lr=0.1)
    # attacks that need several steps of one client look for them
    images, labels = torch.rand(4, 1, 6, 6), torch.tensor([0, 1, 2, 3])
    one = ClientSettings(local_steps=training).client(model).observe(images, labels)
    assert isinstance(one.operator, LocalSteps)
    two = ClientSettings(local_steps=training, n_clients=2).client(model).observe(images, labels)
    assert isinstance(two.operator, SecureAggregation)


def test_statistics_of_one_value_are_refused() -> None:
    """A BatchNorm of one image of 1x1 has them; images of 2x2, two images, and running statistics have not."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(4)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Sequential(norm), torch.nn.Flatten())
    one, two, large = torch.rand(1, 1, 3, 3), torch.rand(2, 1, 3, 3), torch.rand(1, 1, 4, 4)
    with pytest.raises(UnsupportedModelError, match=r"layer '1\.0' needs more than one value .* got \(1, 4, 1, 1\)"):
        pure_copy(model, "train")(one)
    for mode, images in (("train", two), ("train", large), ("eval", one)):
        pure_copy(model, mode)(images)
