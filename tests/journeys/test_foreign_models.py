"""Networks of other libraries attacked from the command line, without a line of Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def photos(workplace: Path) -> list[str]:
    """Coloured squares of 64x64 pixels in ten classes, and the options that attack one of them in two iterations."""
    random = np.random.default_rng(0)
    blocks = {"train": random.random((20, 4, 4, 3)), "test": random.random((10, 4, 4, 3))}
    pixels = {f"{name}_images": np.kron(part, np.ones((1, 16, 16, 1))) * 255 for name, part in blocks.items()}
    labels = {f"{name}_labels": np.arange(len(part)) % 10 for name, part in blocks.items()}
    np.savez(workplace / "photos.npz", **{name: part.astype(np.uint8) for name, part in pixels.items()}, **labels)
    data = ["run", "--data", "Npz", "--data.root", "photos.npz", "--attack", "GradientMatching", "--attack.steps", "2"]
    return [*data, "--victims.n", "1", "--lpips.network", "none", "--wandb.mode", "disabled"]


def test_a_torchvision_resnet(attack: Callable[..., Any], photos: list[str], workplace: Path) -> None:
    model = ["--model.class_path", "torchvision.models.resnet18", "--model.init_args.num_classes", "10"]
    ended = attack(*photos, *model, "--model.image_shape", "[3,64,64]", "--out", "runs/torchvision")
    assert ended.code == 0, ended.err
    assert "model       torchvision.models.resnet18(num_classes=10) with random weights" in ended.out
    metrics = json.loads((workplace / "runs/torchvision/metrics.json").read_text())
    assert metrics["label_accuracy"] == 1
    assert metrics["model"] == "torchvision.models.resnet18(num_classes=10)"
    assert metrics["weights"] == "random"
    assert load_file(workplace / "runs/torchvision/reconstructions.safetensors")["reconstructions"].shape == (
        (1, 3, 64, 64)
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_timm_network_with_weights(
    ending: str, attack: Callable[..., Any], photos: list[str], workplace: Path
) -> None:
    torch.manual_seed(1)
    state = timm.create_model("resnet10t", num_classes=10).state_dict()
    path = workplace / f"timm.{ending}"
    if ending == "pth":
        torch.save({"state_dict": state}, path)
    else:
        save_file(state, path)
    arguments = json.dumps({"model_name": "resnet10t", "num_classes": 10})
    model = ["--model.class_path", "timm.create_model", "--model.init_args", arguments, "--model.weights", path.name]
    folder = f"runs/timm_{ending}"
    ended = attack(*photos, *model, "--out", folder)
    assert ended.code == 0, ended.err
    metrics = json.loads((workplace / folder / "metrics.json").read_text())
    assert metrics["weights"] == path.name
    assert f"it was not checked whether {path.name} was trained on the attacked images" in metrics["notes"][0]
    assert "it was not checked whether" in (workplace / folder / "report.html").read_text()
    assert path.name in (workplace / folder / "report.html").read_text()


def test_a_loss_by_import_path(attack: Callable[..., Any], photos: list[str], workplace: Path) -> None:
    (workplace / "loss.yaml").write_text(
        "model: {class_path: torchvision.models.squeezenet1_1, init_args: {num_classes: 10}}\n"
        "knowledge: {labels: true}\n"
        "client: {loss: {class_path: torch.nn.CrossEntropyLoss, init_args: {label_smoothing: 0.2}}}\n"
        "attack: {class_path: GradientMatching, init_args: {labels: KnownLabels}}\n"
    )
    ended = attack(photos[0], "--config", "loss.yaml", *photos[1:5], *photos[7:], "--out", "runs/loss")
    assert ended.code == 0, ended.err
    again = attack("run", "--config", "runs/loss/config.yaml", "--out", "runs/loss_again")
    assert again.code == 0, again.err
    kept = [load_file(workplace / f"runs/{name}/reconstructions.safetensors") for name in ("loss", "loss_again")]
    assert torch.equal(kept[0]["reconstructions"], kept[1]["reconstructions"])
