"""The settings of `configs/reconn` that take hours or days begin as they should, on a few random images."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_recon import cli
from lit_recon.models import MLP, Backbone, BackboneCheckpoint, save_backbone
from lit_recon.records import Normalization

CONFIGS = Path(__file__).parents[2] / "configs" / "reconn"
FEW = {"split.fixed": 6, "split.shadow": 14, "split.targets": 3, "descent.steps": 2, "execution": "loop"}
CPU = {"trainer.accelerator": "cpu", "trainer.threads": 1, "wandb.mode": "disabled"}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a small archive of either kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_recon.models.reconstructors._CHANNELS", (4, 3))
    generator = np.random.default_rng(0)
    for name, shape in {"mnist": (28, 28), "cifar10": (32, 32, 3)}.items():
        pixels = generator.integers(0, 256, (40, *shape)).astype(np.uint8)
        labels = np.arange(40) % 10
        np.savez(tmp_path / f"{name}.npz", train_images=pixels, train_labels=labels)
    return tmp_path


def run(config: str, images: Path, **more: object) -> int:
    settings: dict[str, Any] = {**FEW, **CPU, **{key.replace("__", "."): value for key, value in more.items()}}
    data = images / f"{config.split('_')[0]}.npz"
    given = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return cli.reconn(
        [
            "run",
            "--config",
            str(CONFIGS / f"{config}.yaml"),
            "--data.class_path",
            "Npz",
            "--data.root",
            str(data),
            *given,
        ]
    )


def figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path("runs") / name / "metrics.json").read_text())
    return found


@pytest.mark.slow
def test_the_papers_setting_for_color_images(images: Path) -> None:
    quiet = {"reconstructor__perceptual__network": "none", "lpips__network": "none"}
    assert run("cifar10_paper", images, reconstructor__epochs=2, **quiet) == 0
    metrics = figures("cifar10_paper")
    assert metrics["n"] == 3
    assert metrics["training_loss"] > 0
    assert "The reconstructor was trained without LPIPS: switched off by perceptual.network." in metrics["notes"]
    assert len(list(Path("runs/cifar10_paper/checkpoints/reconstructor").glob("*.ckpt"))) == 1


def test_the_small_setting_for_color_images(images: Path) -> None:
    assert run("cifar10_small", images, curve="[10]") == 0
    assert figures("cifar10_small")["mse_at_10_shadows"] > 0


def test_the_papers_setting_for_digits_and_a_classifier(images: Path) -> None:
    model = Backbone(MLP((1, 28, 28), hidden=[4]), 10, Normalization((0.5,), (0.5,)))
    save_backbone(images / "c.safetensors", BackboneCheckpoint(model, [str(i) for i in range(10)], "0" * 16, 1))
    small = {"reconstructor__hidden": "[8]", "reconstructor__epochs": 2, "classifier": images / "c.safetensors"}
    assert run("mnist_paper", images, **small) == 0
    metrics = figures("mnist_paper")
    with Path("runs/mnist_paper/victims.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert metrics["kl"] == pytest.approx(np.mean([float(row["kl"]) for row in rows]))
    assert metrics["baseline_mean_image_kl"] > 0
    success = [float(float(row["mse"]) < float(row["oracle_mse"])) for row in rows]
    assert [float(row["success"]) for row in rows] == success
    assert metrics["success_rate"] <= metrics["success_rate_held"]


def test_what_a_reconstructor_cannot_work_on_is_refused_before_training(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"reconstructor": "AndersonRetraining"}
    assert run("cifar10_small", images, curve="[]", **whole) == 2
    assert "first layer is linear" in capsys.readouterr().err
    assert run("mnist_small", images, curve="[]", classifier=images / "none.safetensors") == 2
    assert "there is no backbone at" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_first_layer_and_retraining_go_together(images: Path) -> None:
    nested = '{"class_path": "Retraining", "init_args": {"steps": 2, "inner": {"class_path": "FirstLayerRidge"}}}'
    assert run("mnist_small", images, curve="[]", reconstructor=nested) == 0
    metrics = figures("mnist_small")
    assert metrics["rank_one_share"] > 0.99
    assert metrics["kl"] is None
    assert "no classifier was given" in metrics["kl_reason"]
    assert any("2 steps on the distance" in note for note in metrics["notes"])
    assert (Path("runs") / "mnist_small" / "config.yaml").read_text().count("FirstLayerRidge") == 1


@pytest.mark.slow
def test_a_convolutional_network_is_attacked_without_shadow_models(images: Path) -> None:
    """Real training of a few steps on random images."""
    coarse = '"response": {"rank": 20, "steps": 3}, "trainings": 6, "evaluations": 100'
    few = f'{{"class_path": "NewtonRetraining", "init_args": {{{coarse}}}}}'
    assert run("cifar10_newton", images, split__shadow=2, split__targets=2, descent__steps=3, reconstructor=few) == 0
    metrics = figures("cifar10_newton")
    assert metrics["certified_rate"] == 1.0
    assert metrics["certified_mse_max"] < 1e-3
    assert any("at most 6 trainings, between which the weights are predicted" in note for note in metrics["notes"])
    assert list((Path("runs") / "cifar10_newton" / "checkpoints" / "reconstructor").glob("newton_*.safetensors"))


@pytest.mark.parametrize("name", ["mnist_retraining", "cifar10_retraining"])
def test_repeated_training_certifies_what_it_finds(name: str, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real training of a few steps on random images, which lie in all directions alike."""
    assert run(name, images, split__shadow=20, descent__steps=10, descent__lr=0.01) == 0
    out, metrics = capsys.readouterr().out, figures(name)
    assert f"the attack certifies {metrics['certified_rate']:.1%}" in out
    assert metrics["certified_rate"] == 1.0
    assert metrics["certified_mse"] <= metrics["certified_mse_max"] < 1e-3
    assert any("are certified: they passed the attack's own test" in note for note in metrics["notes"])
    assert list((Path("runs") / name / "checkpoints" / "reconstructor").glob("search_*.safetensors"))
    with (Path("runs") / name / "victims.csv").open() as file:
        assert all(float(row["loss"]) <= 1e-2 for row in csv.DictReader(file))
