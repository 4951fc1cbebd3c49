"""The page of a study of factors from cells whose figures are known."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.experiments.factors.diagnostics import measured_panels, rank_correlation
from lit_recon.experiments.factors.page import _base_panels, factor_table, write_page
from lit_recon.experiments.factors.results import FactorStudy, Point
from lit_recon.reporting.record import read_victims
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_victims
from tests.reporting.conftest import MakeRun

SETTINGS = {"name": "study", "paper": {"citation": "Balle et al.", "values": {}, "note": "Theirs is larger."}}
#: Success rate and accuracies of every cell.
SHARES = ("50\N{NO-BREAK SPACE}%", "80\N{NO-BREAK SPACE}%", "90\N{NO-BREAK SPACE}%")
MSE = {"base": 0.01, "fast": 0.02, "slow": 0.005, "other": 0.03, "private": 0.06}


def point(label: str, *cells: str, place: float | None = None, paper: float | None = None) -> dict[str, Any]:
    return {"label": label, "place": place, "paper": paper, "cells": [f"cells/{cell}" for cell in cells]}


FACTORS: dict[str, dict[str, Any]] = {
    "rate": {
        "title": "Learning rate",
        "axis": "learning rate",
        "setting": "descent.lr",
        "scale": "auto",
        "lines": [
            {
                "name": "",
                "points": [
                    point("0.01", "slow", place=0.01, paper=0.0049),
                    point("0.2", "base", place=0.2, paper=0.0089),
                    point("0.5", "fast", place=0.5),
                ],
            }
        ],
    },
    "activation": {
        "title": "Activation",
        "axis": "activation",
        "setting": "network.init_args.activation",
        "scale": "auto",
        "measures": ["gradients", "embedding"],
        "lines": [{"name": "", "points": [point("elu", "base"), point("relu", "other")]}],
    },
    "privacy": {
        "title": "Privacy",
        "axis": "epsilon",
        "setting": "descent.dp.target_epsilon",
        "scale": "log",
        "lines": [{"name": "clipped", "points": [point("10", "private", place=10.0)]}],
    },
    "seed": {
        "title": "Seeds",
        "axis": "seed",
        "setting": "seed",
        "scale": "linear",
        "lines": [{"name": "", "points": [point("0", "base", place=0.0), point("1", "fast", place=1.0)]}],
    },
    "start": {
        "title": "Start",
        "axis": "case",
        "setting": "",
        "scale": "auto",
        "lines": [{"name": "", "points": [point("random", "base"), point("trained", "other")]}],
    },
    "broken": {
        "title": "Broken",
        "axis": "case",
        "setting": "",
        "scale": "auto",
        "lines": [{"name": "", "points": [point("failed", "failed"), point("never", "never")]}],
    },
}


@pytest.fixture
def study(make_run: MakeRun, tmp_path: Path) -> Path:
    """A study with seven cells, two of which have no figures."""
    grid = RunFolder.open(tmp_path / "study", yaml.safe_dump(SETTINGS))
    for number, (name, mse) in enumerate(MSE.items()):
        figures = {"mse": mse, "mse_std": 0.004, "oracle_mse": 0.015, "baseline_mean_image_mse": 0.07, "seed": number}
        figures |= {"success_rate": 0.5, "n_batches": 8}  # every target image is a batch of its own
        run = make_run(f"study/cells/{name}", n=8, shape=(1, 4, 4), metrics=figures)
        models: dict[str, Any] = {"accuracy": 0.8, "train_accuracy": 0.9, "n_parameters": 30}
        if name == "private":
            models["membership_auc"] = 0.606
            models |= {"epsilon": 10.0, "noise_multiplier": 5.0, "bounds": [0.75, 0.125]}
        (run.path / "models.json").write_text(json.dumps(models))
    grid.failure("cells/failed").parent.mkdir()
    grid.failure("cells/failed").write_text(json.dumps({"reason": "it diverged", "traceback": ""}))
    for cell, errors in (("base", range(8)), ("other", [0] * 8)):
        gradients = {
            "steps": [0, 5],
            "norms": [[float(value) for value in errors]] * 2,
            "zeros": {"layers.1.weight": [0.5, 0.7], "layers.1.bias": [0.1, 0.1], "layers.3.weight": [0.0, 0.0]},
        }
        layout = {"points": [[float(i), 0.0] for i in range(8)], "labels": [0, 1] * 4, "class_names": ["cat", "dog"]}
        (grid.path / "cells" / cell / "gradients.json").write_text(json.dumps(gradients))
        content = json.dumps({**layout, "agreement": 0.6, "chance": 0.5})
        (grid.path / "cells" / cell / "embedding.json").write_text(content)
    described = {name: {"source": "", "note": "", "measures": [], **factor} for name, factor in FACTORS.items()}
    described["rate"]["source"] = "table III"
    content = {"base": ["cells/base"], "factors": described, "kappas": [0.1, 0.001]}
    grid.factors.write_text(json.dumps(content))
    return grid.path


def test_a_factor_s_table_holds_its_figures_beside_the_paper_s(study: Path) -> None:
    found = FactorStudy.read(study)
    header, rows = factor_table(found, found.factors[0])
    start = ["Learning rate", "MSE", "Over nearest other", "Mean image", "Success rate", "Accuracy"]
    assert header == [*start, "on training images", "Paper"]
    error = 0.004 / math.sqrt(8)
    assert rows[0] == ["0.01", f"0.0050 ± {error:.4f}", "× 0.33", "0.0700", *SHARES, "0.0049"]
    assert [row[0] for row in rows] == ["0.01", "0.2 (base)", "0.5"]
    assert [row[-1] for row in rows] == ["0.0049", "0.0089", "–"]
    header, rows = factor_table(found, found.factors[2])
    assert header[-5:] == ["Membership AUC", "Epsilon", "Noise", "Bound, κ 0.1", "Bound, κ 0.001"]
    attacked = ["10, clipped", "0.0600 ± 0.0014", "× 4.00", "0.0700", *SHARES]
    assert rows == [[*attacked, "0.61", "10", "5", "0.75", "0.125"]]
    _, rows = factor_table(found, found.factors[5])
    assert [row[1] for row in rows] == ["n/a", "n/a"]


def test_findings_name_what_helps_and_what_fails(study: Path) -> None:
    lines = FactorStudy.read(study).findings()
    assert lines[0] == "Base: MSE 0.0100 (nearest other image 0.0150, mean image 0.0700)."
    assert lines[1] == (
        "Learning rate: MSE 0.0050 at 0.01 to 0.0200 at 0.5. No nearer than the nearest other image: 0.5."
    )
    assert not any(line.startswith("Broken") for line in lines)
    assert lines[-1] == "2 of 7 cells have no results; see below."


def test_several_seeds_are_averaged_with_their_own_spread(study: Path) -> None:
    found = FactorStudy.read(study)
    cells = {cell.folder.path.name: cell for cell in found.cells}
    both = Point("both", None, None, [cells["base"], cells["fast"]])
    assert both.mean("mse") == pytest.approx(0.015)
    # Two means, half of their distance apart from their own mean.
    assert both.spread == pytest.approx(0.005)
    assert both.ratio == pytest.approx(1.0)
    assert Point("none", None, None, [cells["failed"]]).ratio is None
    assert Point("none", None, None, [cells["failed"]]).bounds == []


@pytest.mark.slow
def test_the_folder_holds_page_table_drawings_and_record(study: Path) -> None:
    page = write_page(study)
    text = page.read_text()
    for words in (
        "one factor at a time",
        "Balle et al.",
        "Theirs is larger.",
        "table III",
        "it diverged",
        "not been run",
    ):
        assert words in text
    assert text.count("data:image/") == 17
    names = {path.name for path in (study / "figures").iterdir()}
    assert {"base.png", "rate.svg", "rate.png", "rate_gallery.png", "privacy_bounds.svg", "seed_targets.svg"} < names
    assert "start_errors.svg" in names
    assert {"activation_gradients.svg", "activation_zeros.svg", "activation_embedding.svg"} < names
    assert not any(name.startswith("broken") for name in names)
    rows = list(csv.DictReader((study / "factors.csv").read_text().splitlines()))
    assert len(rows) == 1 + 3 + 2 + 1 + 2 + 2 + 2
    assert rows[1] | {"factor": "rate", "value": "0.01", "mse": "0.005", "paper_mse": "0.0049"} == rows[1]
    assert (rows[-2]["reason"], rows[-2]["mse"]) == ("it diverged", "")
    record = json.loads((study / "metrics.json").read_text())
    assert (record["n_cells"], record["n_failed"], record["mse"]) == (7, 2, 0.01)
    assert record["mse.rate.0.01"] == 0.005
    assert record["mse.broken.failed"] is None
    assert record["mse.broken.failed_reason"] == "it diverged"
    assert RunFolder(study).is_complete


def test_measures_say_what_they_measured(study: Path) -> None:
    found = FactorStudy.read(study)
    gradients, embedding = measured_panels(found.factors[1])
    # Errors of the base's targets ascend, and so do its norms; the other's are constant.
    assert [row[3] for row in gradients.rows] == ["+1.00", "–"]
    assert gradients.rows[0][4] == "60\N{NO-BREAK SPACE}%, 0\N{NO-BREAK SPACE}%"
    assert [row[2:] for row in embedding.rows] == [["60\N{NO-BREAK SPACE}%", "50\N{NO-BREAK SPACE}%"]] * 2
    (seeds,) = measured_panels(found.factors[3])
    assert "rank correlation of the target images' errors between two seeds is 1.00 on average: 1 would" in seeds.lead
    assert measured_panels(found.factors[0]) == []
    (errors,) = measured_panels(found.factors[4])
    (plot,) = errors.pictures
    assert plot.file == "start_errors.svg"
    assert all(words in plot.content.decode() for words in ("random", "trained", "nearest other image, mean"))
    assert measured_panels(found.factors[5]) == []  # no case has figures


def test_a_metric_that_is_the_same_for_all_targets_has_no_correlation(study: Path) -> None:
    run = RunFolder(study / "cells" / "base")
    write_victims(run, [replace(row, loss=0.0) for row in read_victims(run.victims)])
    (panel,) = _base_panels(FactorStudy.read(study))
    assert [row[1] for row in panel.rows if row[0] == "the attacker's own uncertainty"] == ["–"]


def test_seeds_without_a_correlation_say_so(study: Path) -> None:
    for name in ("base", "fast"):
        run = RunFolder(study / "cells" / name)
        rows = read_victims(run.victims)
        write_victims(run, [replace(row, scores={**row.scores, "mse": 0.01}) for row in rows])
    (seeds,) = measured_panels(FactorStudy.read(study).factors[3])
    assert seeds.lead.endswith("between two seeds is not defined, as all errors of a seed are equal.")


def test_rank_correlation_sees_order_alone() -> None:
    assert rank_correlation([1, 2, 3], [3, 5, 4]) == pytest.approx(0.5)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda folder: (folder / "factors.json").unlink(), MissingDataError, "holds no study"),
        (lambda folder: (folder / "factors.json").write_text("{"), CorruptFileError, "must be JSON"),
        (lambda folder: (folder / "factors.json").write_text("[]"), CorruptFileError, "must hold a JSON object"),
        (lambda folder: (folder / "factors.json").write_text('{"base": []}'), CorruptFileError, "is malformed"),
        (lambda folder: (folder / "cells/base/models.json").write_text("x"), CorruptFileError, "models.json must be"),
    ],
)
def test_damaged_files_are_named(
    study: Path, spoil: Callable[[Path], object], error: type[Exception], words: str
) -> None:
    spoil(study)
    with pytest.raises(error, match=words):
        write_page(study)
