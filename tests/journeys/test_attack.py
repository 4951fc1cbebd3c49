"""From one command to a page with reconstructed images, and from its own record back to the same images."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from lit_recon.io.files import LOCK
from tests.processes import outputs, ranks

ROOT = Path(__file__).parents[2]
Script = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def run(workplace: Path, small: list[str], script: Script) -> Path:
    """The folder of a run of the real script with W&B offline, whose backbone no other journey has trained."""
    shutil.rmtree(workplace / "runs" / "backbones", ignore_errors=True)
    process = script("attack.py", *small, launcher=())
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert "Warning" not in err
    assert "--backbone.checkpoint" in out  # how to bring one's own model
    assert out.splitlines()[-1].split() == ["report", "runs/demo_digits/report.html"]
    return workplace / "runs" / "demo_digits"


def test_everything_is_left_behind(run: Path) -> None:
    left = {path.name for path in run.iterdir() if path.name != LOCK}
    files = {"config.yaml", "metrics.json", "victims.csv", "reconstructions.safetensors", "report.html"}
    assert left == files | {"checkpoints", "logs"}
    assert list(run.glob("logs/wandb/offline-run-*/*.wandb"))
    assert (run / "logs" / "losses.csv").is_file()
    assert not list(run.glob("checkpoints/*.pt"))


def test_the_images_are_recognised(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["rmse"] < 0.5 * metrics["baseline_mean_image_rmse"]
    assert metrics["label_accuracy"] == 1


def test_figures_follow_from_the_images(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    tensors = load_file(run / "reconstructions.safetensors")
    with (run / "victims.csv").open() as file:
        rows = list(csv.DictReader(file))
    errors = tensors["reconstructions"].astype(np.float64) - tensors["targets"]
    rmse = np.sqrt((errors**2).mean((1, 2, 3)))
    np.testing.assert_allclose([float(row["rmse"]) for row in rows], rmse, rtol=1e-6)
    assert metrics["rmse"] == pytest.approx(rmse.mean())
    assert metrics["rmse_std"] == pytest.approx(rmse.std(ddof=1))
    assert metrics["n"] == metrics["n_batches"] == len(rows) == 2
    assert [int(row["label"]) for row in rows] == tensors["labels"].tolist()


def test_the_record_says_what_ran(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["command"].startswith("python ")
    assert "attack.py run --config" in metrics["command"]
    assert metrics["lpips"] is None
    assert "lpips.network" in metrics["lpips_reason"]
    assert metrics["seconds"] > 2 * 140 * metrics["seconds_per_iteration"] > 0
    assert {"seed", "device", "peak_memory_mib", "version_torch", "split_hash", "created"} <= set(metrics)
    assert 0.8 < metrics["backbone_accuracy"] <= 1


def test_the_page_stands_alone(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 6
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)


@pytest.mark.slow
def test_the_configuration_repeats_the_run(run: Path, attack: Callable[..., Any]) -> None:
    again = run.parent / "again"
    ended = attack("run", "--config", run / "config.yaml", "--out", again)
    assert ended.code == 0, ended.err
    assert "from runs/backbones" in ended.out  # trained once for both
    ours, theirs = ((folder / "reconstructions.safetensors").read_bytes() for folder in (again, run))
    assert ours == theirs
    settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (again, run)]
    assert [part.pop("out") for part in settings] == [str(again), "runs/demo_digits"]
    assert settings[0] == settings[1]


def test_a_report_is_built_again(run: Path, attack: Callable[..., Any]) -> None:
    page = (run / "report.html").read_text()
    (run / "report.html").unlink()
    assert attack("report", run).code == 0
    assert (run / "report.html").read_text() == page


def test_several_runs_are_compared(run: Path, attack: Callable[..., Any], small: list[str], workplace: Path) -> None:
    other = workplace / "runs" / "more"
    assert attack(*small, "--attack.steps", "30", "--out", other).code == 0
    ended = attack("report", run, other, "--out", "both.html")
    assert ended.code == 0
    page = (workplace / "both.html").read_text()
    assert "demo_digits" in page
    assert "attack.init_args.steps" in page


def test_processes_share_the_victims(run: Path, small: list[str], attack: Callable[..., Any], workplace: Path) -> None:
    backbone = next(workplace.glob("runs/backbones/*/backbone.safetensors"))
    arguments = [*small, "--backbone.checkpoint", backbone, "--trainer.accelerator", "cpu", "--wandb.mode", "disabled"]
    outputs(ranks(ROOT / "attack.py", *arguments, "--out", "runs/shared", cwd=workplace))
    shared = workplace / "runs" / "shared"
    alone, together = (load_file(folder / "reconstructions.safetensors") for folder in (run, shared))
    for name, tensor in alone.items():
        np.testing.assert_array_equal(together[name], tensor)
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (run, shared)]
    assert metrics[0]["rmse"] == pytest.approx(metrics[1]["rmse"], rel=1e-12)
    assert metrics[1]["processes"] == 2


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(
    run: Path, small: list[str], attack: Callable[..., Any], workplace: Path
) -> None:
    """Victims that are computed together are the same ones; alone they round differently."""
    backbone = next(workplace.glob("runs/backbones/*/backbone.safetensors"))
    arguments = [*small, "--victims.n", "6", "--attack.steps", "40", "--clients_per_batch", "2"]
    arguments += ["--attack.execution", "vmap", "--backbone.checkpoint", backbone]
    arguments += ["--trainer.accelerator", "cpu", "--wandb.mode", "disabled"]
    assert attack(*arguments, "--out", "runs/processes_1").code == 0
    for size in (2, 3):
        outputs(ranks(ROOT / "attack.py", *arguments, "--out", f"runs/processes_{size}", cwd=workplace, size=size))
    folders = [workplace / "runs" / f"processes_{size}" for size in (1, 2, 3)]
    images = [load_file(folder / "reconstructions.safetensors") for folder in folders]
    for other in images[1:]:
        for name, tensor in images[0].items():
            np.testing.assert_array_equal(other[name], tensor)
    records = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    assert [record["processes"] for record in records] == [1, 2, 3]
    assert [record["together"] for record in records] == [2, 2, 2]
    assert [record["n"] for record in records] == [6, 6, 6]
    assert all("in groups of 2. Other groups round differently" in str(record["notes"]) for record in records)


def test_an_attack_without_steps_leaves_its_curve(attack: Callable[..., Any], workplace: Path) -> None:
    settings = ROOT / "configs" / "attack" / "kariyappa2023.yaml"
    small = ["--data", "lit_recon.data.sources.Digits", "--backbone.trunk.hidden", "[64]", "--victims.n", "4"]
    # behind a ReLU the zeros of derivatives solve the update before the first round
    smooth = ["--backbone.trunk.activation", "elu"]
    short = ["--attack.steps", "30", "--attack.refinements", "2", "--victims.batch_size", "4", "--backbone.epochs", "0"]
    ended = attack("run", "--config", settings, *small, *smooth, *short, "--out", "runs/party")
    assert ended.code == 0, ended.err
    with (workplace / "runs" / "party" / "logs" / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["step"]) for row in rows] == [0.0, 1.0, 2.0]


@pytest.mark.slow
def test_bounds_are_computed_on_request(run: Path, attack: Callable[..., Any], small: list[str]) -> None:
    out = run.parent / "bounded"
    noise = ("--defense", "GaussianNoise", "--defense.std", "0.01")
    ended = attack(*small, *noise, "--bound.clients", "1", "--attack.steps", "5", "--out", out)
    assert ended.code == 0, ended.err
    assert "lower bound 0." in ended.out
    metrics = json.loads((out / "metrics.json").read_text())
    [(number, own)] = json.loads((out / "bounds.json").read_text()).items()
    assert number == "0"
    for name in ("bound_rmse", "bound_independent_rmse", "bound_public_rmse"):
        assert 0 < metrics[name] == own[name]
    with (out / "victims.csv").open() as file:
        shown = [row["bound_rmse"] for row in csv.DictReader(file)]
    assert float(shown[0]) == pytest.approx(own["bound_rmse"])
    assert shown[1:] == [""]
    assert "ower bound" in (out / "report.html").read_text()
