"""Train a backbone, then attack it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_recon.attacks.trainset.backbones import released_from_backbone
from lit_recon.attacks.trainset.base import homogeneity
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
    assert 0 < metrics["final_train_loss"] < 2
    assert 0 < metrics["test_loss"] < 2
    assert (trained / "config.yaml").is_file()
    assert list(trained.glob("logs/version_0/metrics.csv"))


def test_an_attack_takes_it(trained: Path, attack: Callable[..., Any], small: list[str], workplace: Path) -> None:
    folder = workplace / "runs" / "on_trained"
    ended = attack(*small, "--backbone.checkpoint", trained / "backbone.safetensors", "--out", folder)
    assert ended.code == 0, ended.err
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["backbone"] == str(trained / "backbone.safetensors")
    assert metrics["backbone_epochs"] == 2


def test_a_homogeneous_network_is_trained_to_a_small_loss_and_released(
    workplace: Path, train: Callable[..., Any]
) -> None:
    folder = workplace / "runs" / "homogeneous"
    size = ["--trunk.hidden", "[32]", "--n_train", "40", "--batch_size", "40", "--validate_every", "40"]
    config = CONFIG.with_name("haim2022_mnist.yaml")
    ended = train("backbone", "--config", config, "--data", "Digits", *size, "--until_loss", "0.001", "--out", folder)
    assert ended.code == 0, ended.err
    epoch = load_backbone(folder / "backbone.safetensors").epoch
    assert 0 < epoch < 2_000  # measured:
    assert epoch % 40 == 0
    seen = released_from_backbone(folder / "backbone.safetensors", 40)
    assert homogeneity(seen) == pytest.approx(2, abs=1e-3)
    assert seen.loss is not None
    assert 0 < seen.loss <= 0.001
    assert json.loads((folder / "metrics.json").read_text())["final_train_loss"] == seen.loss
    measured = load_backbone(folder / "backbone.safetensors").model.normalization.mean
    assert torch.equal(seen.mean, torch.full((1, 8, 8), measured[0]).double())


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


SHORT = ("--n_train", "300", "--epochs", "1", "--trunk", "MLP", "--data", "Digits", "--padding", "1", "--flip", "false")


def test_a_training_under_a_defense_tells_its_price(train: Callable[..., Any], workplace: Path) -> None:
    folder = workplace / "runs" / "defended"
    ended = train("backbone", *SHORT, "--defense", "GaussianNoise", "--defense.std", "0.01", "--out", folder)
    assert ended.code == 0, ended.err
    assert "defense     GaussianNoise(std=0.01" in ended.out
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["accuracy"] == load_backbone(folder / "backbone.safetensors").accuracy
    assert metrics["final_train_loss"] > 0
    assert metrics["test_loss"] > 0
    assert "GaussianNoise" in (folder / "config.yaml").read_text()


def test_an_interrupted_training_keeps_its_defense(train: Callable[..., Any], workplace: Path) -> None:
    folder = workplace / "runs" / "kept_defense"
    began = train("backbone", *SHORT, "--defense", "GradientPruning", "--defense.fraction", "0.5", "--out", folder)
    assert began.code == 0, began.err
    (folder / "metrics.json").unlink()
    ended = train("backbone", *SHORT, "--defense", "GradientPruning", "--defense.fraction", "0.9", "--out", folder)
    assert ended.code == 2
    assert "other settings" in ended.err
    assert "defense" in ended.err


def test_noise_without_end_is_a_result(train: Callable[..., Any], workplace: Path) -> None:
    folder = workplace / "runs" / "diverged"
    ended = train("backbone", *SHORT, "--defense", "GaussianNoise", "--defense.std", "1e38", "--out", folder)
    assert ended.code == 0, ended.err
    assert "accuracy    none: the training diverged" in ended.out
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["accuracy"] is metrics["final_train_loss"] is metrics["test_loss"] is None
    assert "diverged" in metrics["accuracy_reason"]


def test_a_private_training_tells_its_guarantee(train: Callable[..., Any], workplace: Path) -> None:
    folder = workplace / "runs" / "private"
    network = ("--trunk", "ConvNet", "--trunk.widths", "[4]", "--batch_size", "100")
    private = ("--dp.max_grad_norm", "1.0", "--dp.target_epsilon", "5", "--dp.delta", "1e-3")
    ended = train("backbone", *SHORT, *network, *private, "--out", folder)
    assert ended.code == 0, ended.err
    assert "GroupNorm in place of 1 BatchNorm layers" in ended.out
    metrics = json.loads((folder / "metrics.json").read_text())
    assert 4.9 < metrics["epsilon"] <= 5
    assert metrics["delta"] == 1e-3
    assert metrics["neighbors"] == "add_or_remove_one"
    assert "dp-accounting" in metrics["accountant"]
    model = load_backbone(folder / "backbone.safetensors").model
    assert model.trunk.arguments["norm"] == "group"
    [log] = folder.glob("logs/version_0/metrics.csv")
    assert "epsilon" in log.read_text().splitlines()[0].split(",")


BAD = {
    "noise without a bound": ("--dp.noise_multiplier 1", "give a finite norm"),
    "an epsilon out of reach": (
        "--dp.max_grad_norm 1 --dp.noise_multiplier 0.5 --dp.target_epsilon 0.5",
        "the smallest possible epsilon is",
    ),
    "a private batch larger than the data": ("--dp.noise_multiplier 0 --batch_size 301", "batch_size is 300"),
    "a client's batch larger than the data": (
        "--defense GradientPruning --defense.fraction 0.5 --batch_size 301",
        "batch_size is 300",
    ),
    "no strength": ("--defense GradientPruning", "changes nothing: set its fraction"),
    "a strength out of its range": ("--defense GradientPruning --defense.fraction 1.5", "nearest valid choice is 1"),
    "per-example gradients with BatchNorm": ("--trunk ConvNet --defense DPSGD --defense.bound 1", "norm: group"),
    "private and in 16 bits": ("--dp.noise_multiplier 0 --precision bf16-mixed", "leave precision=bf16-mixed out"),
    "two kinds of training at once": (
        "--dp.noise_multiplier 0 --defense GradientPruning --defense.fraction 0.5",
        "leave defense",
    ),
    "uneven mini-batches": ("--local_steps.batches 3 --local_steps.steps 3", "must divide"),
    "an unknown setting": ("--dp.sigma 1", "sigma"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_refused(case: str, train: Callable[..., Any], workplace: Path) -> None:
    arguments, expected = BAD[case]
    before = set(workplace.rglob("*"))
    ended = train("backbone", *SHORT, *arguments.split(), "--out", "runs/refused")
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert expected in ended.err
    assert set(workplace.rglob("*")) == before
