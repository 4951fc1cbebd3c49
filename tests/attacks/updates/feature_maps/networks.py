"""Networks whose maps are recovered, and observations of their clients."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lit_recon.clients import Client
from lit_recon.defenses import Defense
from lit_recon.models import Backbone, ResNet18, Trunk
from lit_recon.records import Knowledge, Normalization, Observation

Mode = Literal["eval", "train"]


class Shallow(Trunk):
    """A convolution with BatchNorm and ReLU, and one that gives its input away: four numbers for every pixel."""

    def __init__(self, side: int = 16, channels: int = 256) -> None:
        super().__init__((3, side, side), {})
        self.out_features = channels * (side // 2) ** 2
        first, norm = nn.Conv2d(3, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48)
        self.layers = nn.Sequential(first, norm, nn.ReLU(), nn.Conv2d(48, channels, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layers(images).flatten(1)
        return maps


def backbone(
    activation: Literal["relu", "gelu", "elu"] = "relu",
    norm: Literal["batch", "group"] = "batch",
    width: int = 16,
    side: int = 32,
) -> Backbone:
    """ResNet-18 of a quarter of its width: 128 channels and 16 places in the last stage, batches of up to 8."""
    torch.manual_seed(0)
    trunk = ResNet18((3, side, side), norm=norm, activation=activation, width=width)
    model = Backbone(trunk, 5, Normalization((0.5,) * 3, (0.25,) * 3))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # running statistics that images of the tests have about
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.rand(32, 3, side, side, generator=torch.Generator().manual_seed(5)))
    return model.eval()


def observed(
    images: Tensor, model: Backbone | None = None, mode: Mode = "eval", defense: Defense | None = None
) -> Observation:
    client = Client(model if model is not None else backbone(), mode, defense=defense)
    labels = torch.arange(len(images)) % 3  # classes repeat
    return client.observe(images, labels, Knowledge(), torch.Generator().manual_seed(0))
