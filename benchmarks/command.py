"""Run a command of this project and keep its figures as a record.

    python -m benchmarks.command NAME attack.py run --config configs/attack/demo_photos.yaml --overwrite true

The record has one row: the seconds that the command took, the numbers of its `metrics.json`, and its tables, except for
those of more than a thousand rows, which it names.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.record import ROOT, Record, Row
from lit_recon.data.splits import Pool

#: Rows of the largest table that is kept.
_LARGEST = 1000


def main() -> int:
    """Run, and record; the exit code is the command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the record")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script of the repository and its arguments")
    arguments = parser.parse_args()
    before, started = os.times(), time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments.command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    report = None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("report "):
            report = ROOT / line.split(maxsplit=1)[1].strip()
    if process.wait() or report is None:
        print(f"no record: the command ended with {process.returncode} and the report {report}")
        return process.returncode or 1
    after = os.times()
    row = {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(after.children_user + after.children_system - sum(before[2:4]), 1),
        **figures(report.parent),
    }
    with Record(arguments.name, {"arguments": arguments.command}, pool_of(report.parent)) as record:
        record.add(row, show=False)
    return 0


def figures(folder: Path) -> Row:
    """`metrics`, the content of `metrics.json`, `tables`, the rows of each CSV file by its name, and `left_out`."""
    metrics, tables = folder / "metrics.json", {path.stem: read_table(path) for path in sorted(folder.glob("*.csv"))}
    return {
        "metrics": json.loads(metrics.read_text(encoding="utf-8")) if metrics.is_file() else {},
        "tables": {name: rows for name, rows in tables.items() if len(rows) <= _LARGEST},
        "left_out": {name: f"{len(rows)} rows" for name, rows in tables.items() if len(rows) > _LARGEST},
    }


def read_table(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV file, numbers as numbers and empty cells left out."""
    with path.open(encoding="utf-8", newline="") as stream:
        return [{key: _number(cell) for key, cell in row.items() if cell} for row in csv.DictReader(stream)]


def _number(cell: str) -> float | int | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell


def pool_of(folder: Path) -> Pool | None:
    """The pool in the run's configuration; None where nothing is attacked."""
    configuration = folder / "config.yaml"
    return _find_pool(yaml.safe_load(configuration.read_text(encoding="utf-8"))) if configuration.is_file() else None


def _find_pool(settings: Any) -> Pool | None:
    if not isinstance(settings, dict):
        return None
    draws_images = "pool" in settings and ("seed" in settings or "per_class" in settings)
    own: Pool | None = settings["pool"] if draws_images else None
    return own or next(filter(None, map(_find_pool, settings.values())), None)


if __name__ == "__main__":
    raise SystemExit(main())
