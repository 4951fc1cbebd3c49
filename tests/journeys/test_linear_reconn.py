"""Shadow models by linear response, from the command line to the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_recon import cli

CONFIG = Path(__file__).parents[2] / "configs" / "reconn" / "digits_demo.yaml"
SIZES = ["--split.shadow", 60, "--split.targets", 10, "--descent.steps", 30, "--execution", "batched_mlp"]
SIZES += ["--reconstructor", "KernelRidge"]
#: Exit code, standard output and standard error.
Reconn = Callable[..., tuple[int, str, str]]
LINEAR = ["--shadows", "linear", "--linear.sample", 8, "--linear.hessian_images", 100]


@pytest.fixture
def reconn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reconn:
    """`reconn.py run` in an empty folder, without W&B."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.reconn(["run", "--config", str(CONFIG), *map(str, SIZES), *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_the_error_is_in_the_record_and_on_the_page(reconn: Reconn, tmp_path: Path) -> None:
    code, out, err = reconn(*LINEAR, "--out", "linear")
    assert code == 0, err
    assert "60 models, 60 of them to be trained" in out
    metrics = json.loads((tmp_path / "linear" / "metrics.json").read_text())
    assert metrics["shadows"] == "linear"
    assert metrics["n_linear"] == 60
    assert metrics["linear_error_n"] == 8
    assert 0 < metrics["linear_error"] <= metrics["linear_error_max"] < metrics["linear_tolerance"] == 0.4
    assert metrics["mse"] < metrics["baseline_mean_image_mse"]
    page = (tmp_path / "linear" / "report.html").read_text()
    assert "60 of the 60 shadow models were made by linear response: on 8 models trained exactly" in page
    code, out, _ = reconn("--out", "exact")
    assert code == 0
    assert "60 of them to be trained" in out  # exact models have a store of their own
    exact = json.loads((tmp_path / "exact" / "metrics.json").read_text())
    assert "n_linear" not in exact
    assert metrics["mse"] == pytest.approx(exact["mse"], rel=0.15)  # measured 0.02


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--linear.tolerance", 1e-6], "where a median of 1e-06 is tolerated: raise linear.rank"),
        (["--descent.optimizer", "adam"], "got descent.optimizer=adam: set shadows to exact"),
        (["--initialization", "fresh"], "got initialization=fresh: set shadows to exact"),
        (["--linear.sample", 61], "linear.sample must be at most the number of shadow models, 60; got 61"),
        (["--linear.rank", 0], "linear.rank and linear.hessian_images must be at least 1"),
    ],
)
def test_what_linear_response_is_not_for_ends_with_a_line(reconn: Reconn, arguments: list[object], named: str) -> None:
    code, _, err = reconn(*LINEAR, *arguments)
    assert code == 2
    assert named in err.strip().splitlines()[-1]
