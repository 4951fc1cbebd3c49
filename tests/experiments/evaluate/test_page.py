"""Evaluations: which attack is the strongest, what a defense costs, and what the page says about it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.experiments.evaluate.judgement import levels, pareto_front, verdicts
from lit_recon.experiments.evaluate.page import build_evaluation, gallery_grids, scatter, summary_lines
from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.experiments.evaluate.tables import attack_tables, equal_utility, rankings
from lit_recon.reporting.pages import TableCell
from lit_recon.reporting.record import read_victims
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_metrics, write_victims

NEAREST = 0.2
#: Errors of a mean on each side of it in a 95 % interval from two batches, by Student's t.
QUANTILE = 12.706204736174698
#: RMSE by (defense, strength) of two attacks; None: the cell failed.
LEAKAGE: dict[tuple[str, float | None], tuple[float | None, float | None]] = {
    ("none", None): (0.05, 0.04),
    ("prune", 0.5): (0.06, 0.09),
    ("prune", 0.99): (0.25, 0.30),
    ("noise", 0.1): (0.15, None),
    ("noise", 1.0): (0.19, 0.31),
}
ACCURACY = {("none", None): 0.9, ("prune", 0.5): 0.9, ("prune", 0.99): 0.8, ("noise", 0.1): 0.88, ("noise", 1.0): None}


@pytest.fixture
def evaluated(tmp_path: Path, make_run: Callable[..., RunFolder]) -> RunFolder:
    """A grid of two defenses and two attacks at batch size 2, one cell of which failed."""
    folder = RunFolder.open(tmp_path / "grid", yaml.safe_dump({"name": "two_defenses", "paper": {"citation": "Some"}}))
    cells: list[dict[str, Any]] = []
    for (defense, strength), accuracy in ACCURACY.items():
        place = f"utility/{defense}_{strength}-0123abcd"
        run = RunFolder.open(folder.path / place, "seed: 0")
        write_metrics(run, {"accuracy": accuracy, "accuracy_reason": "diverged", "final_train_loss": 0.5})
        cells.append(_entry("utility", place, defense, strength))
    for (defense, strength), figures in LEAKAGE.items():
        for attack, rmse in zip(("near", "far"), figures, strict=True):
            place = f"cells/{defense}_{strength}-{attack}-b2-0123abcd"
            if rmse is None:
                folder.failure(place).parent.mkdir(exist_ok=True)
                folder.failure(place).write_text(json.dumps({"reason": "out of memory", "traceback": ""}))
            else:
                # the standard deviation over the root of the images would be 0.02
                metrics = {"rmse": rmse, "rmse_std": 0.04, "baseline_nearest_public_rmse": NEAREST}
                metrics |= {"rmse_low": rmse - 0.03 * QUANTILE, "rmse_high": rmse + 0.03 * QUANTILE}
                metrics |= {"psnr_low": 21.46 - 0.9 * QUANTILE, "psnr_high": 21.46 + 0.9 * QUANTILE}
                run = make_run(f"grid/{place}", metrics=metrics)
                rows = read_victims(run.victims)  # of two batches, whose means are 0.03 from that of all
                for row in rows:
                    row.scores["rmse"] = rmse + (0.03 if row.batch else -0.03)
                write_victims(run, rows)
            paper = 0.26 if (defense, strength, attack) == ("prune", 0.99, "near") else None
            cells.append(_entry("attack", place, defense, strength, attack, 2, paper))
    content = {
        "cells": cells,
        "attacks": {"near": "Near", "far": "Far"},
        "max_accuracy_drops": [0.02, 0.2],
        "malicious": ["far"],
    }
    folder.grid.write_text(json.dumps({**content, "defenses": {"prune": "pruning", "noise": "noise"}}))
    return folder


def texts(row: Sequence[str | TableCell]) -> list[str]:
    return [cell if isinstance(cell, str) else cell.text for cell in row]


def marks(row: Sequence[str | TableCell]) -> list[str]:
    return ["" if isinstance(cell, str) else cell.mark for cell in row]


def _entry(
    kind: str, place: str, defense: str, strength: float | None, attack: str = "", size: int = 0, paper: Any = None
) -> dict[str, Any]:
    aware = None if strength is None else True
    return {"kind": kind, "folder": place, "defense": defense, "strength": strength, "attack": attack} | {
        "aware": aware,
        "batch_size": size,
        "paper": paper,
    }


def test_the_strongest_attack_is_the_one_that_comes_closest(evaluated: RunFolder) -> None:
    found = {level.title: level for level in levels(Evaluation.read(evaluated), 2)}
    winners = {title: level.strongest.attack for title, level in found.items() if level.strongest}
    assert winners == {
        "no defense": "far",
        "pruning 0.5": "near",
        "pruning 0.99": "near",
        "noise 0.1": "near",
        "noise 1": "near",
    }
    assert [level.value for level in found.values()] == [0.04, 0.06, 0.25, 0.15, 0.19]
    assert [level.stops for level in found.values()] == [False, False, True, False, False]
    assert [level.price for level in found.values()] == pytest.approx([0.0, 0.0, 0.1, 0.02, None])
    assert found["no defense"].standard_error == pytest.approx(0.03)


def test_no_point_of_the_front_is_beaten_and_all_others_are(evaluated: RunFolder) -> None:
    points = levels(Evaluation.read(evaluated), 2)
    front = pareto_front(points)
    assert [level.title for level in front] == ["pruning 0.5", "noise 0.1", "pruning 0.99"]
    for level in points:
        if level.accuracy is None or level in front:
            continue
        assert any(
            (other.accuracy or 0) >= level.accuracy and (other.value or 0) >= (level.value or 0) for other in front
        )


def test_defenses_are_compared_at_equal_price(evaluated: RunFolder) -> None:
    table, honest = equal_utility(Evaluation.read(evaluated))
    assert table.title.endswith("any server")
    assert honest.title.endswith("honest servers only")
    assert table.header == ["Points", "pruning", "noise"]
    # at two points: a fifth of the way from pruning 0.5 to 0.99, which costs ten; noise 1 has no price
    assert [texts(entries) for entries in honest.rows] == [["≤ 2", "0.098", "> 0.150"], ["≤ 20", "> 0.250", "> 0.150"]]
    assert [texts(entries) for entries in table.rows] == [["≤ 2", "0.098", "> 0.150"], ["≤ 20", "> 0.250", "> 0.150"]]
    assert [marks(entries).index("ours") for entries in table.rows] == [2, 1]
    first = table.rows[0][1]
    assert isinstance(first, TableCell)
    assert first.small[1] == "at 0.5 to 0.99"
    said = dict(rankings(Evaluation.read(evaluated)))["Batch size 2, any server"][0]
    assert said.startswith("At a loss of at most 2 points noise protects best, with RMSE 0.150 (")
    assert "; then pruning with RMSE 0.098 (" in said


def test_attacks_that_fail_without_a_defense_rank_nothing(evaluated: RunFolder) -> None:
    for path in evaluated.path.glob("cells/none_None-*/metrics.json"):
        write_metrics(RunFolder(path.parent), {**json.loads(path.read_text()), "rmse": NEAREST + 0.01})
    said = ["Not known: without a defense no attack is better than the nearest public image."]
    assert [found for _, found in rankings(Evaluation.read(evaluated))] == [said, said]


def test_comparisons_are_repeated_without_an_attack(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    evaluated.grid.write_text(json.dumps({**content, "malicious": [], "without": ["far"]}))
    evaluation = Evaluation.read(evaluated)
    assert [side.words for side in evaluation.sides] == ["", ", without Far"]
    weaker = [level.value for level in levels(evaluation, 2, evaluation.sides[1].barred)]
    assert weaker == [0.05, 0.06, 0.25, 0.15, 0.19]
    assert [table.title for table in equal_utility(evaluation)] == [
        "At equal utility, batch size 2",
        "At equal utility, batch size 2, without Far",
    ]


def test_repeated_trainings_give_a_mean_and_a_spread(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    for level, accuracy in ((("none", None), 0.88), (("noise", 0.1), 0.82)):
        place = f"utility/{level[0]}_{level[1]}-r1-0123abcd"
        write_metrics(
            RunFolder.open(evaluated.path / place, "seed: 1"), {"accuracy": accuracy, "final_train_loss": 0.7}
        )
        content["cells"].append({**_entry("utility", place, *level), "repetition": 1, "paper": 0.39})
    evaluated.grid.write_text(json.dumps(content))
    evaluation = Evaluation.read(evaluated)
    assert evaluation.utility("none", None, "accuracy") == pytest.approx(0.89)
    assert evaluation.utility_spread("none", None, "accuracy") == pytest.approx(0.01 * 2**0.5)
    assert evaluation.utility_spread("prune", 0.5, "accuracy") is None
    found = {level.title: level for level in levels(evaluation, 2)}
    assert found["pruning 0.99"].price == pytest.approx(0.1)  # against the training with its own seed
    assert found["pruning 0.99"].price_error is None
    assert found["noise 0.1"].price == pytest.approx((0.02 + 0.06) / 2)
    assert found["noise 0.1"].price_error == pytest.approx(0.02)
    row = attack_tables(evaluation)[0].rows[0]
    accuracy, loss = row[-4], row[-2]
    assert isinstance(accuracy, TableCell)
    assert isinstance(loss, TableCell)
    assert (accuracy.text, accuracy.small) == ("89.0\u00a0%", ["± 1.4"])
    assert (loss.text, loss.small) == ("0.6", ["paper 0.39"])


def test_verdicts_say_what_stops_the_strongest_attack_and_what_it_costs(evaluated: RunFolder) -> None:
    said = dict(verdicts(Evaluation.read(evaluated)))
    (pruning,), (noise,) = said["pruning"], said["noise"]
    assert "pruning 0.99 stops the strongest attack, Near" in pruning
    assert "RMSE 0.250 ± 0.030 against 0.200" in pruning
    assert "costs 10.0 percentage points of accuracy" in pruning
    assert "no strength of the grid stops" in noise
    assert "noise 1" in noise
    assert "its price was not measured" in noise


@pytest.mark.parametrize(("margin", "close"), [(0.025, True), (0.035, False)])
def test_a_margin_within_the_error_is_called_so(evaluated: RunFolder, margin: float, close: bool) -> None:
    content = json.loads(evaluated.grid.read_text())
    place = next(c["folder"] for c in content["cells"] if c["attack"] == "near" and c["strength"] == 0.99)
    metrics = json.loads((evaluated.path / place / "metrics.json").read_text())
    write_metrics(RunFolder(evaluated.path / place), {**metrics, "rmse": NEAREST + margin})
    said = dict(verdicts(Evaluation.read(evaluated)))["pruning"][0]
    assert "pruning 0.99 stops" in said
    assert ("within one standard error" in said) == close


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
    assert (evaluated.figures / "scatter.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in evaluated.figures.glob("gallery*")) == [
        "gallery_noise__batch_2.png",
        "gallery_pruning__batch_2.png",
    ]
    assert summary_lines(Evaluation.read(evaluated))[-1] == "1 cells have no results; the report says why"


def test_servers_are_told_apart(evaluated: RunFolder) -> None:
    # the malicious one alone breaks noise 1
    _rescore(evaluated, "noise", 1.0, "near", 0.21)
    _rescore(evaluated, "noise", 1.0, "far", 0.03)
    said = dict(verdicts(Evaluation.read(evaluated)))
    assert len(said["pruning"]) == 1
    every, honest = said["noise"]
    assert (
        "Batch size 2: no strength of the grid stops the strongest attack. The strongest protection is noise 0.1"
        in every
    )
    assert "Batch size 2, honest servers only: noise 1 stops the strongest attack, Near" in honest
    build_evaluation(evaluated.path)
    figures = json.loads(evaluated.metrics.read_text())
    assert (figures["strongest.noise_1.b2"], figures["strongest_honest.noise_1.b2"]) == ("far", "near")
    assert (figures["stops.noise_1.b2"], figures["stops_honest.noise_1.b2"]) == (False, True)
    rows = list(csv.DictReader(evaluated.table.read_text().splitlines()))
    assert sum(row["strongest_honest"] == "true" for row in rows) == 5
    assert {row["attack"] for row in rows if row["strongest_honest"] == "true"} == {"near"}


def test_honest_servers_alone_need_no_second_verdict(evaluated: RunFolder) -> None:
    _change(evaluated, malicious=[])
    assert all(len(sentences) == 1 for _, sentences in verdicts(Evaluation.read(evaluated)))
    (table,) = attack_tables(Evaluation.read(evaluated))
    assert table.header[1:3] == ["Near", "Far"]


def test_an_attack_that_does_not_apply_says_why(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    why = "it needs a fully connected first layer"
    for cell in list(content["cells"]):
        if cell["attack"] == "near":
            place = cell["folder"].replace("near", "picky")
            evaluated.failure(place).write_text(json.dumps({"reason": why, "applicable": False}))
            content["cells"].append({**cell, "attack": "picky", "folder": place})
    _change(evaluated, cells=content["cells"], attacks={**content["attacks"], "picky": "Picky"})
    evaluation = Evaluation.read(evaluated)
    (table,) = attack_tables(evaluation)
    assert [row[3] for row in table.rows] == [TableCell("not applicable", mark="missing", reason=why)] * 5
    page = build_evaluation(evaluated.path).read_text()
    assert f"<b>Picky, batch 2</b>: {why}" in page
    figures = json.loads(evaluated.metrics.read_text())
    assert (figures["n_failed"], figures["n_not_applicable"]) == (1, 5)
    assert f"not applicable: Picky, batch 2: {why}" in summary_lines(evaluation)
    rows = list(csv.DictReader(evaluated.table.read_text().splitlines()))
    assert [row["applicable"] for row in rows].count("false") == 5


def test_where_it_does_not_apply_is_told_apart(evaluated: RunFolder) -> None:
    failure = next((evaluated.path / "failed").iterdir())
    failure.write_text(json.dumps({"reason": "no steps", "applicable": False}))
    assert summary_lines(Evaluation.read(evaluated))[-1] == (
        "not applicable: Far, malicious server, batch 2, under noise 0.1: no steps"
    )


def test_an_attack_on_a_network_of_its_own_is_out_of_competition(evaluated: RunFolder) -> None:
    _change(evaluated, networks={"far": "its own MLP(hidden=[4])"})
    evaluation = Evaluation.read(evaluated)
    (table,) = attack_tables(evaluation)
    assert table.header[2] == "Far, malicious server, on its own MLP(hidden=[4])"
    assert texts(table.rows[0])[2] == "0.040"
    assert {level.strongest.attack for level in levels(evaluation, 2) if level.strongest} == {"near"}
    assert "not compared: Far" in build_evaluation(evaluated.path).read_text()


def test_another_figure_has_its_own_direction(evaluated: RunFolder) -> None:
    for attack, psnr, nearest in (("near", 30.0, 15.0), ("far", 10.0, 15.0)):
        _rescore(evaluated, "none", None, attack, psnr, "psnr", nearest)
    for attack, psnr in (("near", 12.0), ("far", 14.0)):
        _rescore(evaluated, "noise", 1.0, attack, psnr, "psnr", 15.0)
    _change(evaluated, metric="psnr")
    evaluation = Evaluation.read(evaluated)
    found = {level.title: level for level in levels(evaluation, 2)}
    assert found["no defense"].strongest is not None
    assert found["no defense"].strongest.attack == "near"
    assert found["noise 1"].value == 14.0
    assert (found["no defense"].stops, found["noise 1"].stops) == (False, True)
    page = build_evaluation(evaluated.path).read_text()
    assert "<h2>PSNR, batch size 2</h2>" in page
    assert "is below that of the nearest public image" in page
    assert json.loads(evaluated.metrics.read_text())["psnr.noise_1.0.far.b2"] == 14.0


def test_features_have_neither_images_nor_a_nearest_public_one(evaluated: RunFolder) -> None:
    for (defense, strength), (near, far) in LEAKAGE.items():
        for attack, error in (("near", near), ("far", far)):
            if error is not None:
                _rescore(evaluated, defense, strength, attack, 2 * error, "feature_error")
    _change(evaluated, metric="feature_error")
    evaluation = Evaluation.read(evaluated)
    (pruning, *_), (noise, *_) = (dict(verdicts(evaluation))[name] for name in ("pruning", "noise"))
    assert "the strongest protection is pruning 0.99, where Near reaches a feature error of 0.500" in pruning
    assert "against 0.080" in pruning
    assert "noise 1" in noise
    assert {level.stops for level in levels(evaluation, 2)} == {None}
    assert gallery_grids(evaluation) == {}
    page = build_evaluation(evaluated.path).read_text()
    assert "nearest public image" not in page
    assert "<h2>Feature error, batch size 2</h2>" in page


def test_a_generator_is_a_cell_without_a_row(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    content["cells"].insert(0, _entry("generator", "generators/digits-0123abcd", "none", None))
    _change(evaluated, cells=content["cells"])
    page = build_evaluation(evaluated.path).read_text()
    assert "<b>generator digits</b>: not run yet" in page
    assert len(evaluated.table.read_text().splitlines()) == 11


def _change(folder: RunFolder, **content: Any) -> None:
    folder.grid.write_text(json.dumps({**json.loads(folder.grid.read_text()), **content}))


def _rescore(
    folder: RunFolder,
    defense: str,
    strength: float | None,
    attack: str,
    value: float,
    key: str = "rmse",
    nearest: float | None = None,
) -> None:
    run = folder.path / f"cells/{defense}_{strength}-{attack}-b2-0123abcd"
    metrics = json.loads((run / "metrics.json").read_text())
    beside = {} if nearest is None else {f"baseline_nearest_public_{key}": nearest}
    write_metrics(RunFolder(run), {**metrics, key: value, **beside})


def test_the_same_evaluation_gives_the_same_pictures(evaluated: RunFolder) -> None:
    evaluation = Evaluation.read(evaluated)
    assert scatter(evaluation, "svg") == scatter(evaluation, "svg")
    assert gallery_grids(evaluation) == gallery_grids(evaluation)


def test_without_trainings_there_is_no_price(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    content["cells"] = [cell for cell in content["cells"] if cell["kind"] == "attack"]
    evaluated.grid.write_text(json.dumps(content))
    page = build_evaluation(evaluated.path).read_text()
    assert "At equal utility" not in page
    assert "its price was not measured" in page


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
