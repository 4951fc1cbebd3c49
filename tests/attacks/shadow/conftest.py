"""A training so small that every way of doing it can be compared."""

from __future__ import annotations

import pytest
import torch

from lit_recon.attacks.shadow import GradientDescent, KnownTraining, ShadowPlan
from lit_recon.data import ImageSet
from lit_recon.models.released import ReleasedMLP


def random_images(n: int, seed: int, side: int = 5, classes: int = 4) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, 1, side, side), generator=generator).to(torch.uint8)
    names = [str(label) for label in range(classes)]
    return ImageSet(images, torch.randint(classes, (n,), generator=generator), names, f"random {seed}")


def known_training(network: torch.nn.Module, images: ImageSet, steps: int = 20) -> KnownTraining:
    return KnownTraining(network, images.pixels(), images.labels, GradientDescent(steps=steps))


@pytest.fixture
def plan() -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 5, 5), 4, [6]), random_images(15, 0), GradientDescent(steps=10))


@pytest.fixture
def shadows() -> ImageSet:
    return random_images(11, 1)
