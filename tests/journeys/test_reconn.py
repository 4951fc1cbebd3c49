"""From one command to a page with the images that an informed adversary found in released models."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning_fabric.accelerators import MPSAccelerator
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file

from lit_recon.attacks.shadow import GradientDescent, KnownTraining, ShadowPlan, train_models
from lit_recon.attacks.shadow.training import unflatten
from lit_recon.data.informed_splits import InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.models.released import ReleasedMLP
from tests.processes import outputs, ranks

ROOT = Path(__file__).parents[2]
SIZES = [
    "--split.fixed",
    100,
    "--split.shadow",
    400,
    "--split.targets",
    30,
    "--descent.steps",
    40,
    "--execution",
    "batched_mlp",
]
DEMO = ["--config", ROOT / "configs" / "reconn" / "digits_demo.yaml", "--reconstructor", "KernelRidge"]
SMALL = [*DEMO, *SIZES, "--curve", "[50]", "--shard_size", 64]

NARROW = ["--network", "ReleasedMLP", "--network.hidden", "[5]"]


@pytest.fixture(scope="module")
def run(workplace: Path, script: Callable[..., subprocess.Popen[str]]) -> Path:
    """The folder of a run of the real script."""
    process = script("reconn.py", "run", *SMALL, "--wandb.mode", "disabled")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert "Warning" not in err
    assert "warning" not in err
    assert out.splitlines()[-1].split() == ["report", "runs/digits_demo/report.html"]
    return workplace / "runs" / "digits_demo"


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


def test_the_images_are_found(run: Path) -> None:
    metrics = figures(run)
    assert metrics["mse"] < 0.4 * metrics["baseline_mean_image_mse"]  # measured 0.26
    assert metrics["mse"] < metrics["mse_at_50_shadows"]
    assert metrics["label_accuracy"] > 0.5
    assert metrics["oracle_mse"] <= metrics["baseline_nearest_public_mse"] < metrics["oracle_mse_percentile_50"]
    assert metrics["execution"] == "batched_mlp"
    assert metrics["n"] == 30


def test_figures_follow_from_the_images(run: Path) -> None:
    tensors, metrics = load_file(run / "reconstructions.safetensors"), figures(run)
    errors = ((tensors["reconstructions"].astype(np.float64) - tensors["targets"]) ** 2).mean((1, 2, 3))
    with (run / "victims.csv").open() as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["mse"]) for row in rows], errors, rtol=1e-6)
    assert metrics["mse"] == pytest.approx(errors.mean())
    nearer = [float(row["mse"]) < float(row["oracle_mse"]) for row in rows]
    assert metrics["success_rate"] == pytest.approx(np.mean(nearer))
    split = draw_informed_split(Digits(), InformedSplitSettings(100, 400, 30))
    np.testing.assert_allclose(tensors["targets"], split.targets.pixels().numpy())
    assert metrics["split_hash"] == split.hash


def test_the_page_speaks_of_this_adversary(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "All training images but one, 100 of them" in page
    assert "400 other images" in page
    assert "MSE with fewer shadow models" in page
    assert page.count("data:image/png;base64,") >= 90
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)


def test_a_finished_store_serves_other_runs_and_the_configuration_repeats(
    run: Path, reconn: Callable[..., Any]
) -> None:
    again = run.parent / "reconn_again"
    code, out, err = reconn("run", "--config", run / "config.yaml", "--out", again)
    assert code == 0, err
    assert "400 models, 0 of them to be trained" in out
    first, second = ((folder / "reconstructions.safetensors").read_bytes() for folder in (run, again))
    assert first == second
    found = figures(again)
    assert (figures(run)["shadow_seconds"] or 0) > 0
    assert found["shadow_seconds"] is None
    assert found["shadow_seconds_reason"] == "shadow models of an earlier process were used"


def test_two_processes_leave_the_stores_of_one(run: Path, train: Callable[..., Any], workplace: Path) -> None:
    few = [
        "--split.fixed",
        40,
        "--split.shadow",
        50,
        "--split.targets",
        5,
        "--shard_size",
        8,
        "--execution",
        "batched_mlp",
    ]
    batches = [*few, "--descent.batch_size", 16, "--descent.epochs", 2, "--trainer.threads", 1]
    orders = {order: ["shadows", *batches, "--descent.order", order] for order in ("known", "unknown")}
    cpu = ["--trainer.accelerator", "cpu"]
    whole = ["run", *SMALL, "--wandb.mode", "disabled", *cpu, "--store", "two", "--out", "runs/two"]
    parts = [("train", [*command, *cpu, "--store", f"two_{order}"]) for order, command in orders.items()]
    commands = [("reconn", whole), *parts]
    (workplace / "commands.json").write_text(json.dumps([[name, list(map(str, given))] for name, given in commands]))
    outputs(ranks(Path(__file__).with_name("commands_rank.py"), "commands.json", cwd=workplace), timeout=280)
    for order, command in orders.items():
        assert train(*command, "--store", f"one_{order}").code == 0
        one, two = (
            {path.name: path.read_bytes() for path in (workplace / f"{name}_{order}").glob("[!.]*")}
            for name in ("one", "two")
        )
        assert len(one) == 8  # seven shards and what they belong to
        assert one == two
    (alone,) = (path for path in (workplace / "runs" / "shadows").iterdir())
    shards = sorted(path.name for path in alone.glob("*.safetensors"))
    assert len(shards) == 7
    for name in shards:
        assert (workplace / "two" / name).read_bytes() == (alone / name).read_bytes()
    images = [(folder / "reconstructions.safetensors").read_bytes() for folder in (run, workplace / "runs" / "two")]
    assert images[0] == images[1]
    assert figures(workplace / "runs" / "two")["processes"] == 2


@pytest.mark.parametrize("command", ["run", "factors", "rero", "membership", "shadows"])
def test_a_gpu_without_64_bits_is_refused_before_anything_is_written(
    command: str,
    train: Callable[..., Any],
    reconn: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    arguments = [*SIZES, "--trainer.accelerator", "gpu"]
    if command == "shadows":
        ended = train(command, *arguments, "--store", tmp_path / "store")
        code, out, err = ended.code, ended.out, ended.err
    else:
        more = {
            "factors": ["--factors", '{"rate": {"setting": "descent.lr", "values": [0.1]}}'],
            "rero": ["--prior.candidates", "[10]"],
        }
        code, out, err = reconn(
            command, *arguments, *more.get(command, []), "--out", tmp_path / "run", "--wandb.mode", "disabled"
        )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "got trainer.accelerator=gpu: set trainer.accelerator to cpu" in err
    assert not list(tmp_path.iterdir())


def test_unknown_initial_weights_defeat_the_attack(run: Path, reconn: Callable[..., Any], workplace: Path) -> None:
    code, _, err = reconn("run", *SMALL, "--initialization", "fresh", "--curve", "[]", "--out", "runs/fresh")
    assert code == 0, err
    fresh, known = figures(workplace / "runs" / "fresh"), figures(run)
    mean_image = fresh["baseline_mean_image_mse"]
    assert mean_image == known["baseline_mean_image_mse"]
    assert 0.9 * mean_image < fresh["mse"] < 1.3 * mean_image  # no better than guessing the mean image
    assert "every model, released or shadow, has its own" in (workplace / "runs" / "fresh" / "report.html").read_text()


def test_models_that_somebody_else_trained_are_attacked(run: Path, reconn: Callable[..., Any], workplace: Path) -> None:
    split = draw_informed_split(Digits(), InformedSplitSettings(100, 400, 30))
    network = ReleasedMLP((1, 8, 8), 10)
    descent = GradientDescent(steps=40)
    start = ShadowPlan(network, split.fixed, descent).initial_weights()
    known = KnownTraining(network, split.fixed.pixels(), split.fixed.labels, descent)
    trained = train_models(known, start, split.targets.pixels(), split.targets.labels, "loop")
    state = {name: value.contiguous() for name, value in unflatten(network, trained).items()}
    save_file(state, workplace / "released.safetensors")
    code, _, err = reconn("run", *SMALL, "--released", "released.safetensors", "--out", "runs/theirs")
    assert code == 0, err
    assert figures(workplace / "runs" / "theirs")["mse"] == pytest.approx(figures(run)["mse"], rel=0.02)
    state["layers.3.bias"][0, 0] = float("nan")
    save_file(state, workplace / "broken.safetensors")
    refused = {
        "layers.3.bias holds NaN or infinite weights": ["broken.safetensors"],
        "must be (n, 5, 64) for this architecture": ["released.safetensors", *NARROW],
        "must hold one model per target, 29; layers.1.weight has 30": ["released.safetensors", "--split.targets", 29],
    }
    for complaint, arguments in refused.items():
        code, _, err = reconn("run", *SMALL, "--out", "runs/reconn_broken", "--released", *arguments)
        assert code == 2
        assert complaint in err
        assert err.count("\n") == 1
        assert not (workplace / "runs" / "reconn_broken").exists()


def test_the_papers_reconstructor_runs(run: Path, reconn: Callable[..., Any], workplace: Path) -> None:
    reconstructor = ["--reconstructor", "lit_recon.attacks.released.networks.NeuralReconstructor"]
    sizes = ["--reconstructor.hidden", "[100,100]", "--reconstructor.epochs", 30]
    code, _, err = reconn("run", *SMALL, *reconstructor, *sizes, "--curve", "[]", "--out", "runs/neural")
    assert code == 0, err
    metrics = figures(workplace / "runs" / "neural")
    assert metrics["mse"] < 0.8 * metrics["baseline_mean_image_mse"]
    assert metrics["training_loss"] > 0


def test_one_store_serves_all_views_and_the_page_says_what_was_seen(
    run: Path, reconn: Callable[..., Any], workplace: Path
) -> None:
    batches = ["--descent.batch_size", 16, "--descent.epochs", 6, "--descent.snapshots", "[2]", "--store", "batches"]
    views = {
        "black_box": ["--access", "BlackBox", "--access.images", 50],
        "last_layer": ["--access", "LayersOnly", "--access.layers", "[last]"],
    }
    sizes = ["--split.shadow", 200, "--curve", "[]"]
    for n_missing, (name, view) in zip((200, 0), views.items(), strict=True):
        code, out, err = reconn("run", *SMALL, *sizes, *batches, *view, "--out", f"runs/{name}")
        assert code == 0, err
        assert f"200 models, {n_missing} of them to be trained" in out
        metrics = figures(workplace / "runs" / name)
        assert metrics["mse"] < 0.75 * metrics["baseline_mean_image_mse"]
        # 100 images and the unknown one are seven batches an epoch; the models after two and six epochs are released.
        assert metrics["released_steps"] == "14, 42"
        assert metrics["n_features"] == {"black_box": 2 * 50 * 10, "last_layer": 2 * 110}[name]
        page = (workplace / "runs" / name / "report.html").read_text()
        assert metrics["seen"] in page
        assert "after several steps of training: 14, 42" in page
        assert "Which images each mini-batch of 16 held." in page
    code, _, err = reconn("run", *SMALL, *sizes, *batches, "--split.targets", 29, "--out", "runs/reconn_other")
    assert code == 2
    assert "holds models of other images than digits shadow: the store belongs to another split" in err
    assert not (workplace / "runs" / "reconn_other").exists()


def test_train_shadows_keeps_and_goes_on(
    train: Callable[..., Any], reconn: Callable[..., Any], workplace: Path
) -> None:
    arguments = [*SIZES, "--store", "kept", "--shard_size", 50, "--trainer.threads", 1]
    ended = train("shadows", *arguments, "--split.shadow", 120)
    assert ended.code == 0, ended.err
    assert "120 models, 120 of them to be trained, kept in kept" in ended.out
    ended = train("shadows", *arguments, "--split.shadow", 220)
    assert "220 models, 120 of them to be trained" in ended.out
    assert len(list((workplace / "kept").glob("shard_*"))) == 5
    others: list[tuple[list[object], str]] = [
        (["--seed", 1], "seed is 0 there, 1 now"),
        ([*NARROW], "network.hidden is [10] there, [5] now"),
        (["--split.seed", 1], "fixed_set is '"),
        (["--descent.lr", 0.1], "descent.lr is 0.2 there, 0.1 now"),
    ]
    for change, difference in others:
        ended = train("shadows", *arguments, *change)
        assert ended.code == 2
        assert "kept holds shadow models of another training" in ended.err
        assert difference in ended.err
        assert ended.err.count("\n") == 1
    with safe_open(workplace / "kept" / "shard_00002.safetensors", framework="pt") as file:
        content, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    content["deltas"][0, 0] = float("nan")
    save_file(content, workplace / "kept" / "shard_00002.safetensors", header)
    code, _, err = reconn("run", *arguments, "--split.shadow", 220, "--out", "runs/reconn_nan")
    assert code == 2
    assert "shard_00002.safetensors is damaged (it holds NaN or infinite weights): delete it" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--split.shadow", 1800], "digits has 1797 different ones"),
        (["--shadow_data", "Digits"], "must share no image with the fixed set; image"),
        (["--curve", "[401]"], "from 2 to split.shadow=400; got [401]"),
        (["--split.fixed", 0], "split.fixed and split.targets must be at least 1"),
        (["--shard_size", 0], "shard_size must be at least 1"),
        (["--released", "none.safetensors"], "there is no safetensors file of released models"),
        (["--descent.momentum", 1], "descent.momentum in [0, 1)"),
        (["--descent.seps", 1], "descent.seps"),
        (["--descent.batch_size", 102], "descent.batch_size must be at most 101, the fixed set and one image; got 102"),
        (["--descent.order", "unknown"], "full batches have no order"),
        (["--descent.snapshots", "[40]"], "descent.snapshots must be different ascending numbers from 1 to 39"),
        (["--descent.batch_size", 16, "--descent.snapshots", "[1]"], "the first 1 mini-batches of 16"),
        (["--access", "LayersOnly", "--access.layers", "[layers.9]"], "got ['layers.9']"),
        (["--access", "BlackBox", "--access.images", 401], "at most split.shadow=400; got 401"),
        (["--reconstructor.max_models", 399], "at most max_models=399 shadow models; got 400"),
        (["--reconstructor.solver.memory_gib", 0.001], "raise it, or lower split.shadow"),
        (
            ["--reconstructor", "lit_recon.attacks.released.networks.ConvolutionalReconstructor"],
            "at least 24 x 24 pixels; got 8 x 8",
        ),
    ],
)
def test_bad_input_is_named(
    reconn: Callable[..., Any], workplace: Path, arguments: list[object], complaint: str
) -> None:
    code, _, err = reconn("run", *SMALL, *arguments, "--out", "runs/bad_reconn")
    assert code == 2
    assert complaint in err
    assert len(err.strip().splitlines()) == 1
    assert not (workplace / "runs" / "bad_reconn").exists()
