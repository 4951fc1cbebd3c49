"""Attacks, metrics, networks and defenses that an evaluation from the command line works with, or refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_recon.bounds.fisher import check_size
from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.reporting.run_folder import RunFolder
from tests.journeys.evaluations import Run, attack_file, figures, write_grid, written


@pytest.fixture(scope="session")
def grid(workplace: Path) -> Path:
    return write_grid(workplace)


@pytest.mark.slow
def test_an_attack_that_does_not_apply_is_named_and_a_generator_is_trained(workplace: Path, attack: Run) -> None:
    generator = workplace / "drawer.yaml"
    small = {"latent_size": 2, "width": 1, "critic_width": 1, "epochs": 1, "n_shown": 2, "search_steps": 1}
    generator.write_text(yaml.safe_dump({**small, "n_train": 64, "trainer": {"threads": 1}}))
    few = {"attack": {"init_args": {"steps": 10, "restarts": 1}}}
    content = {
        "backbone": {"trunk": {"class_path": "MLP", "init_args": {"hidden": [4]}}, "epochs": 0},
        "victims": {"n": 2},
        "attacks": {
            "jeon2021": {"config": attack_file("jeon2021_digits"), "settings": few, "generator": str(generator)},
            "kariyappa2023": {"config": attack_file("kariyappa2023")},
        },
        "defenses": {},
        "utility": None,
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
    }
    config, folder = written(workplace, "drawing", content)
    ended = attack("evaluate", "--config", config, "--out", folder)
    assert ended.code == 0, ended.err
    assert "3 runs, 0 of them done, 1 not applicable" in ended.out
    assert "not applicable: kariyappa2023, batch 1: CocktailPartyAttack separates the images of a batch" in ended.out
    drawn, mixed = figures(folder)
    assert float(drawn["rmse"]) > 0
    assert (drawn["applicable"], mixed["applicable"], mixed["rmse"]) == ("true", "false", "")
    (place,) = (folder / "generators").iterdir()
    assert (place / "generator.safetensors").is_file()
    assert attack("evaluate", "--config", config, "--out", folder).code == 2  # finished, although a cell has no figures


@pytest.mark.slow
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
            "exact": {"config": attack_file("liu2025_features"), "settings": recovery},
            "geiping2020": {"config": attack_file("demo_digits")},
        },
        "defenses": {},
        "utility": None,
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
        "paper": {"citation": "Some", "values": {"exact": {"none": {"2": [0.17]}}}},
    }
    config, folder = written(workplace, "features", content)
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


@pytest.mark.slow
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
            "shared": {"config": attack_file("demo_digits"), "settings": few},
            "other": {"config": attack_file("demo_digits"), "settings": {**few, "backbone": elsewhere}},
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
    config, folder = written(workplace, "own", content)
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


@pytest.mark.slow
def test_a_defense_whose_training_is_impossible_is_attacked_without_a_cost(workplace: Path, attack: Run) -> None:
    """DP-SGD clips single gradients, which BatchNorm mixes in training, not in the attacked client."""
    convolutions = {"class_path": "ConvNet", "init_args": {"widths": [4], "norm": "batch"}}
    content = {
        "backbone": {"trunk": convolutions, "epochs": 1, "n_train": 64},
        "victims": {"n": 2},
        "attacks": {
            "geiping2020": {
                "config": attack_file("demo_digits"),
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
    config, folder = written(workplace, "private_grid", content)
    ended = attack("evaluate", "--config", config, "--out", folder)
    assert ended.code == 0, ended.err
    assert "4 runs, 0 of them done, 1 not applicable" in ended.out
    assert "not applicable: training under dpsgd 0.1: DPSGD needs per-example gradients, but BatchNorm" in ended.out
    plain, private = figures(folder)
    assert float(plain["accuracy"]) > 0
    assert float(private["rmse"]) > 0
    assert private["accuracy"] == ""
    assert (folder / "utility.csv").read_text().count("\n") == 2  # the header and one training
    assert (folder / "batches.csv").read_text().count("\n") == 1 + 2 * 2


@pytest.mark.slow
def test_a_finished_grid_goes_on_where_its_bounds_may_be_others(
    workplace: Path, attack: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In more minutes, or for other clients; its cells are not run again."""
    monkeypatch.setattr("lit_recon.experiments.evaluate.bounds.check_size", partial(check_size, largest=10))
    few = {"attack": {"init_args": {"steps": 3, "restarts": 1}}}
    noise = {"defense": {"class_path": "GaussianNoise"}}
    content = {
        "backbone": {"trunk": {"class_path": "MLP", "init_args": {"hidden": [4]}}, "epochs": 0},
        "victims": {"n": 2},
        "attacks": {"geiping2020": {"config": attack_file("demo_digits"), "settings": few}},
        "defenses": {"noise": {"strength": "defense.init_args.std", "values": [0.1], "settings": noise}},
        "utility": None,
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
    }
    config, folder = written(workplace, "bounded_grid", content)

    def bounded(clients: int, minutes: float) -> tuple[int, str]:
        settings = ("--bound.clients", clients, "--bound.minutes", minutes)
        ended = attack("evaluate", "--config", config, "--out", folder, *settings)
        return ended.code, figures(folder)[1]["bound_rmse"] or figures(folder)[1]["bound_reason"]

    code, reason = bounded(1, 1e-9)
    assert code == 0
    assert reason.startswith("not computed: the information about 64 pixels would take about")
    cells = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/metrics.json")}
    assert bounded(1, 1e-9) == (2, reason)
    codes, bounds = zip(*(bounded(clients, 60) for clients in (1, 2, 2)), strict=True)
    assert codes == (0, 0, 2)
    assert 0 < float(bounds[0]) != float(bounds[1]) == float(bounds[2]) > 0
    assert cells == {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/metrics.json")}
    assert len(cells) == 2


@pytest.mark.slow
def test_the_page_of_a_finished_grid_is_written_anew_for_other_comparisons(workplace: Path, attack: Run) -> None:
    """Its cells are not run again, and it is left alone where nothing of the page has changed."""
    one = {"config": attack_file("demo_digits"), "settings": {"attack": {"init_args": {"steps": 2, "restarts": 1}}}}
    content = {
        "backbone": {"trunk": {"class_path": "MLP", "init_args": {"hidden": [4]}}, "epochs": 1},
        "victims": {"n": 2},
        "attacks": {"one": one, "two": one},
        "defenses": {},
        "utility": {"epochs": 1},
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
    }
    config, folder = written(workplace, "compared_grid", content)

    def cells() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.glob("*/*/metrics.json")}

    def compared(*settings: str) -> tuple[int, list[str], list[float]]:
        code = attack("evaluate", "--config", config, "--out", folder, *settings).code
        found = Evaluation.read(folder)
        return code, found.without, found.max_accuracy_drops

    assert compared()[:2] == (0, [])
    first, other = cells(), ("--without", "[two]", "--max_accuracy_drops", "[0.3]")
    assert len(first) == 3
    assert compared(*other) == (0, ["two"], [0.3])
    assert RunFolder(folder).is_complete
    assert compared(*other) == compared(*other, "--trainer.threads", "2") == (2, ["two"], [0.3])
    # other settings may not change with them, and the grid stays finished
    assert compared("--victims.n", "3") == (2, ["two"], [0.3])
    assert RunFolder(folder).is_complete
    assert compared("--utility", "null") == (0, [], compared()[2])
    assert cells() == first
