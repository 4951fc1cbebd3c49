"""What cannot work is refused at once: one line, exit code 2, nothing overwritten, nothing begun."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_recon.cli import train
from lit_recon.metrics import Unavailable, perceptual


def archive(path: Path, **changes: np.ndarray) -> Path:
    """Images of two classes, with some arrays replaced."""
    random = np.random.default_rng(0)
    arrays = {
        "train_images": random.integers(256, size=(20, 8, 8), dtype=np.uint8),
        "train_labels": np.arange(20) % 2,
        "test_images": random.integers(256, size=(10, 8, 8), dtype=np.uint8),
        "test_labels": np.arange(10) % 2,
    }
    np.savez(path, **{**arrays, **changes})
    return path


class Net(nn.Module):
    """A user's own classifier of small grey images."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.convolution, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.convolution(images).relu().mean((2, 3)))
        return logits


@pytest.fixture(scope="module")
def files(workplace: Path) -> Path:
    """Files that are wrong in many ways, beside some that are right."""
    folder = workplace / "bad"
    folder.mkdir()
    archive(folder / "good.npz")
    archive(folder / "labels.npz", test_labels=np.arange(10))
    archive(folder / "floats.npz", train_images=np.zeros((20, 8, 8), np.float32))
    archive(folder / "first.npz", train_images=np.zeros((20, 3, 8, 8), np.uint8))
    (folder / "truncated.npz").write_bytes((folder / "good.npz").read_bytes()[:300])
    (folder / "broken.yaml").write_text("a: [1\nb: }")
    (folder / "unknown.yaml").write_text("attack: {class_path: GradientMatching, init_args: {stepz: 3}}")
    arguments = ["--trunk", "ConvNet", "--epochs", "0", "--wandb.mode", "disabled"]
    for name, source in (("digits", ["Digits"]), ("large", ["Digits", "--data.size", "16"])):
        assert train(["backbone", "--data", *source, *arguments, "--out", str(folder / name)]) == 0
    npz = ["Npz", "--data.root", str(folder / "good.npz")]
    assert train(["backbone", "--data", *npz, *arguments, "--out", str(folder / "two")]) == 0
    model = (folder / "digits" / "backbone.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(model[: len(model) // 2])
    linear = nn.Linear(8, 10).state_dict()
    torch.save(linear, folder / "linear.pt")
    torch.save(nn.Linear(8, 10), folder / "pickle.pt")
    save_file({**linear, "weight": linear["weight"] / 0}, folder / "diverged.safetensors")
    return folder


NPZ = "--data Npz --data.root bad/"
MODEL = "--backbone.checkpoint bad/"
FOREIGN = "--model.class_path tests.journeys.test_bad_input.Net"
LINEAR = "--model.class_path torch.nn.Linear --model.init_args {'in_features':8,'out_features':10}"
RGB = "{'mean':[0,0,0],'std':[1,1,1]}"
CASES = {
    "unknown option": ("--foo 1", "--foo"),
    "unknown option of a class": ("--attack.stepz 3", "'stepz'"),
    "unknown key in a file": ("--config bad/unknown.yaml", "'stepz'"),
    "unknown class": ("--attack.objective Cosinus", "Cosinus"),
    "a text for a number": ("--seed x", "seed: expected int; got x"),
    "a value that is no choice": ("--knowledge.batch_norm some", "'batch', 'running', 'none'"),
    "a missing configuration file": ("--config nowhere.yaml", "nowhere.yaml"),
    "a configuration that is no YAML": ("--config bad/broken.yaml", "config"),
    "no steps": ("--attack.steps 0", "steps"),
    "a learning rate below zero": ("--attack.solver.lr=-1", "learning rate above 0"),
    "training that cannot work": ("--backbone.lr 0", "lr"),
    "padding as large as the image": ("--backbone.padding 8", "padding"),
    "a missing archive": (f"{NPZ}nowhere.npz", "nowhere.npz"),
    "a truncated archive": (f"{NPZ}truncated.npz", "truncated"),
    "labels out of range": (f"{NPZ}labels.npz", "labels must be 0 to 1"),
    "images out of range": (f"{NPZ}floats.npz", "uint8"),
    "images of the wrong shape": (f"{NPZ}first.npz", "transpose"),
    "a missing data folder": ("--data MNIST --data.root nowhere --data.download false", "nowhere"),
    "too many victims": ("--victims.n 400", "359"),
    "a batch larger than the victims": ("--victims.batch_size 3", "batch_size"),
    "a batch with more labels than classes": (f"{NPZ}good.npz --victims.n 5 --victims.batch_size 3", "distinct"),
    "a missing checkpoint": (f"{MODEL}nowhere.safetensors", "train.py backbone"),
    "a truncated checkpoint": (f"{MODEL}truncated.safetensors", "truncated"),
    "a file that is no checkpoint": (f"{MODEL}broken.yaml", "broken.yaml"),
    "a checkpoint for other images": (f"{MODEL}large/backbone.safetensors", "(1, 16, 16)"),
    "a checkpoint for other classes": (f"{MODEL}two/backbone.safetensors", "2 outputs, but the dataset has 10 classes"),
    "a checkpoint of another split": (f"{MODEL}digits/backbone.safetensors --data.seed 1", "split"),
    "a model without the layers of a prior": (
        "--backbone.trunk.norm none --attack.priors {'class_path':'BatchNormPrior','init_args':{'weight':1}}",
        "BatchNorm",
    ),
    "knowledge that an attack lacks": ("--attack.labels KnownLabels", "labels"),
    "missing LPIPS weights": ("--lpips.network alex --lpips.weights nowhere.pth", "nowhere.pth"),
    "W&B online without an account": ("--wandb.mode online", "API key"),
    "nobody together": ("--clients_per_batch 0", "clients_per_batch"),
    "a module that is nowhere": ("--model.class_path nowhere.Net", "No module named 'nowhere'"),
    "a class that is no module": ("--model.class_path collections.OrderedDict", "must be a torch.nn.Module"),
    "arguments that a module does not take": (f"{FOREIGN} --model.init_args.depth 3", "change model.init_args"),
    "two victim models": (f"{FOREIGN} {MODEL}digits/backbone.safetensors", "there is one victim model"),
    "settings of a model without its class": ("--model.weights bad/linear.pt", "needs model.class_path"),
    "a module that takes no images": (
        "--model.class_path torch.nn.Embedding --model.init_args.num_embeddings 9 --model.init_args.embedding_dim 3",
        "Embedding must take images (2, 1, 8, 8)",
    ),
    "a module that returns no logits": (
        "--model.class_path torch.nn.Conv2d --model.init_args {'in_channels':1,'out_channels':3,'kernel_size':3}",
        "Conv2d must return logits (2, k)",
    ),
    "a module with too few outputs": (f"{FOREIGN} --model.init_args.num_classes 7", "has 7 outputs, but the dataset"),
    "images of another shape than the module's": (f"{FOREIGN} --model.image_shape [1,16,16]", "are (1, 8, 8)"),
    "missing weights": (f"{FOREIGN} --model.weights nowhere.pt", "nowhere.pt"),
    "weights of another module": (f"{FOREIGN} --model.weights bad/linear.pt", "2 superfluous: weight, bias"),
    "diverged weights": (f"{LINEAR} --model.weights bad/diverged.safetensors", "NaN or infinite in 1 tensors: weight"),
    "a pickle in the place of weights": (f"{LINEAR} --model.weights bad/pickle.pt", "holds more than tensors"),
    "a normalization of other images": (f"{FOREIGN} --model.normalization {RGB}", "normalization has 3 channels"),
    "a loss that is nowhere": ("--client.loss torch.nn.functional.nowhere", "client.loss"),
    "a loss of something else": ("--client.loss torch.nn.functional.mse_loss", "mse_loss fails on logits"),
    "a loss that an attack does not assume": (
        "--client.loss torch.nn.CrossEntropyLoss --client.loss.label_smoothing 0.1",
        "IDLG assumes that clients minimize the mean cross-entropy",
    ),
    "an imprint in a module of another library": (
        f"{FOREIGN} --server.n_bins 9",
        "Imprint puts its block before the trunk of a Backbone",
    ),
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("case", CASES)
def test_refused(
    case: str,
    small: list[str],
    attack: Callable[..., Any],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NETRC", str(workplace / "nowhere"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    arguments, expected = CASES[case]
    before = set(workplace.rglob("*"))
    ended = attack(*small, *arguments.split(), "--out", "runs/refused")
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert expected in ended.err
    assert set(workplace.rglob("*")) == before


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "arguments",
    [
        "--backbone.checkpoint bad/large/backbone.safetensors",
        "--attack.labels KnownLabels",
        "--wandb.mode online",
        "--out bad --overwrite true",
    ],
)
def test_no_weights_are_looked_for_when_a_run_is_refused(
    arguments: str, small: list[str], attack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[str] = []
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "nowhere"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(perceptual, "download_weights", lambda network: tried.append(network) or Unavailable("offline"))
    asked = [*small, "--lpips.network", "alex", "--attack.steps", "2", "--victims.n", "1"]
    assert attack(*asked, "--out", "runs/refused", *arguments.split()).code == 2
    assert not tried


def test_weights_are_looked_for_once_in_a_run_that_begins(
    small: list[str], attack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[str] = []
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(perceptual, "download_weights", lambda network: tried.append(network) or Unavailable("offline"))
    asked = [*small, "--lpips.network", "alex", "--attack.steps", "2", "--victims.n", "1", "--out", tmp_path / "run"]
    ended = attack(*asked)
    assert ended.code == 0, ended.err
    assert tried == ["alex"]
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["lpips_reason"] == "offline"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_left_alone(attack: Callable[..., Any], small: list[str], workplace: Path) -> None:
    folder = workplace / "runs" / "kept"
    assert attack(*small, "--attack.steps", "2", "--victims.n", "1", "--out", folder).code == 0
    before = contents(folder)
    ended = attack(*small, "--out", folder)
    assert ended.code == 2
    assert "--overwrite true" in ended.err
    assert contents(folder) == before
    assert attack(*small, "--attack.steps", "3", "--victims.n", "1", "--out", folder, "--overwrite", "true").code == 0
    assert contents(folder) != before


def test_a_folder_of_somebody_elses_is_left_alone(
    attack: Callable[..., Any], small: list[str], workplace: Path
) -> None:
    folder = workplace / "photos"
    folder.mkdir()
    (folder / "me.jpg").write_bytes(b"jpg")
    ended = attack(*small, "--out", folder, "--overwrite", "true")
    assert ended.code == 2
    assert contents(folder) == {folder / "me.jpg": b"jpg"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "runs"),
        (["nowhere"], "nowhere"),
        (["bad/digits"], "digits"),
        (["runs/kept", "--out", "page.html"], "--out"),
        (["runs/kept", "nowhere"], "nowhere"),
    ],
)
def test_no_report_without_runs(
    arguments: list[str], expected: str, files: Path, attack: Callable[..., Any], workplace: Path
) -> None:
    ended = attack("report", *arguments)
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert expected in ended.err


@pytest.mark.slow
def test_the_real_script_shows_no_traceback(
    files: Path, small: list[str], script: Callable[..., subprocess.Popen[str]], workplace: Path
) -> None:
    process = script("attack.py", *small, "--data", "Npz", "--data.root", "bad/truncated.npz", "--out", "runs/refused")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (workplace / "runs" / "refused").exists()
