"""A metric that is infinite for one image, as PSNR of an exact reconstruction: the attack with it is the strongest."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from lit_recon.experiments.evaluate.equal_utility import Strength, compare
from lit_recon.experiments.evaluate.judgement import levels, verdicts
from lit_recon.experiments.evaluate.page import build_evaluation
from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.experiments.evaluate.tables import attack_tables, comparisons
from lit_recon.reporting.pages import TableCell
from lit_recon.reporting.record import read_victims
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_victims
from tests.experiments.evaluate.conftest import LEAKAGE, change

INFINITE = "infinite for at least one image"


def score(folder: RunFolder, place: Path, value: float | None, baseline: float | None = 15.0) -> None:
    """Give a cell this PSNR; None: infinite, for one image of the first of two batches."""
    run = RunFolder(place)
    record = json.loads(run.metrics.read_text())
    record |= {"psnr": value, "psnr_reason": INFINITE, "baseline_nearest_public_psnr": baseline}
    record["baseline_nearest_public_psnr_reason"] = INFINITE
    record = {key: found for key, found in record.items() if key not in ("psnr_low", "psnr_high")}
    run.metrics.write_text(json.dumps(record))
    rows = read_victims(run.victims)
    for row in rows:
        row.scores["psnr"] = 40.0 if value is None else value
    rows[0].scores["psnr"] = math.inf if value is None else value
    write_victims(run, rows)


@pytest.fixture
def exact(evaluated: RunFolder) -> RunFolder:
    """Behind the weakest noise, and without a defense, one attack finds an image exactly; ranked by PSNR."""
    for (defense, strength), found in LEAKAGE.items():
        for attack, rmse in zip(("near", "far"), found, strict=True):
            if rmse is not None:
                value = None if attack == "near" and (strength is None or strength == 0.1) else 10 / math.sqrt(rmse)
                score(evaluated, evaluated.path / f"cells/{defense}_{strength}-{attack}-b2-0123abcd", value)
    change(evaluated, metric="psnr")
    return evaluated


def test_an_exact_reconstruction_makes_its_attack_the_strongest(exact: RunFolder) -> None:
    evaluation = Evaluation.read(exact)
    found = {level.title: level for level in levels(evaluation, 2)}
    assert {level.strongest.attack for level in found.values() if level.strongest} == {"near"}
    assert [found[title].value for title in ("no defense", "noise 0.1")] == [math.inf, math.inf]
    assert [found[title].stops for title in ("no defense", "noise 0.1")] == [False, False]
    first = next(row for row in attack_tables(evaluation)[0].rows if row[0] == "no defense")
    assert first[1] == TableCell("∞", [], "ours")


def test_an_infinite_metric_is_compared_and_told_in_words(exact: RunFolder) -> None:
    evaluation = Evaluation.read(exact)
    protections = comparisons(evaluation)[0].found[0.02]
    # noise 0.1, which costs 2 points, has an exact image: on all of the way to it nothing is better
    assert (protections["noise"].value, protections["noise"].interval) == (-math.inf, None)
    assert math.isfinite(protections["prune"].value)
    page = build_evaluation(exact.path).read_text()
    assert "Levels whose metric is infinite have no point." in page
    record = json.loads(exact.metrics.read_text(), parse_constant=pytest.fail)
    key = "psnr.none_None.near.b2"
    assert (record[key], record[f"{key}_reason"]) == (None, INFINITE)
    assert record["strongest.none.b2"] == "near"
    with exact.batches.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["defense"] == "none" and row["attack"] == "near"]
    assert [row["value"] for row in rows] == ["inf", "40.0"]


def test_a_verdict_says_that_the_metric_is_infinite(exact: RunFolder) -> None:
    for place in (exact.path / "cells").glob("noise_1.0-*"):
        score(exact, place, None)
    for place in (exact.path / "cells").glob("none_None-*"):
        score(exact, place, 20.0)
    said = dict(verdicts(Evaluation.read(exact)))["noise"][0]
    assert f"(PSNR ∞ ({INFINITE}) against 15.0\xa0dB of the nearest public image)" in said


def test_an_infinite_baseline_decides_nothing(exact: RunFolder) -> None:
    """One target image that is public, too, would be nearer than any attack, whatever the others are."""
    for place in (exact.path / "cells").iterdir():
        if (place / "metrics.json").is_file():
            score(exact, place, 20.0, baseline=None)
    assert {level.stops for level in levels(Evaluation.read(exact), 2)} == {None}


@pytest.mark.parametrize(("limit", "value"), [(0.0, -math.inf), (0.01, -math.inf), (0.02, -20.0), (0.03, -15.0)])
def test_lines_from_an_infinite_metric_on_end_at_the_next_strength(limit: float, value: float) -> None:
    points = [
        Strength(None, [0.0], {"one": [-math.inf, -30.0], "two": [-12.0, -12.0]}),
        Strength(1.0, [0.02], {"one": [-20.0, -20.0]}),
        Strength(2.0, [0.04], {"one": [-10.0, -10.0]}),
    ]
    own = compare({"d": points}, limit)["d"]
    assert own.value == value
    assert (own.interval is None) == math.isinf(value)


def test_a_line_towards_an_infinite_metric_gains_nothing() -> None:
    points = [Strength(None, [0.0], {"one": [-20.0, -18.0]}), Strength(1.0, [0.02], {"one": [-math.inf, -math.inf]})]
    own = compare({"d": points}, 0.01)["d"]
    assert (own.value, own.strengths) == (-19.0, (None,))
    assert own.interval is not None
