"""A client whose gradients patches are matched to, and an attack that does so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import LBFGS, FeaturesOnly, GradientMatching, PatchMatching, Pixels, TotalVariation
from lit_recon.clients import Client, GradientOperator, SecureAggregation
from lit_recon.defenses import Defense
from lit_recon.models import Backbone
from lit_recon.records import BatchNormMode, ForwardOperator, Knowledge, Loss, Normalization, Observation
from tests.attacks.updates.feature_maps.networks import Shallow

STD = 3e-4
Rule = Callable[[nn.Module, BatchNormMode, Loss], ForwardOperator]


def victim(
    images: Tensor,
    defense: Defense | None,
    known: bool = True,
    mode: str = "eval",
    rule: Rule = GradientOperator,
    activation: nn.Module | None = None,
    knowledge: Knowledge | None = None,
    running: bool = True,
) -> Observation:
    """A convolution with 64 channels at 16 places of an image of 8 x 8 pixels, behind 48 maps.

    `running`: the BatchNorm layer before it has running statistics; without them it uses the batch's in either mode.
    """
    torch.manual_seed(0)
    model = Backbone(Shallow(8, 64), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    if not running:
        model.trunk.layers[1] = nn.BatchNorm2d(48, track_running_stats=False)
    if activation is not None:
        model.trunk.layers[2] = activation
    client = Client(model, mode, defense, rule)  # type: ignore[arg-type]
    labels = torch.arange(len(images)) % 3
    told = knowledge or Knowledge(defense=known)
    return client.observe(images, labels, told, torch.Generator().manual_seed(0))


def two_clients(model: nn.Module, batch_norm: BatchNormMode, loss: Loss) -> ForwardOperator:
    """One gradient of each of two clients, behind secure aggregation."""
    return SecureAggregation(GradientOperator(model, batch_norm, loss), 2)


def attack(steps: int = 8, further: int = 0) -> GradientMatching:
    return GradientMatching(
        FeaturesOnly(),
        [TotalVariation(3.0)],
        features=PatchMatching(further=further, approach=100),
        parametrization=Pixels(box=False, spread=0.2, smooth=0.5),
        solver=LBFGS(history=200),
        steps=steps,
    )
