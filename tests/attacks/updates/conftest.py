"""Small clients to attack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lit_recon.clients import Client
from lit_recon.models import MLP, Backbone, ConvNet, ResNet18, Trunk
from lit_recon.records import Knowledge, Normalization, Observation

SHAPE = (3, 8, 8)
Observe = Callable[..., Observation]


def _trunk(kind: str) -> Trunk:
    if kind == "resnet":
        return ResNet18(SHAPE, activation="gelu", width=4)
    return ConvNet(SHAPE) if kind == "convnet" else MLP(SHAPE, [32], activation="gelu")


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 3])


@pytest.fixture
def observe(batch: tuple[torch.Tensor, torch.Tensor]) -> Observe:
    def make(
        kind: str = "mlp", mode: str = "eval", batch_norm: str = "running", labels: bool = True, double: bool = False
    ) -> Observation:
        torch.manual_seed(0)
        model = Backbone(_trunk(kind), 5, Normalization((0.5,) * 3, (0.25,) * 3))
        images, classes = batch
        if double:
            model, images = model.double(), images.double()
        return Client(model, mode).observe(images, classes, Knowledge(labels, batch_norm))

    return make


@pytest.fixture(scope="session")
def photographs() -> torch.Tensor:
    """240 crops `(3, 32, 32)` of the two photographs that scikit-learn ships, at half size, shuffled."""
    from sklearn.datasets import load_sample_images

    crops = []
    for photograph in load_sample_images().images:
        pixels = torch.tensor(photograph).permute(2, 0, 1).float()[None] / 255
        small = torch.nn.functional.avg_pool2d(pixels, 2)[0]
        crops += [small[:, i : i + 32, j : j + 32] for i in range(0, 180, 18) for j in range(0, 286, 24)]
    order = torch.randperm(len(crops), generator=torch.Generator().manual_seed(0))
    return torch.stack(crops)[order[:240]]
