"""A training so small that every way of doing it can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_recon.attacks.shadow import GradientDescent, KnownTraining, LinearPlan, ShadowPlan, ShadowStore
from lit_recon.data import ImageSet
from lit_recon.models.released import ReleasedMLP


def random_images(n: int, seed: int, side: int = 5, classes: int = 4) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, 1, side, side), generator=generator).to(torch.uint8)
    names = [str(label) for label in range(classes)]
    return ImageSet(images, torch.randint(classes, (n,), generator=generator), names, f"random {seed}")


def known_training(network: torch.nn.Module, images: ImageSet, steps: int = 20) -> KnownTraining:
    return KnownTraining(network, images.pixels(), images.labels, GradientDescent(steps=steps))


def filled_store(folder: Path, plan: LinearPlan, images: ImageSet) -> ShadowStore:
    """A store of seven models in files of three, after the error was measured on the exact sample."""
    store = ShadowStore.create(folder, plan.description, "loop", 3)
    sample = plan.exact_sample(folder, images)
    assert sample is not None
    there = ShadowStore.create(sample.folder, sample.plan.description, "loop", 3)
    assert list(sample.plan.train_shards(there, [0], sample.images)) == [0]
    sample.measure()
    assert list(plan.train_shards(store, [0, 1, 2], images)) == [0, 1, 2]
    return store


@pytest.fixture
def plan() -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 5, 5), 4, [6]), random_images(15, 0), GradientDescent(steps=10))


@pytest.fixture
def shadows() -> ImageSet:
    return random_images(11, 1)
