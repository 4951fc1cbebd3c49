"""Run a command of this project and keep its figures as a record.

    python -m benchmarks.command NAME attack.py run --config configs/attack/demo_photos.yaml --overwrite true

The record has one row: the seconds that the command took, the numbers of its `metrics.json`, and its tables, except for
those of more than a thousand rows, which it names. Where the command refuses because it is finished, and its run is of
the same command line, settings, device and versions, the record is that of the finished run: without the seconds, which
are not known, and with the time at which it was `finished`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.record import ROOT, Record, Row
from lit_recon.cli.entry import BAD_INPUT
from lit_recon.data.splits import Pool
from lit_recon.reporting.provenance import differences, environment, read_settings, without_overwrite
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import IGNORED_SETTINGS, RunFolder

#: Rows of the largest table that is kept.
_LARGEST = 1000


def main() -> int:
    """Run, and record; the exit code is the command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the record")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script of the repository and its arguments")
    arguments = parser.parse_args()
    before, started = os.times(), time.perf_counter()
    report = None
    with subprocess.Popen([sys.executable, *arguments.command], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("report "):
                report = ROOT / line.split(maxsplit=1)[1].strip()
    folder = None if process.returncode or report is None else report.parent
    after = os.times()
    row: Row = {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(after.children_user + after.children_system - sum(before[2:4]), 1),
    }
    if process.returncode == BAD_INPUT and (folder := finished_run(arguments.command)) is not None:
        row = {"finished": read_metrics(RunFolder(folder).metrics)["created"]}
        print(f"record of the run that {folder} holds, finished {row['finished']}")
    if folder is None:
        print(f"no record: the command ended with {process.returncode} and the report {report}")
        return process.returncode or 1
    with Record(arguments.name, {"arguments": arguments.command}, pool_of(folder)) as record:
        record.add({**row, **figures(folder)}, show=False)
    return 0


def finished_run(command: Sequence[str]) -> Path | None:
    """The folder of a finished run of this command line, with the settings, device and versions of now, if any."""
    if not (settings := resolved_settings(command)):
        return None
    files = [after for before, after in pairwise(command) if before == "--config"]
    name = settings.get("name") or Path([*files, ""][-1]).stem
    folder = RunFolder(ROOT / (settings.get("out") or f"runs/{name}"))
    if not folder.is_complete or differences(read_settings(folder.config), settings, (*IGNORED_SETTINGS, "name")):
        return None
    now = {key: fact for key, fact in environment().items() if key == "device" or key.startswith("version_")}
    now["command"] = shlex.join(["python", *without_overwrite(command)])
    there = read_metrics(folder.metrics)
    return folder.path if all(there.get(key) == fact for key, fact in now.items()) else None


def resolved_settings(command: Sequence[str]) -> dict[str, Any]:
    """All settings of a command line; none where it cannot print them."""
    resolving = [sys.executable, *command, "--print_config"]
    printed = subprocess.run(resolving, cwd=ROOT, capture_output=True, text=True, check=False)
    settings = yaml.safe_load(printed.stdout) if printed.returncode == 0 else None
    return settings if isinstance(settings, dict) else {}


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
