"""Target images of which the public split holds copies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_recon.cli import attack
from lit_recon.data.sources import Npz
from lit_recon.experiments.update_attack.run import copies_notes
from lit_recon.modules.data import VictimDataModule


def archive(path: Path, copied: list[int]) -> Path:
    """30 public and 6 test images at random, of which those at `copied` are public images, under another label."""
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (n, 8, 8), dtype=np.uint8) for n in (30, 6))
    train[[7 + n for n in range(len(copied))]] = test[copied]
    labels = {"train_labels": np.arange(30) % 2, "test_labels": np.arange(6) % 2}
    np.savez(path, train_images=train, test_images=test, **labels)
    return path


@pytest.mark.parametrize(
    ("copied", "words"),
    [
        ([], []),
        ([4], ["1 of 6 target images (image 4", "equals a public image of"]),
        ([1, 5], ["2 of 6", "equal public"]),
    ],
)
def test_copies_of_target_images_are_found(copied: list[int], words: list[str], tmp_path: Path) -> None:
    data = VictimDataModule(Npz(archive(tmp_path / "own.npz", copied)), n_victims=6, batch_size=1, pool="all")
    assert sorted(data.public_victims.tolist()) == copied
    notes = copies_notes(data)
    assert len(notes) == bool(copied)
    assert all(word in note for note in notes for word in words)


def test_only_the_chosen_victims_count(tmp_path: Path) -> None:
    source = Npz(archive(tmp_path / "own.npz", [*range(6)]))
    data = VictimDataModule(source, n_victims=3, batch_size=2, pool="all")
    assert data.public_victims.tolist() == torch.cat(data.batches).tolist()
    assert copies_notes(data)[0].startswith("2 of 2 target images")


def test_a_run_says_so_on_the_screen_and_in_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", "Npz", "--data.root", str(archive(tmp_path / "own.npz", [2]))]
    small = ["--victims.n", "6", "--victims.pool", "all", "--backbone.epochs", "0", "--lpips.network", "none"]
    network = ["--backbone.trunk", "MLP", "--backbone.trunk.hidden", "[4]", "--backbone.cache", str(tmp_path / "cache")]
    where = ["--trainer.accelerator", "cpu", "--wandb.mode", "disabled", "--out", str(tmp_path / "run")]
    assert attack(["run", *data, *small, *network, "--attack.steps", "2", *where]) == 0
    said = "1 of 6 target images (image 2 of own test"
    assert f"note        {said}" in capsys.readouterr().out
    notes = json.loads((tmp_path / "run" / "metrics.json").read_text())["notes"]
    assert [note for note in notes if note.startswith(said)]
    assert said in (tmp_path / "run" / "report.html").read_text()
