from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import main, run_section, run_sections
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.sections import SECTIONS, Section
from benchmarks.gpu.sections import main as section_main
from benchmarks.record import Row

#: Writes a row, the half of another, and then does not end.
SLOW = """
import sys, time

with open(sys.argv[1] + ".jsonl", "w") as file:
    file.write('{"section": "agreement", "x": 1}\\n{"section": "agr')
time.sleep(60)
"""


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert main([]) == 0

    said = capsys.readouterr().out
    assert said.startswith("no GPU here")
    assert said.count("\n") == 1


def test_rows_of_a_section_are_written_as_they_come(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaking(plan: Plan) -> Iterator[Row]:
        yield {"batch": 1}
        raise ValueError("no more")

    monkeypatch.setattr("benchmarks.gpu.sections.SECTIONS", [Section(breaking, 1.0)])

    with pytest.raises(ValueError, match="no more"):
        section_main(["breaking", plan.dumps()])

    rows = [json.loads(line) for line in (plan.rows / "breaking.jsonl").read_text().splitlines()]
    assert rows == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["hardware"]["kind"] == "cpu"
    assert rows[1] == {"section": "breaking", "batch": 1}


def test_a_section_that_fails_leaves_type_and_message(plan: Plan) -> None:
    (end,) = run_section(plan, "agreement", module="benchmarks.of_nothing")

    assert "No module named benchmarks.of_nothing" in end["failed"]


def test_a_section_that_takes_too_long_keeps_its_rows(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_section.py").write_text(f"import os; os.chdir({str(plan.rows)!r}){SLOW}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 1)

    row, end = run_section(plan.until(time.time() + 3), "agreement", module="slow_section")

    assert row == {"section": "agreement", "x": 1}
    assert end["stopped"] == "out of time"


def test_unused_time_goes_to_later_sections(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    left: dict[str, float] = {}

    def run(plan: Plan, name: str) -> list[Row]:
        left[name] = plan.left()
        return [{"section": name}]

    monkeypatch.setattr(gpu, "run_section", run)
    rows = run_sections(plan.until(time.time() + 100), SECTIONS)

    assert [row["section"] for row in rows] == ["agreement", "throughput", "together", "cells"]
    assert list(left.values()) == pytest.approx([20, 55, 70, 100], abs=1)


def test_a_rehearsal_is_recorded_beside_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run_section", lambda plan, name: [{"section": name, "left": plan.quick}])

    assert main(["--device", "cpu", "--quick", "--sections", "together", "--out", str(tmp_path)]) == 0

    (path,) = tmp_path.glob("*-gpu-*.json")
    record = json.loads(path.read_text())
    assert record["rows"] == [{"section": "together", "left": True}]
    assert record["settings"]["sections"] == ["together"]
    assert str(tmp_path) not in path.read_text()


def test_a_missing_file_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--device", "cpu", "--images", "absent.npz"])

    assert stop.value.code == 2
    assert "absent.npz is not there" in capsys.readouterr().err
