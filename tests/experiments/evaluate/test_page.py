"""The page, the tables and the pictures of an evaluation."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError
from lit_recon.experiments.evaluate import tables
from lit_recon.experiments.evaluate.equal_utility import compare
from lit_recon.experiments.evaluate.page import build_evaluation, scatter, summary_lines, write_evaluation
from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.experiments.evaluate.tables import attack_tables, comparisons, csv_table
from lit_recon.metrics import RMSE, Measure, metrics_of
from lit_recon.reporting.pages import TableCell
from lit_recon.reporting.run_folder import RunFolder
from tests.experiments.evaluate.conftest import change, entry, marks, texts


def test_tables_hold_every_cell_or_the_reason_why_not(evaluated: RunFolder) -> None:
    (table,) = attack_tables(Evaluation.read(evaluated))
    assert table.header[:4] == ["Defense", "Near", "Far, malicious server", "Accuracy ↑"]
    assert "nearest public image 0.200, mean image 0.251" in table.lead
    rows = {row[0]: row for row in table.rows}
    assert marks(rows["no defense"])[1:3] == ["rival", "ours"]  # by an honest server, and by any
    failed, near = rows["noise 0.1"][2], rows["pruning 0.99"][1]
    assert isinstance(failed, TableCell)
    assert failed.reason == "out of memory"
    assert isinstance(near, TableCell)
    assert near.small == ["± 0.030", "paper 0.26"]
    assert rows["pruning 0.99"][4] == "+10.0"
    assert rows["noise 1"][3] == "n/a"


def test_other_metrics_have_tables_where_they_were_measured(evaluated: RunFolder) -> None:
    evaluation = Evaluation.read(evaluated)
    (table,) = attack_tables(evaluation, "psnr")
    assert table.title.startswith("PSNR ↑, batch size 2")
    assert texts(table.rows[0])[2] == "21.5\N{NO-BREAK SPACE}dB"
    assert marks(table.rows[0])[2] == "ours"
    near = table.rows[2][1]
    assert isinstance(near, TableCell)
    assert near.small == ["± 0.9"]  # the paper prints RMSE alone
    assert attack_tables(evaluation, "lpips") == []


def test_attackers_who_never_know_the_defense_have_one_column_with_that_of_no_defense(evaluated: RunFolder) -> None:
    cells = json.loads(evaluated.grid.read_text())["cells"]
    change(evaluated, cells=[{**cell, "aware": None if cell["strength"] is None else False} for cell in cells])
    (table,) = attack_tables(Evaluation.read(evaluated))
    assert table.header[:4] == [
        "Defense",
        "Near, defense unknown",
        "Far, malicious server, defense unknown",
        "Accuracy ↑",
    ]
    assert texts(table.rows[0])[:3] == ["no defense", "0.050", "0.040"]


def test_no_metric_may_have_a_key_that_is_another_column_of_the_table(evaluated: RunFolder) -> None:
    evaluation = Evaluation.read(evaluated)
    others = {*csv_table(evaluation)[0]} - {*evaluation.measures}
    for column in others:
        own = type("Own", (RMSE,), {"measure": Measure(column, "Own")})
        with pytest.raises(ConfigError, match=f"no other column has; got '{column}'"):
            metrics_of([own])
    assert {"accuracy", "strength", "seconds", "paper"} <= others


def test_the_folder_tells_everything(evaluated: RunFolder) -> None:
    page = build_evaluation(evaluated.path).read_text()
    for words in ("two_defenses", "pruning 0.99", "out of memory", "paper 0.26", "At equal utility", "<img"):
        assert words in page
    rows = list(csv.DictReader(evaluated.table.read_text().splitlines()))
    assert len(rows) == 10
    assert [row["reason"] for row in rows if not row["rmse"]] == ["out of memory"]
    assert [float(row["rmse_error"]) for row in rows if row["rmse"]] == pytest.approx([0.03] * 9)
    assert sum(row["strongest"] == "true" for row in rows) == 5
    figures = json.loads(evaluated.metrics.read_text())
    assert figures["rmse.prune_0.99.near.b2"] == 0.25
    assert figures["rmse.noise_0.1.far.b2"] is None
    assert figures["rmse.noise_0.1.far.b2_reason"] == "out of memory"
    assert figures["stops.prune_0.99.b2"] is True
    assert figures["n_failed"] == 1
    assert figures["accuracy.noise_1.0"] is None
    assert figures["accuracy.noise_1.0_reason"] == "diverged"
    assert "accuracy.noise_0.1_reason" not in figures  # it has an accuracy
    assert "Trainings without an accuracy" in page
    assert page.count("diverged") == 1
    assert (evaluated.figures / "scatter.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in evaluated.figures.glob("gallery*")) == [
        "gallery_noise__batch_2.png",
        "gallery_pruning__batch_2.png",
    ]
    assert summary_lines(Evaluation.read(evaluated), [])[-1] == "1 cells have no results; the report says why"


def test_defenses_are_compared_once(evaluated: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*given: Any) -> Any:
        calls.append(given[1])
        return compare(*given)

    monkeypatch.setattr(tables, "compare", counted)
    evaluation = Evaluation.read(evaluated)
    compared = comparisons(evaluation)
    write_evaluation(evaluation, compared, [])
    assert any("protects best at a cost of" in line for line in summary_lines(evaluation, compared))
    assert calls == 2 * [0.02, 0.2]  # any server, and honest ones


def test_an_attack_that_does_not_apply_says_why(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    why = "it needs a fully connected first layer"
    for cell in list(content["cells"]):
        if cell["attack"] == "near":
            place = cell["folder"].replace("near", "picky")
            evaluated.failure(place).write_text(json.dumps({"reason": why, "applicable": False}))
            content["cells"].append({**cell, "attack": "picky", "folder": place})
    change(evaluated, cells=content["cells"], attacks={**content["attacks"], "picky": "Picky"})
    evaluation = Evaluation.read(evaluated)
    (table,) = attack_tables(evaluation)
    assert [row[3] for row in table.rows] == [TableCell("not applicable", mark="missing", reason=why)] * 5
    page = build_evaluation(evaluated.path).read_text()
    assert f"<b>Picky, batch 2</b>: {why}" in page
    figures = json.loads(evaluated.metrics.read_text())
    assert (figures["n_failed"], figures["n_not_applicable"]) == (1, 5)
    assert f"not applicable: Picky, batch 2: {why}" in summary_lines(evaluation, [])
    rows = list(csv.DictReader(evaluated.table.read_text().splitlines()))
    assert [row["applicable"] for row in rows].count("false") == 5


def test_where_it_does_not_apply_is_told_apart(evaluated: RunFolder) -> None:
    failure = next((evaluated.path / "failed").iterdir())
    failure.write_text(json.dumps({"reason": "no steps", "applicable": False}))
    assert summary_lines(Evaluation.read(evaluated), [])[-1] == (
        "not applicable: Far, malicious server, batch 2, under noise 0.1: no steps"
    )


def test_images_that_a_guess_stands_in_for_are_counted(evaluated: RunFolder) -> None:
    cell = next(one for one in Evaluation.read(evaluated).cells if one.attack == "near" and one.metrics)
    path = RunFolder(cell.folder).metrics
    path.write_text(json.dumps({**json.loads(path.read_text()), "n": 4, "n_refused": 1, "refused_reason": "no maps"}))
    [line] = [one for one in summary_lines(Evaluation.read(evaluated), []) if "no maps" in one]
    assert line.startswith("not applicable: ")
    assert line.endswith(", for 1 of 4 images, which the mean public image stands in for: no maps")


def test_a_generator_is_a_cell_without_a_row(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    content["cells"].insert(0, entry("generator", "generators/digits-0123abcd", "none", None))
    change(evaluated, cells=content["cells"])
    page = build_evaluation(evaluated.path).read_text()
    assert "<b>generator digits</b>: not run yet" in page
    assert len(evaluated.table.read_text().splitlines()) == 11


def test_the_same_evaluation_gives_the_same_plot(evaluated: RunFolder) -> None:
    evaluation = Evaluation.read(evaluated)
    assert scatter(evaluation, "svg") == scatter(evaluation, "svg")


def test_without_trainings_there_is_no_cost(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    content["cells"] = [cell for cell in content["cells"] if cell["kind"] == "attack"]
    evaluated.grid.write_text(json.dumps(content))
    page = build_evaluation(evaluated.path).read_text()
    assert "At equal utility" not in page
    assert "its cost was not measured" in page


def test_a_folder_without_an_evaluation_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="holds no evaluation"):
        Evaluation.read(tmp_path)


def test_a_damaged_grid_is_named(evaluated: RunFolder) -> None:
    evaluated.grid.write_text('{"cells": [{}]}')
    with pytest.raises(CorruptFileError, match="malformed"):
        Evaluation.read(evaluated)


def test_beginning_anew_removes_what_a_grid_leaves(evaluated: RunFolder) -> None:
    build_evaluation(evaluated.path)
    config = evaluated.config.read_text()
    RunFolder.open(evaluated.path, config, overwrite=True)
    left = sorted(path.name for path in evaluated.path.iterdir())
    assert left == ["checkpoints", "config.yaml", "logs"]
