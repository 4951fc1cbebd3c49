"""Evaluations from the command line: in one go, killed and resumed, grown, with failures, on a Ray cluster."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_recon.experiments.update_attack import run as run_command
from lit_recon.reporting.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]


@pytest.fixture(scope="session")
def grid(workplace: Path) -> Path:
    """Two defenses against one attack, with a network that trains in a second."""
    attack = _attack_file("demo_digits")
    steps = {"attack": {"init_args": {"steps": 40, "restarts": 1}}}
    content = {
        "name": "tiny",
        "backbone": {
            "trunk": {"class_path": "MLP", "init_args": {"hidden": [16]}},
            "epochs": 1,
            "padding": 1,
            "flip": False,
        },
        "victims": {"n": 2, "pool": "all"},
        "attacks": {"geiping2020": {"config": attack, "settings": steps}},
        "defenses": {
            "noise": {
                "strength": "defense.init_args.std",
                "values": [0.01, 0.1],
                "settings": {"defense": {"class_path": "GaussianNoise"}},
            },
            "local": {"strength": "client.local_steps.steps", "values": [2], "settings": {}},
        },
        "utility": {"epochs": 1},
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
    }
    path = workplace / "tiny.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def finished(folder: Path) -> dict[str, int]:
    """When every finished cell was finished."""
    return {
        path.parent.name: path.stat().st_mtime_ns
        for part in ("cells", "utility")
        for path in folder.glob(f"{part}/*/metrics.json")
    }


def figures(folder: Path) -> list[dict[str, str]]:
    """The table without what it cost to make."""
    with RunFolder(folder).table.open() as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.fixture(scope="session")
def whole(workplace: Path, grid: Path, script: Callable[..., subprocess.Popen[str]]) -> Path:
    """The grid in one go."""
    folder = workplace / "runs" / "tiny_whole"
    process = script("attack.py", "evaluate", "--config", grid, "--out", folder, "--wandb.mode", "disabled")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "[8/8] local 2, geiping2020, batch 1: RMSE 0." in out
    assert out.splitlines()[-1] == f"report      {folder / 'report.html'}"
    return folder


def test_a_grid_leaves_a_table_pictures_and_a_verdict(whole: Path, attack: Run) -> None:
    rows = figures(whole)
    assert [(row["defense"], row["strength"]) for row in rows] == [
        ("none", ""),
        ("noise", "0.01"),
        ("noise", "0.1"),
        ("local", "2.0"),
    ]
    assert all(float(row["rmse"]) > 0 and float(row["accuracy"]) > 0.2 and row["strongest"] == "true" for row in rows)
    assert all(float(row["final_train_loss"]) > 0 for row in rows)
    page = (whole / "report.html").read_text()
    assert "Price and protection" in page
    again = attack("report", whole)
    assert again.code == 0
    assert (whole / "report.html").read_text().count("<h2>") == page.count("<h2>")


def test_every_cell_has_its_bound_or_the_reason_why_not(whole: Path) -> None:
    rows = figures(whole)
    none, weak, strong, local = rows
    assert "the only bound is 0" in none["bound_reason"]
    assert "the only bound is 0" in local["bound_reason"]
    for row in (weak, strong):
        assert 0 < float(row["bound_rmse"]) < float(row["unbiased_bound_rmse"] or "inf")
        # the attack clips to the range of pixels and has a prior: only the bound for any attack binds it. Measured
        # 0.005 and 0.045 against 0.119 and 0.125 of two victims: beyond three of their standard errors (0.006, 0.005)
        assert float(row["bound_rmse"]) < float(row["rmse"]) - 3 * float(row["rmse_std"]) / 2**0.5
    assert float(weak["bound_rmse"]) < float(strong["bound_rmse"])
    page = (whole / "report.html").read_text()
    assert "Lower bounds on the error of any attack" in page


def test_a_finished_grid_is_not_touched(whole: Path, grid: Path, attack: Run) -> None:
    before = finished(whole)
    refused = attack("evaluate", "--config", grid, "--out", whole)
    assert refused.code == 2
    assert "holds a finished run" in refused.err
    assert finished(whole) == before


def test_killed_and_resumed_gives_the_same_table_and_runs_nothing_twice(
    workplace: Path, grid: Path, whole: Path, script: Callable[..., subprocess.Popen[str]], attack: Run
) -> None:
    folder = workplace / "runs" / "tiny_killed"
    process = script("attack.py", "evaluate", "--config", grid, "--out", folder)
    while len(finished(folder)) < 6:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    before = finished(folder)
    assert 6 <= len(before) < 8
    resumed = attack("evaluate", "--config", grid, "--out", folder)
    assert resumed.code == 0, resumed.err
    assert {name: at for name, at in finished(folder).items() if name in before} == before
    assert figures(folder) == figures(whole)


def test_a_grid_grows_by_the_cells_that_are_new(workplace: Path, grid: Path, attack: Run, whole: Path) -> None:
    folder = workplace / "runs" / "tiny_grown"
    one = yaml.safe_load(grid.read_text())
    one["defenses"] = {"noise": {**one["defenses"]["noise"], "values": [0.01]}}
    first = workplace / "first.yaml"
    first.write_text(yaml.safe_dump(one, sort_keys=False))
    assert attack("evaluate", "--config", first, "--out", folder, "--name", "tiny").code == 0
    before = finished(folder)
    assert len(before) == 4
    assert attack("evaluate", "--config", grid, "--out", folder).code == 0
    after = finished(folder)
    assert len(after) == 8
    assert {name: after[name] for name in before} == before
    assert figures(folder) == figures(whole)


def test_a_failed_cell_is_listed_and_tried_again(
    workplace: Path, grid: Path, attack: Run, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, execute = workplace / "runs" / "tiny_failed", run_command.execute

    def failing(arguments: Any, values: Any) -> None:
        if "noise_0.1" in str(values.out):
            raise RuntimeError("no memory left")
        execute(arguments, values)

    with monkeypatch.context() as context:
        context.setattr(run_command, "execute", failing)
        ended = attack("evaluate", "--config", grid, "--out", folder)
    assert ended.code == 0
    assert "noise 0.1, geiping2020, batch 1: FAILED, no memory left" in ended.out
    assert "1 cells have no results" in ended.out
    assert [row["reason"] for row in figures(folder) if row["reason"]] == ["no memory left"]
    assert "no memory left" in (folder / "report.html").read_text()
    (failure,) = (folder / "failed").iterdir()
    assert "failing" in json.loads(failure.read_text())["traceback"]
    assert attack("evaluate", "--config", grid, "--out", folder).code == 0
    assert figures(folder) == figures(whole)


def test_an_attack_that_does_not_apply_is_named_and_a_generator_is_trained(workplace: Path, attack: Run) -> None:
    generator = workplace / "drawer.yaml"
    small = {"latent_size": 2, "width": 1, "critic_width": 1, "epochs": 1, "n_shown": 2, "search_steps": 1}
    generator.write_text(yaml.safe_dump({**small, "n_train": 64, "trainer": {"threads": 1}}))
    few = {"attack": {"init_args": {"steps": 10, "restarts": 1}}}
    content = {
        "backbone": {"trunk": {"class_path": "MLP", "init_args": {"hidden": [4]}}, "epochs": 0},
        "victims": {"n": 2},
        "attacks": {
            "jeon2021": {"config": _attack_file("jeon2021_digits"), "settings": few, "generator": str(generator)},
            "kariyappa2023": {"config": _attack_file("kariyappa2023")},
        },
        "defenses": {},
        "utility": None,
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
    }
    config, folder = workplace / "drawing.yaml", workplace / "runs" / "drawing"
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    ended = attack("evaluate", "--config", config, "--out", folder)
    assert ended.code == 0, ended.err
    assert "3 cells, 0 of them done, 1 not applicable" in ended.out
    assert "not applicable: kariyappa2023, batch 1: CocktailPartyAttack separates the images of a batch" in ended.out
    drawn, mixed = figures(folder)
    assert float(drawn["rmse"]) > 0
    assert (drawn["applicable"], mixed["applicable"], mixed["rmse"]) == ("true", "false", "")
    (place,) = (folder / "generators").iterdir()
    assert (place / "generator.safetensors").is_file()
    assert attack("evaluate", "--config", config, "--out", folder).code == 2  # finished, although a cell has no figures


def test_attacks_can_be_judged_by_their_features(workplace: Path, attack: Run) -> None:
    wide = {"class_path": "WideFeatureLayer", "init_args": {"n_neurons": 128, "n_trained": 64, "activation": "gelu"}}
    features = {"init_args": {"recovery": {"class_path": "ExactRecovery"}}}
    recovery = {"attack": {"init_args": {"features": features}}}
    content = {
        "metric": "feature_error",
        "backbone": {
            "trunk": {"class_path": "MLP", "init_args": {"hidden": [8]}},
            "feature_layer": wide,
            "epochs": 0,
        },
        "victims": {"n": 4},
        "batch_sizes": [2],
        "attacks": {
            "exact": {"config": _attack_file("liu2025_features"), "settings": recovery},
            "geiping2020": {"config": _attack_file("demo_digits")},
        },
        "defenses": {},
        "utility": None,
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
        "paper": {"citation": "Some", "values": {"exact": {"none": {"2": [0.17]}}}},
    }
    config, folder = workplace / "features.yaml", workplace / "runs" / "features"
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    ended = attack("evaluate", "--config", config, "--out", folder)
    assert ended.code == 0, ended.err
    assert "not applicable: geiping2020, batch 2: it recovers no features" in ended.out
    exact, images = figures(folder)
    assert float(exact["feature_error"]) < 1e-4  # rounding of single precision
    assert (exact["paper"], exact["strongest"], images["applicable"]) == ("0.17", "true", "false")
    assert "paper 0.17" in (folder / "report.html").read_text()


#: A module of the user's own, with a metric and a network.
OWN = """
from torch import nn
from lit_recon.metrics import Measure, Metric, register

@register
class Brightness(Metric):
    measure = Measure("brightness", "Brightness error", higher_is_better=False, decimals=5, unit="gray")

    def __call__(self, found, truth):
        return (found.mean(dim=(1, 2, 3)) - truth.mean(dim=(1, 2, 3))).abs()

def network(hidden):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, 10))
"""


def test_a_metric_and_a_network_from_outside_the_package(
    workplace: Path, attack: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(workplace)
    few = {"attack": {"init_args": {"steps": 10, "restarts": 1}}}
    elsewhere = {"trunk": {"class_path": "MLP", "init_args": {"hidden": [4]}}, "epochs": 0}
    content = {
        "model": {"class_path": "own_parts.network", "init_args": {"hidden": 12}},
        "metric": "own_parts.Brightness",
        "utility": None,
        "victims": {"n": 2},
        "attacks": {
            "shared": {"config": _attack_file("demo_digits"), "settings": few},
            "other": {"config": _attack_file("demo_digits"), "settings": {**few, "backbone": elsewhere}},
        },
        "defenses": {
            "noise": {
                "strength": "defense.init_args.std",
                "values": [0.1],
                "settings": {"defense": {"class_path": "GaussianNoise"}},
            }
        },
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
    }
    config, folder = workplace / "own.yaml", workplace / "runs" / "own"
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    for change, words in (
        (("--utility", '{"epochs": 1}'), "set utility to null"),
        (("--metric", "darkness"), "darkness"),
    ):
        refused = attack("evaluate", "--config", config, "--out", folder, *change)
        assert refused.code == 2
        assert words in refused.err
    ended = attack("evaluate", "--config", config, "--out", folder)
    assert ended.code == 0, ended.err
    rows = figures(folder)
    assert [row["strongest"] for row in rows] == ["true", "false", "true", "false"]  # `other` has its own network
    runs = [json.loads((folder / row["folder"] / "metrics.json").read_text()) for row in rows]
    assert [float(row["brightness"]) for row in rows] == [run["brightness"] for run in runs]
    assert [run.get("model") for run in runs] == ["own_parts.network(hidden=12)", None] * 2
    assert float(rows[2]["bound_rmse"]) > 0
    page = (folder / "report.html").read_text()
    assert "<h2>Brightness error, batch size 1</h2>" in page
    assert f"{runs[0]['brightness']:.5f}" in page
    assert "on its own MLP(hidden=[4])" in page


def test_a_figure_that_cannot_be_had_is_told_before_anything_runs(
    workplace: Path, grid: Path, attack: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(workplace / "empty"))
    arguments = ("--metric", "lpips", "--lpips.network", "alex", "--lpips.download", "false")
    ended = attack("evaluate", "--config", grid, "--out", workplace / "runs" / "perceived", *arguments)
    assert ended.code == 2
    assert "metric is lpips, which cannot be loaded" in ended.err
    assert not (workplace / "runs" / "perceived").exists()


def _attack_file(name: str) -> str:
    return str(ROOT / "configs" / "attack" / f"{name}.yaml")


@pytest.mark.timeout(600)
def test_cells_run_at_the_same_time_on_a_cluster(workplace: Path, grid: Path, whole: Path, attack: Run) -> None:
    pytest.importorskip("ray")
    folder = workplace / "runs" / "tiny_cluster"
    ended = attack("evaluate", "--config", grid, "--out", folder, "--cluster", "local")
    assert ended.code == 0, ended.err
    assert "cluster     1 nodes" in ended.out
    assert sum(line.startswith("[") for line in ended.out.splitlines()) == 8
    for ours, theirs in zip(figures(folder), figures(whole), strict=True):
        assert ours.keys() == theirs.keys()
        for name, cell in ours.items():  # workers have other numbers of threads, which round otherwise
            assert cell == theirs[name] or float(cell) == pytest.approx(float(theirs[name]), rel=1e-3, abs=1e-4)


def test_torchrun_is_refused_and_the_cluster_is_named(
    workplace: Path, grid: Path, attack: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = attack("evaluate", "--config", grid, "--out", workplace / "runs" / "bad")
    assert ended.code == 2
    assert "attack.py evaluate runs in one process" in ended.err
    assert "--cluster local" in ended.err
    assert not (workplace / "runs" / "bad").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"defenses.noise.values": [-1.0]}, "GaussianNoise needs std at least 0"),
        ({"batch_sizes": [64]}, "64"),
        ({"trainer.devices": 2}, "--cluster local"),
        ({"attacks.geiping2020.config": "nowhere.yaml"}, "nowhere.yaml"),
        ({"attacks.geiping2020.settings": {"attack": {"init_args": {"stepps": 3}}}}, "stepps"),
        ({"defenses.noise.settings": {"defense": {"class_path": "DPSGD"}}}, "noise"),
        (
            {
                "defenses.noise": {
                    "strength": "defense.init_args.bound",
                    "values": [1.0],
                    "settings": {"defense": {"class_path": "PerExampleClipping"}},
                },
                "backbone.trunk": {"class_path": "ConvNet", "init_args": {"widths": [4], "norm": "batch"}},
                "client": {"batch_norm": "train"},
            },
            "GroupNorm",
        ),
        ({"utility": {"epochs": -3}}, "epochs"),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(
    changes: dict[str, Any], words: str, workplace: Path, grid: Path, attack: Run
) -> None:
    content = yaml.safe_load(grid.read_text())
    for key, value in changes.items():
        *path, last = key.split(".")
        place = content
        for name in path:
            place = place[name]
        place[last] = value
    bad = workplace / "bad.yaml"
    bad.write_text(yaml.safe_dump(content, sort_keys=False))
    ended = attack("evaluate", "--config", bad, "--out", workplace / "runs" / "bad")
    assert ended.code == 2
    assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not RunFolder(workplace / "runs" / "bad").path.exists()


def test_a_defense_whose_training_is_impossible_is_attacked_without_a_price(workplace: Path, attack: Run) -> None:
    """DP-SGD clips single gradients, which BatchNorm mixes in training, not in the attacked client."""
    convolutions = {"class_path": "ConvNet", "init_args": {"widths": [4], "norm": "batch"}}
    content = {
        "backbone": {"trunk": convolutions, "epochs": 1, "n_train": 64},
        "victims": {"n": 2},
        "attacks": {
            "geiping2020": {
                "config": _attack_file("demo_digits"),
                "settings": {"attack": {"init_args": {"steps": 3, "restarts": 1}}},
            }
        },
        "defenses": {
            "dpsgd": {
                "settings": {"defense": {"class_path": "DPSGD", "init_args": {"bound": 1.0}}},
                "strength": "defense.init_args.noise_multiplier",
                "values": [0.1],
            }
        },
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
    }
    config, folder = workplace / "private.yaml", workplace / "runs" / "private"
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    ended = attack("evaluate", "--config", config, "--out", folder)
    assert ended.code == 0, ended.err
    assert "4 cells, 0 of them done, 1 not applicable" in ended.out
    assert "not applicable: training under dpsgd 0.1: DPSGD needs per-example gradients, but BatchNorm" in ended.out
    plain, private = figures(folder)
    assert float(plain["accuracy"]) > 0
    assert float(private["rmse"]) > 0
    assert private["accuracy"] == ""
    assert (folder / "utility.csv").read_text().count("\n") == 2  # the header and one training
    assert (folder / "batches.csv").read_text().count("\n") == 1 + 2 * 2


def test_a_grid_in_parts_is_the_grid(workplace: Path, grid: Path, whole: Path, attack: Run) -> None:
    folder = workplace / "runs" / "tiny_parts"
    first = attack("evaluate", "--config", grid, "--out", folder, "--only", "[none, noise_0.1]")
    assert first.code == 0, first.err
    assert "grid        4 cells, 0 of them done" in first.out
    assert [row["reason"] for row in figures(folder)] == ["", "not run yet", "", "not run yet"]
    ended = attack("evaluate", "--config", grid, "--out", folder, "--only", "[noise, local]")
    assert ended.code == 0, ended.err
    assert "grid        6 cells, 2 of them done" in ended.out
    assert figures(folder) == figures(whole)
