"""From one command to a page with the records that generalized linear models give away."""

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

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "reconn"
SMALL = ["--split.records", 300, "--split.targets", 10, "--split.held_out", 100]


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


def test_linear_models_give_digits_away(reconn: Callable[..., Any], workplace: Path) -> None:
    code, out, err = reconn("glm", "--config", CONFIGS / "glm_digits_linear.yaml", *SMALL)
    assert code == 0, err
    folder = workplace / "runs" / "glm_digits_linear"
    assert out.splitlines()[-1].split() == ["report", "runs/glm_digits_linear/report.html"]
    metrics = figures(folder)
    for prefix in ("", "ridge.", "no_intercept."):
        assert metrics[f"{prefix}max_error_worst"] < 1e-6
        assert metrics[f"{prefix}estimate_holds"] == 1
    assert metrics["ridge.refused"] == 0
    assert list(metrics["formats"]) == ["mse", "rmse", "psnr", "ssim", "lpips", "label_accuracy"]
    assert metrics["formats"]["psnr"]["unit"] == "dB"
    assert metrics["no_intercept.root_told_right_share"] == 1
    with (folder / "victims.csv").open() as file:
        rows = list(csv.DictReader(file))
    tensors = load_file(folder / "reconstructions.safetensors")
    errors = np.abs(tensors["reconstructions"] - tensors["targets"]).max((1, 2, 3))
    there = [row["refused"] == "0.0" for row in rows]
    assert errors[there].max() < 1e-6
    assert metrics["ridge.max_error_worst"] == pytest.approx(max(float(row["ridge.max_error"]) for row in rows))
    beside = load_file(folder / "beside.safetensors")
    assert set(beside) == {"ridge", "no_intercept"}
    np.testing.assert_allclose(beside["ridge"], tensors["targets"], atol=1e-6)


def test_a_label_that_was_given_is_not_recovered(reconn: Callable[..., Any], workplace: Path) -> None:
    without = ["--regression", "LeastSquares", "--regression.intercept", "false", "--regression.penalty", 1]
    with_one = '{"ridge": {"class_path": "LeastSquares", "init_args": {"penalty": 1}}}'
    code, _, err = reconn("glm", *without, "--beside", with_one, *SMALL, "--out", "runs/given")
    assert code == 0, err
    folder = workplace / "runs" / "given"
    metrics = figures(folder)
    assert metrics["refused"] == 0
    assert metrics["label_accuracy"] is None
    assert metrics["label_accuracy_reason"] == "the label was given"
    assert metrics["ridge.label_accuracy"] == 1
    with (folder / "victims.csv").open() as file:
        assert {row["recovered_label"] for row in csv.DictReader(file)} == {"-1"}
    page = (folder / "report.html").read_text()
    assert "the label was given" in page
    assert "label not recovered" not in page


def test_the_page_tells_errors_estimates_and_roots(reconn: Callable[..., Any], workplace: Path) -> None:
    folder = workplace / "runs" / "glm_digits_linear"
    page = (folder / "report.html").read_text()
    assert "All records but one, 299 of them" in page
    assert "ridge: LeastSquares(penalty=1.0, intercept=True)" in page
    assert "the missing record&#39;s label (theorem 8)" in page
    assert page.count("data:image/svg+xml;base64,") == 1
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    (folder / "report.html").unlink()
    assert cli.attack(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == page
    # A finished run is left alone.
    code, _, err = reconn("glm", "--config", CONFIGS / "glm_digits_linear.yaml", *SMALL)
    assert code == 2
    assert "--overwrite true" in err


def test_a_loose_solver_is_told_from_a_tight_one(reconn: Callable[..., Any], workplace: Path) -> None:
    code, _, err = reconn("glm", "--config", CONFIGS / "glm_digits_poisson.yaml", *SMALL)
    assert code == 0, err
    metrics = figures(workplace / "runs" / "glm_digits_poisson")
    assert metrics["max_error_worst"] < 1e-6  # measured 8e-9 with 1,000 records
    assert metrics["lbfgs_as_it_comes.max_error_median"] > 1e-3  # measured 0.07 with 1,000 records
    notes = " ".join(metrics["notes"])
    assert "lbfgs_as_it_comes: " in notes
    assert "the model under attack" not in notes


def test_an_interpolating_model_is_refused_and_says_so(reconn: Callable[..., Any], workplace: Path) -> None:
    code, out, err = reconn("glm", "--config", CONFIGS / "glm_digits_interpolated.yaml")
    assert code == 0, err
    assert "refused for all targets: the model interpolates them" in out
    metrics = figures(workplace / "runs" / "glm_digits_interpolated")
    assert metrics["refused"] == 25
    assert metrics["rmse"] == pytest.approx(metrics["baseline_mean_image_rmse"])
    assert metrics["ridge.exact_share"] == 1
    page = (workplace / "runs" / "glm_digits_interpolated" / "report.html").read_text()
    assert "label not recovered" in page
    assert "interpolates the record" in page


def test_classifiers_of_odd_digits(reconn: Callable[..., Any], workplace: Path) -> None:
    logistic = ["--regression", "Logistic", "--regression.C", 0.5, "--target", "odd"]
    code, _, err = reconn("glm", *logistic, *SMALL, "--out", "runs/odd")
    assert code == 0, err
    metrics = figures(workplace / "runs" / "odd")
    assert metrics["exact_share"] == 1
    assert metrics["label_accuracy"] == 1
    assert metrics["held_out_score"] > 0.8
    assert "class odd" not in (page := (workplace / "runs" / "odd" / "report.html").read_text())
    assert "· odd" in page


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--split.targets", 300], "split.targets must be at least 1 and below split.records"),
        (["--split.records", 1790], "has 1797 different ones: lower split.held_out to at most 7"),
        (["--split.records", 1000, "--split.targets", 900], "lower split.records or split.targets"),
        (["--regression.penalty=-1"], "penalty must be at least 0"),
        (["--beside", '{"A b": {"class_path": "LeastSquares"}}'], "names in beside must be"),
        (
            ["--regression", "Logistic", "--split.records", 5, "--split.targets", 2, "--beside", "{}"],
            "split.records, or renumber the labels of the data without gaps",
        ),
        (["--split.records", 2, "--split.targets", 1, "--split.seed", 13, "--target", "odd"], "the same target"),
    ],
)
def test_bad_input_is_named(reconn: Callable[..., Any], arguments: list[object], complaint: str) -> None:
    code, _, err = reconn("glm", "--config", CONFIGS / "glm_digits_linear.yaml", *SMALL, *arguments, "--out", "runs/no")
    assert code == 2
    assert complaint in err
    assert len(err.strip().splitlines()) == 1
