"""Train a backbone, then attack it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_recon.models import ConvNet, load_backbone

CONFIG = Path(__file__).parents[2] / "configs" / "train" / "convnet_digits.yaml"


@pytest.fixture
def trained(workplace: Path, train: Callable[..., Any]) -> Path:
    folder = workplace / "runs" / "trained"
    if not folder.exists():
        ended = train("backbone", "--config", CONFIG, "--epochs", "2", "--n_train", "600", "--out", folder)
        assert ended.code == 0, ended.err
        assert ended.out.splitlines()[-1].split() == ["backbone", str(folder / "backbone.safetensors")]
    return folder


def test_a_training_leaves_its_model_and_record(trained: Path) -> None:
    checkpoint = load_backbone(trained / "backbone.safetensors")
    assert isinstance(checkpoint.model.trunk, ConvNet)
    assert checkpoint.epoch == 2
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["accuracy"] == checkpoint.accuracy > 0.5
    assert (trained / "config.yaml").is_file()
    assert list(trained.glob("logs/version_0/metrics.csv"))


def test_an_attack_takes_it(trained: Path, attack: Callable[..., Any], small: list[str], workplace: Path) -> None:
    folder = workplace / "runs" / "on_trained"
    ended = attack(*small, "--backbone.checkpoint", trained / "backbone.safetensors", "--out", folder)
    assert ended.code == 0, ended.err
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["backbone"] == str(trained / "backbone.safetensors")
    assert metrics["backbone_epochs"] == 2


def test_a_finished_training_is_kept(trained: Path, train: Callable[..., Any]) -> None:
    before = (trained / "backbone.safetensors").read_bytes()
    ended = train("backbone", "--config", CONFIG, "--epochs", "1", "--out", trained)
    assert ended.code == 2
    assert "finished run" in ended.err
    assert (trained / "backbone.safetensors").read_bytes() == before


def test_a_training_killed_before_its_last_file_only_writes_that(trained: Path, train: Callable[..., Any]) -> None:
    before = (trained / "backbone.safetensors").read_bytes()
    (trained / "metrics.json").unlink()
    ended = train("backbone", "--config", trained / "config.yaml")
    assert ended.code == 0, ended.err
    assert (trained / "metrics.json").is_file()
    assert (trained / "backbone.safetensors").read_bytes() == before


def test_overwriting_trains_anew(trained: Path, train: Callable[..., Any]) -> None:
    ended = train("backbone", "--config", CONFIG, "--epochs", "0", "--out", trained, "--overwrite", "true")
    assert ended.code == 0, ended.err
    assert load_backbone(trained / "backbone.safetensors").epoch == 0
    assert json.loads((trained / "metrics.json").read_text())["accuracy_reason"]
