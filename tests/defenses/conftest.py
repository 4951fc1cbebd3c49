"""A small client: model, batch of two images, and the gradient of its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from lit_recon.clients import GradientOperator
from lit_recon.defenses import Batch, BatchGradient, Round
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Normalization, Update, Weights

SHAPE = (1, 6, 6)


@pytest.fixture
def model() -> Backbone:
    torch.manual_seed(0)
    trunk = ConvNet(SHAPE, widths=[4, 6], norm="group", activation="tanh")
    return Backbone(trunk, 5, Normalization((0.5,), (0.25,))).double()


@pytest.fixture
def batch() -> Batch:
    images = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Batch(images, torch.tensor([4, 0, 2]))


@pytest.fixture
def gradient_of() -> Callable[[Backbone], BatchGradient]:
    def build(model: Backbone) -> BatchGradient:
        return partial(GradientOperator(model), Weights.of(model))

    return build


@pytest.fixture
def gradient(model: Backbone, gradient_of: Callable[[Backbone], BatchGradient]) -> BatchGradient:
    return gradient_of(model)


@pytest.fixture
def update(gradient: BatchGradient, batch: Batch) -> Update:
    return gradient(batch)


@pytest.fixture
def round_(gradient: BatchGradient, batch: Batch) -> Round:
    return Round(batch, gradient)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)
