from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import cells as gpu_cells
from benchmarks.gpu.cells import CONFIGS, Cell, all_cells, arguments, by_age, cells, last_measured, run_cell
from benchmarks.gpu.plan import Plan
from benchmarks.record import Record
from lit_recon import cli
from lit_recon.experiments.update_attack.run import parser

CELL = Cell("demo_digits", "eval", 1)
#: Stands in for attack.py: ends at once with an error, or waits until it is told to stop.
FAILING = [sys.executable, "-c", "print('error: no such setting'); raise SystemExit(2)"]
WAITING = """
import signal, sys, time

signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(143)))
print("attack: 5/100 iterations", flush=True)
time.sleep(60)
"""
ENDLESS = [sys.executable, "-c", WAITING]


def test_a_cell_is_a_run_that_is_made_once(plan: Plan) -> None:
    assert cli.attack(arguments(CELL, plan)) == 0

    (row,) = cells(plan)

    assert row["cell"] == "demo_digits-eval-batch1"
    assert (row["status"], row["n"]) == ("complete", 2)
    assert 0 < row["rmse"] < 1
    assert "process_seconds" not in row, "it was run again"


def test_a_cell_is_cut_short_in_time_to_save_its_state(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cells, "LEAST_SECONDS", 0)
    monkeypatch.setattr(gpu_cells, "STOP_SECONDS", 2)

    row = run_cell(CELL, plan.until(time.time() + 4), ENDLESS)

    assert row["status"] == "cut short"
    assert row["last_line"] == "saved"
    assert row["process_seconds"] < 10


def test_a_cell_that_fails_says_why(plan: Plan) -> None:
    row = run_cell(CELL, plan, FAILING)

    assert (row["status"], row["exit_code"], row["last_line"]) == ("failed", 2, "error: no such setting")


def test_a_cell_is_not_begun_at_the_last_moment(plan: Plan) -> None:
    assert run_cell(CELL, plan.until(time.time() + 5), FAILING)["status"] == "not begun"


def test_cells_need_images(plan: Plan) -> None:
    (row,) = cells(replace(plan, quick=False))

    assert "--images" in row["skipped"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_command_takes_every_setting_with_other_data(path: Path, plan: Plan) -> None:
    given = replace(
        plan, quick=False, images=Path("images.npz"), backbone=Path("b.safetensors"), options=("save_every_seconds=7",)
    )

    values = parser("attack.py run").parse_args(arguments(Cell(path.stem, "train", 4), given)[1:])

    assert values.data.class_path == "lit_recon.data.sources.Npz"
    assert str(values.data.init_args.root) == "images.npz"
    assert (values.client.batch_norm, values.victims.n, values.victims.batch_size) == ("train", 8, 4)
    assert str(values.backbone.checkpoint) == "b.safetensors"
    assert values.save_every_seconds == 7


def test_the_table_begins_with_the_settings_that_matter_most(tmp_path: Path) -> None:
    for name in ("zhu2019_dlg", "liu2025", "demo_digits", "geiping2020", "bounded"):
        (tmp_path / f"{name}.yaml").touch()

    table = all_cells(tmp_path)

    assert list(dict.fromkeys(cell.settings for cell in table)) == ["geiping2020", "liu2025", "bounded", "zhu2019_dlg"]
    assert {(cell.batch_norm, cell.batch) for cell in table} == {
        (mode, batch) for mode in ("eval", "train") for batch in (1, 4)
    }


def test_the_longest_standing_gap_comes_first(tmp_path: Path) -> None:
    a, b, c, d = (Cell(name, "eval", 1) for name in "abcd")
    for name, status, created in (
        ("a", "complete", "2025-03-01"),
        ("b", "complete", "2025-01-01"),
        ("b", "complete", "2025-02-01"),
        ("d", "cut short", "2025-04-01"),
    ):
        with Record("gpu", {}, folder=tmp_path) as record:
            record.add({"cell": f"{name}-eval-batch1", "status": status})
        record.path.write_text(json.dumps({**json.loads(record.path.read_text()), "created": created}))

    assert by_age([a, b, c, d], last_measured(tmp_path)) == [c, d, b, a]
