"""The benchmark of released models without an attack: accuracy and membership, against a training of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from benchmarks import released_training
from lit_recon.attacks.shadow import ShadowPlan
from lit_recon.data import InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Npz
from lit_recon.models.released import ReleasedCNN


@pytest.mark.parametrize("optimizer", released_training.OPTIMIZERS)
def test_a_model_after_each_number_of_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    generator, path = np.random.default_rng(0), tmp_path / "images.npz"
    np.savez(
        path,
        train_images=generator.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8),
        train_labels=np.arange(60) % 10,
    )
    monkeypatch.setattr(released_training, "EPOCHS", {20: (3, 12, 50)})
    row = released_training.measure(path, "cpu", 20, optimizer, longest=12)
    split = draw_informed_split(Npz(path), InformedSplitSettings(fixed=20, shadow=2, targets=1))
    assert split.rest is not None
    assert row["other_images"] == len(split.rest) == 37
    assert [model["epochs"] for model in row["models"]] == [3, 12]

    kind = released_training.OPTIMIZERS[optimizer]
    network = ReleasedCNN()
    start = ShadowPlan(network, split.fixed, kind).initial_weights()
    torch.nn.utils.vector_to_parameters(start, network.parameters())
    steps = (
        torch.optim.Adam(network.parameters(), lr=0.002)
        if optimizer == "Adam"
        else torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    )
    pixels = torch.cat([split.fixed.pixels(), split.targets.pixels()])
    labels = torch.cat([split.fixed.labels, split.targets.labels])
    for epoch in range(1, 13):
        steps.zero_grad()
        F.cross_entropy(network(pixels), labels).backward()
        steps.step()
        if epoch not in (3, 12):
            continue
        found = row["models"][epoch == 12]
        with torch.no_grad():
            known, others = network(split.fixed.pixels()), network(split.rest.pixels())
        assert found["train_accuracy"] == pytest.approx(
            (known.argmax(1) == split.fixed.labels).double().mean().item(), abs=0.06
        )
        assert found["accuracy"] == pytest.approx(
            (others.argmax(1) == split.rest.labels).double().mean().item(), abs=0.03
        )
        inside = F.cross_entropy(known, split.fixed.labels, reduction="none")
        outside = F.cross_entropy(others, split.rest.labels, reduction="none")
        below = (inside[:, None] < outside).double().mean().item()
        assert found["membership_auc"] == pytest.approx(below, abs=0.01)  # of 740 pairs; rounding may turn a few
