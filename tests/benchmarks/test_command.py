from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import command
from benchmarks.command import figures, pool_of
from benchmarks.record import ROOT, Record


def test_figures_of_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"rmse": 0.1}')
    (tmp_path / "victims.csv").write_text("id,rmse,label,note\n7,1e-3,cat,\n8,nan,dog,late\n")

    (tmp_path / "losses.csv").write_text("step,loss\n" + "1,2\n" * 1001)
    found = figures(tmp_path)

    assert found["metrics"] == {"rmse": 0.1}
    assert found["left_out"] == {"losses": "1001 rows"}
    first, second = found["tables"]["victims"]
    assert first == {"id": 7, "rmse": 0.001, "label": "cat"}
    assert (second["note"], second["rmse"] != second["rmse"]) == ("late", True)


def test_the_pool_is_the_configurations(tmp_path: Path) -> None:
    assert pool_of(tmp_path) is None
    for section in ("victims", "split"):
        settings = {"seed": 0, "common": {section: {"seed": 1, "pool": "development"}}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        assert pool_of(tmp_path) == "development"
    settings = {"examples": {"per_class": 2, "pool": "development"}, "seeds": {"first": 0}}  # of `attack.py trainset`
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert pool_of(tmp_path) == "development"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[Any]]]:
    """Runs a command, and returns its exit code and all records."""
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(command, "Record", partial(Record, folder=results))
    monkeypatch.setenv("WANDB_MODE", "disabled")

    def run(*arguments: object) -> tuple[int, list[Any]]:
        monkeypatch.setattr(sys, "argv", ["command.py", "tiny", *map(str, arguments)])
        code = command.main()
        return code, [json.loads(path.read_text()) for path in sorted(results.iterdir())]

    return run


@pytest.mark.slow
@pytest.mark.processes
def test_a_finished_run_without_its_record_gets_one(
    tmp_path: Path, recorded: Callable[..., tuple[int, list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = tmp_path / "tiny.yaml", tmp_path / "run"
    content = yaml.safe_load((ROOT / "configs" / "attack" / "demo_digits.yaml").read_text())
    content["backbone"] |= {
        "trunk": {"class_path": "MLP", "init_args": {"hidden": [4]}},
        "epochs": 0,
        "cache": str(tmp_path),
    }
    content["attack"]["init_args"] |= {"steps": 2, "restarts": 1}
    content |= {"victims": {"n": 1}, "lpips": {"network": "none"}}
    config.write_text(yaml.safe_dump(content))
    arguments = ["attack.py", "run", "--config", str(config), "--out", str(out), "--trainer.threads", "1"]
    code, [first] = recorded(*arguments)
    assert code == 0
    for record in (tmp_path / "results").iterdir():
        record.unlink()  # as if killed before it was written

    code, [again] = recorded(*arguments)
    assert code == 0
    [made], [found] = first["rows"], again["rows"]
    assert found["finished"] == made["metrics"]["created"]
    assert "seconds" not in found
    for key in ("metrics", "tables"):
        assert found[key] == made[key]
    assert (again["settings"], again["pool"]) == (first["settings"], first["pool"])

    settings = command.resolved_settings(arguments)
    assert settings["victims"]["n"] == 1
    monkeypatch.setattr(command, "resolved_settings", lambda _: settings)
    assert command.finished_run(arguments) == out
    assert command.finished_run([*arguments, "--overwrite", "false"]) == out
    assert command.finished_run([*arguments, "--seed", "0"]) is None  # another command line
    metrics = (out / "metrics.json").read_text()
    for change in ({"version_torch": "1.0"}, {"device": "another"}):
        (out / "metrics.json").write_text(json.dumps({**json.loads(metrics), **change}))
        assert command.finished_run(arguments) is None
    (out / "metrics.json").write_text(metrics)
    settings["victims"]["n"] = 2  # as if the file had been edited
    assert command.finished_run(arguments) is None
