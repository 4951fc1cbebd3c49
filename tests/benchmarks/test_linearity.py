"""The benchmark of linearity trains as the package does, and measures differences by share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import linearity
from benchmarks.released_training import OPTIMIZERS
from lit_recon.attacks.shadow import GradientDescent, ShadowPlan, train_models
from lit_recon.data import InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Npz
from lit_recon.models.released import ReleasedCNN


@pytest.fixture
def images(tmp_path: Path) -> Path:
    generator, path = np.random.default_rng(0), tmp_path / "images.npz"
    pixels = generator.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    np.savez(path, train_images=pixels, train_labels=np.arange(60) % 10)
    return path


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_its_whole_gradient_a_model_is_trained_as_always(images: Path, optimizer: str) -> None:
    split = draw_informed_split(Npz(images), InformedSplitSettings(fixed=20, shadow=2, targets=1))
    kind = OPTIMIZERS[optimizer]
    descent = GradientDescent(5, kind.lr, kind.momentum, kind.optimizer)
    plan = ShadowPlan(ReleasedCNN(), split.fixed, descent)
    own, start = split.targets, plan.initial_weights()
    usual = train_models(plan.known, start, own.pixels(), own.labels, "loop")[0]
    whole, none = (linearity.trained(plan.known, start, own.pixels(), own.labels, share) for share in (1.0, 0.0))
    assert (whole - usual).norm() < 1e-3 * (usual - none).norm()


def test_the_smallest_share_of_few_steps_is_linear(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"gradient descent": GradientDescent(3, lr=0.01)}
    monkeypatch.setattr(linearity, "OPTIMIZERS", short)
    row = linearity.measure(images, 20, 2, "gradient descent")
    assert row["models"] == row["errors"]["0.001"]["n"] == 2
    assert row["cosines"]["0.001"]["min"] > 0.99
    assert row["errors"]["0.1"]["max"] < row["errors"]["0.001"]["max"] < 0.2
    assert torch.isfinite(torch.tensor(row["errors"]["0.01"]["median"]))
