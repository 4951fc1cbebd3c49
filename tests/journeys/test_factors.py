"""From one configuration with factors to a page about all of them, whatever interrupts it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon import cli
from lit_recon.errors import ShapeError
from lit_recon.experiments.released_attack import run as reconn_run
from lit_recon.reporting.run_folder import RunFolder

Run = Callable[..., tuple[int, str, str]]
SMALL: dict[str, Any] = {
    "name": "small",
    "split": {"fixed": 60, "shadow": 90, "targets": 12, "pool": "all"},
    "network": {"class_path": "ReleasedMLP", "init_args": {"hidden": [10], "activation": "elu"}},
    "descent": {"steps": 20, "lr": 0.2, "momentum": 0.9},
    "execution": "batched_mlp",
    "trainer": {"threads": 1},
    "wandb": {"mode": "disabled"},
    "test_images": 300,
    "gradient_targets": 6,
    "gradient_steps": 2,
    "factors": {
        "shadows": {"setting": "split.shadow", "values": [30, 90]},
        "activation": {
            "setting": "network.init_args.activation",
            "values": ["elu", "relu"],
            "measures": ["gradients", "embedding"],
        },
        "privacy": {
            "setting": "descent.dp.target_epsilon",
            "values": [1],
            "settings": {"reconstructor.init_args.ridges": [1e-3, 10.0]},
        },
        "transfer": {
            "setting": "transfer.shadows",
            "series": {
                "old": {"values": [0, 30], "settings": {"transfer.way": "adapted"}},
                "new": {"values": [30], "settings": {"transfer.way": "scratch"}},
            },
        },
    },
}


def write(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study, one of whose cells failed at first, and was tried again."""
    place = tmp_path_factory.mktemp("factors")
    arguments = ["run", "--config", str(write(place / "small.yaml")), "--out", str(place / "run")]
    arguments += ["--cache", str(place / "cache")]
    works = reconn_run.execute

    def failing(parser: ArgumentParser, values: Namespace) -> None:
        if values.descent.dp is not None:
            raise ShapeError("models diverged")
        works(parser, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconn_run, "execute", failing)
        assert cli.reconn(arguments) == 0
    assert "models diverged" in (place / "run" / "report.html").read_text(encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in (place / "run").glob("cells/*/metrics.json")}
    assert len(before) == 6
    assert cli.reconn(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    return place / "run"


@pytest.fixture
def again(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command once more, with another configuration or further arguments."""

    def run(*more: object, **changes: Any) -> tuple[int, str, str]:
        config = write(folder.parent / "again.yaml", **changes)
        arguments = ["run", "--config", config, "--out", folder, "--cache", folder.parent / "cache", *more]
        code = cli.reconn(list(map(str, arguments)))
        return code, *capsys.readouterr()

    return run


def rows(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "factors.csv").open(newline="") as file:
        return {(row["factor"], f"{row['value']} {row['line']}".strip()): row for row in csv.DictReader(file)}


def test_every_value_is_attacked_and_the_base_is_shared(folder: Path) -> None:
    found = rows(folder)
    assert not any(row["reason"] for row in found.values())
    mse = {key: float(row["mse"]) for key, row in found.items()}
    base = mse["base", ""]
    assert mse["shadows", "90"] == mse["activation", "elu"] == base
    mean_image = float(found["base", ""]["baseline_mean_image_mse"])
    assert base < 0.6 * mean_image  # measured 0.35
    assert mse["shadows", "30"] > base
    assert mse["privacy", "1"] > 0.9 * mean_image
    # The old reconstructor serves the new fixed set better than one that knows thirty models of the new one alone.
    assert mse["transfer", "0 old"] < mse["transfer", "30 new"]
    assert mse["transfer", "30 old"] < mse["transfer", "30 new"]
    assert float(found["privacy", "1"]["epsilon"]) == pytest.approx(1.0)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["n_cells"], metrics["n_failed"]) == (7, 0)
    assert metrics["mse.transfer.0, old"] == mse["transfer", "0 old"]


@pytest.mark.slow
def test_cells_are_runs_of_their_own(folder: Path) -> None:
    for row in rows(folder).values():
        cell = folder / row["folder"]
        errors = [float(own["mse"]) for own in csv.DictReader((cell / "victims.csv").read_text().splitlines())]
        assert float(row["mse"]) == pytest.approx(sum(errors) / 12)
        assert (cell / "report.html").is_file()
    base, moved = (RunFolder(folder / rows(folder)[key]["folder"]) for key in (("base", ""), ("transfer", "0 old")))
    assert "pass this file to --config" in base.config.read_text()
    assert "pass this file to --config" not in moved.config.read_text()  # `reconn.py run` knows no transfer
    assert moved.how_to_finish == f"python reconn.py factors --config {folder / 'config.yaml'} --out {folder}"
    relu = folder / rows(folder)["activation", "relu"]["folder"]
    gradients = json.loads((relu / "gradients.json").read_text())
    assert gradients["steps"] == [0, 20]
    assert [len(norms) for norms in gradients["norms"]] == [6, 6]
    assert len(json.loads((relu / "embedding.json").read_text())["points"]) == 12
    page = (folder / "report.html").read_text(encoding="utf-8")
    for words in ("Activation: gradients of the unknown image", "Bound, κ 0.1", "Zero coordinates", "30, new"):
        assert words in page
    before = page
    assert cli.attack(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text(encoding="utf-8").count("<tr>") == before.count("<tr>")


@pytest.mark.slow
def test_a_finished_study_is_kept_and_grows(again: Run, folder: Path) -> None:
    code, _, err = again()
    assert code == 2
    assert "holds a finished run" in err
    written = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/metrics.json")}
    shadows = {"setting": "split.shadow", "values": [30, 60, 90]}
    code, out, err = again(factors={**SMALL["factors"], "shadows": shadows})
    assert code == 0, err
    assert "study       4 factors, 8 runs, 7 of them done" in out
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert ("shadows", "60") in rows(folder)


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ([], {"factors": {}}, "needs at least one factor"),
        ([], {"factors": {"x": {"setting": "descent.lr", "values": [-1]}}}, "x: -1: descent.steps must be at least 1"),
        ([], {"factors": {"x": {"setting": "split.fixed", "values": [1790]}}}, "x: 1,790: split asks for"),
        (["--store", "here"], {}, "store is not set for a study"),
        (["--split.fixed", "61"], {}, "holds a run with other settings"),
        (["--factrs.x", "1"], {}, "factrs"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    again: Run, arguments: list[str], changes: dict[str, Any], message: str
) -> None:
    code, out, err = again(*arguments, **changes)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
