"""NaN and infinity in weights, updates, images and losses end with a line, or with figures that say why they lack."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from lit_recon import cli
from tests.faults.commands import CASES, OUT

SCRIPTS: dict[str, Callable[[list[str]], int]] = {
    "attack.py": cli.attack,
    "train.py": cli.train,
    "reconn.py": cli.reconn,
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Starts a case in this process, in an empty folder, with further arguments; its exit code and errors."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *more: object, again: bool = False) -> tuple[int, str]:
        case, place = CASES[name], tmp_path / "place"
        if not again:
            case.write(place)
            monkeypatch.chdir(place)
        out = ["--out", OUT] if case.has_run_folder else []
        code = SCRIPTS[case.script]([case.command, "--config", "settings.yaml", *out, *map(str, more)])
        return code, capsys.readouterr().err

    return run


def spoil(path: Path, name: str, value: float) -> None:
    """Replace the first number of a tensor of a file."""
    with safe_open(path, framework="numpy") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key).copy() for key in file.keys()}  # noqa: SIM118
    tensors[name].reshape(-1)[0] = value
    save_file(tensors, path, metadata)


def test_weights_of_a_victim_model(start: Callable[..., Any]) -> None:
    trunk = ["--backbone.trunk", "ConvNet", "--backbone.trunk.widths", "[4]", "--backbone.trunk.norm", "batch"]
    assert start("attack run", *trunk, "--victims.n", 1)[0] == 0
    [path] = Path().glob("runs/backbones/*/backbone.safetensors")
    whole, figures = path.read_bytes(), Path(OUT, "metrics.json").read_bytes()
    for tensor, value in (("trunk.layers.0.weight", math.nan), ("trunk.layers.1.running_var", math.inf)):
        spoil(path, tensor, value)
        code, err = start("attack run", *trunk, "--overwrite", "true", again=True)
        assert code == 2
        assert "its weights are not finite" in err.splitlines()[-1]
        assert Path(OUT, "metrics.json").read_bytes() == figures  # refused before anything is overwritten
        path.write_bytes(whole)


def test_weights_of_shadow_models(start: Callable[..., Any]) -> None:
    assert start("reconn run")[0] == 0
    spoil(next(Path().glob("cache/*/shard_00001.safetensors")), "deltas", math.nan)
    code, err = start("reconn run", "--overwrite", "true", again=True)
    assert code == 2
    assert "it holds NaN or infinite weights" in err
    assert not Path(OUT, "metrics.json").exists()


@pytest.mark.parametrize(
    ("case", "tensor", "value", "words"),
    [
        ("backbone", "head.bias", math.nan, "holds NaN or infinite weights, but utility.json"),
        ("generator", "generator.coarse.bias", math.inf, "tensors fit (they hold NaN or infinite values)"),
    ],
)
def test_trained_weights_that_were_damaged_before_the_last_file(
    case: str, tensor: str, value: float, words: str, start: Callable[..., Any]
) -> None:
    assert start(case)[0] == 0
    Path(OUT, "metrics.json").unlink()
    spoil(Path(OUT, f"{case}.safetensors"), tensor, value)
    code, err = start(case, again=True)
    assert code == 2
    assert words in err
    assert not Path(OUT, "metrics.json").exists()


@pytest.mark.parametrize(
    ("file", "tensor", "value", "words"),
    [
        ("update.safetensors", "sent/1.weight", math.inf, "hold NaN or infinite values in 1.weight"),
        ("update.safetensors", "before/1.weight", math.nan, "hold NaN or infinite values in 1.weight"),
        ("update.truth.safetensors", "truth/images", math.nan, "the true images must have pixels in [0, 1]"),
        ("update.truth.safetensors", "truth/images", -math.inf, "the true images must have pixels in [0, 1]"),
    ],
)
def test_updates_and_true_images(
    file: str, tensor: str, value: float, words: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    CASES["audit"].write(tmp_path / "spoiled")
    spoil(tmp_path / "spoiled" / file, tensor, value)
    code, err = start("audit", "--record", tmp_path / "spoiled" / "update.safetensors")
    assert code == 2
    assert words in err
    assert not Path(OUT).exists()


def test_a_file_without_true_images_is_not_passed_over(start: Callable[..., Any]) -> None:
    code, err = start("audit", "--truth", "update.safetensors")
    assert code == 2
    assert "update.safetensors must hold `images`; got before/1.bias, before/1.weight" in err
    assert start("audit", "--truth", "update.truth.safetensors", again=True)[0] == 0
    assert json.loads(Path(OUT, "metrics.json").read_text())["rmse"] < 1e-3


def test_a_training_that_diverges_has_no_accuracy(start: Callable[..., Any]) -> None:
    assert start("backbone", "--lr", 1e30)[0] == 0
    found = json.loads(Path(OUT, "metrics.json").read_text())
    assert found["accuracy"] is found["test_loss"] is found["final_train_loss"] is None
    assert "diverged" in found["accuracy_reason"]


@pytest.mark.parametrize(
    ("case", "settings", "words"),
    [
        (
            "generator",
            ["--recipe.adversarial", 0, "--recipe.lr", 1e30],
            "the training of the generator diverged: lower",
        ),
        ("shadows, exact", ["--descent.lr", 1e30], "16 of 16 models diverged to NaN or infinity: lower descent.lr"),
        ("attack run", ["--backbone.lr", 1e30], "diverged, its weights are not finite: train it with a lower lr"),
        ("attack run", ["--defense", "GaussianNoise", "--defense.std", 1e38], "holds NaN or infinite values"),
        ("attack run", ["--attack.init_args.solver.init_args.lr", 1e38], "Adam needs a learning rate of at most 1e+30"),
    ],
)
def test_losses_and_updates_that_overflow(
    case: str, settings: list[object], words: str, start: Callable[..., Any]
) -> None:
    code, err = start(case, *settings)
    assert code == 2
    assert words in err.splitlines()[-1]
    assert not Path(OUT, "metrics.json").exists()
