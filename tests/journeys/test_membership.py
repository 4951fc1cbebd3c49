"""From one command to a page that says who was a member."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lit_recon import cli
from lit_recon.privacy.noisy_sgd import PrivateDescent

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--config", ROOT / "configs" / "reconn" / "membership_digits.yaml"),
    *("--split.fixed", 60, "--split.shadow", 80, "--split.targets", 40, "--descent.steps", 20),
    *("--execution", "batched_mlp", "--histogram.images", 2, "--histogram.models", 6),
]


def metrics_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


@pytest.mark.slow
def test_known_initial_weights_give_membership_away_and_unknown_ones_hide_it(
    reconn: Callable[..., Any], workplace: Path
) -> None:
    code, out, err = reconn("membership", *SMALL, "--adversary_execution", "loop")
    assert code == 0, err
    assert "20 released models" in out
    folder = workplace / "runs" / "membership_digits"
    metrics = metrics_of(folder)
    assert metrics["known.train_both.advantage"] == 1
    assert metrics["known.train_both.auc_low"] < 1
    assert 0 < metrics["known.copy_error"] < 0.05  # rounding alone
    assert metrics["fresh.copy_error"] > 0.5
    assert metrics["fresh.train_both.auc_low"] < 0.5 < metrics["fresh.train_both.auc_high"]
    assert metrics["known.reconstruction.auc"] > 0.7
    assert metrics["known.reconstruction.implied_right"] == 1
    assert metrics["formats"].keys() < metrics.keys()
    assert metrics["formats"]["fresh.loss.auc"]["name"] == "AUC, compare losses, unknown initial weights"
    assert metrics["formats"]["known.reconstruction.rmse"]["higher_is_better"] is False
    with (folder / "victims.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = [(float(row["known.reconstruction"]) > 0) == (row["member"] == "1.0") for row in rows]
    assert metrics["known.reconstruction.advantage"] == pytest.approx(2 * np.mean(right) - 1)
    with (folder / "losses.csv").open() as file:
        counted = [(row["initialization"], row["member"]) for row in csv.DictReader(file)]
    assert counted.count(("known", "1")) == 2  # one model for each image: all are equal
    assert counted.count(("fresh", "1")) == 12
    assert counted.count(("known", "0")) == counted.count(("fresh", "0")) == 160
    games, tensors = load_file(folder / "games.safetensors"), load_file(folder / "reconstructions.safetensors")
    chosen = np.array([row["member"] == "1.0" for row in rows])[:, None, None, None]
    np.testing.assert_array_equal(np.where(chosen, games["second"], games["first"]), tensors["targets"])


@pytest.mark.slow
def test_the_page_has_metrics_histograms_and_curves(reconn: Callable[..., Any], workplace: Path) -> None:
    folder = workplace / "runs" / "membership_digits"
    page = (folder / "report.html").read_text()
    assert "Advantage over guessing" in page
    assert "train on both, known initial weights" in page
    assert page.count("data:image/svg+xml;base64,") == 2
    assert page.count("data:image/png;base64,") == 1
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    (folder / "report.html").unlink()
    assert cli.attack(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == page
    code, _, err = reconn("membership", *SMALL, "--adversary_execution", "loop")
    assert code == 2
    assert "--overwrite true" in err
    games = (folder / "games.safetensors").read_bytes()
    for name, damaged in (("losses.csv", b"initialization,image\n"), ("games.safetensors", games[:99])):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(damaged)
        assert cli.attack(["report", str(folder)]) == 2
        (folder / name).write_bytes(whole)


@pytest.mark.slow
def test_noise_is_part_of_the_record_and_of_the_page(reconn: Callable[..., Any], workplace: Path) -> None:
    few = ["--split.shadow", 20, "--split.targets", 20, "--descent.steps", 5, "--histogram.images", 1]
    few += ["--reconstructor", "KernelRidge"]
    code, _, err = reconn("membership", *SMALL, *few, "--descent.dp.noise_multiplier", 5, "--out", "runs/noisy_games")
    assert code == 0, err
    metrics = metrics_of(workplace / "runs" / "noisy_games")
    assert metrics["noise_multiplier"] == 5
    assert metrics["epsilon"] == PrivateDescent(noise_multiplier=5.0).epsilon(5)
    assert metrics["notes"][0].startswith("Every training but the adversary's own two of each game draws noise")
    page = (workplace / "runs" / "noisy_games" / "report.html").read_text()
    assert "The noise of the released model" in page
    assert "so there is only one" not in page
    # The adversary trains on both candidates without noise: the models of the run without any.
    code, _, err = reconn("membership", *SMALL, *few, "--descent.dp.noise_multiplier", 0, "--out", "runs/silent_games")
    assert code == 0, err
    for store, equal in (("own_first", True), ("own_second", True), ("released", False)):
        for kind in ("known", "fresh"):
            runs = [
                workplace / "runs" / name / "checkpoints" / f"{kind}_{store}"
                for name in ("noisy_games", "silent_games")
            ]
            noisy, silent = (load_file(run / "shard_00000.safetensors")["deltas"] for run in runs)
            assert np.array_equal(noisy, silent) == equal


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--split.targets", 41], "an even number of candidates"),
        (["--split.targets", 2, "--histogram.images", 1], "all 1 membership bits are equal"),
        (["--histogram.images", 31], "histogram.images must be at most 20"),
        (["--histogram.models", 0], "histogram.images and histogram.models must be at least 1"),
        (["--false_positive_rates", "[2]"], "false_positive_rates must be between 0 and 1"),
        (["--initialization", "known"], "initialization"),
        (["--reconstructor", "FirstLayerRidge"], "known initial weights and without noise; got fresh weights"),
        (["--reconstructor", "KernelRidge", "--reconstructor.max_models", 79], "at most max_models=79 shadow models"),
        (["--descent.snapshots", "[5]"], "reconn.py membership looks at final models only; got [5]"),
    ],
)
def test_bad_input_is_named(
    reconn: Callable[..., Any], workplace: Path, arguments: list[object], complaint: str
) -> None:
    code, _, err = reconn("membership", *SMALL, *arguments, "--out", "runs/bad_games")
    assert code == 2
    assert complaint in err
    assert len(err.strip().splitlines()) == 1
    assert not (workplace / "runs" / "bad_games").exists()
