"""Mutation testing: how many of a sample of small faults, put into the package one at a time, a test notices.

Cosmic Ray writes the mutants. This driver draws the sample, runs for each mutant only tests that reach its line, in a
forked process that has PyTorch loaded already, and goes on where it was stopped. No source file is changed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.mutants.sample import LEAST, ROOMS, ROOT, draw
from benchmarks.mutants.trial import Outcome, TestMap, try_out


def counts(rows: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Mutants of every room and of all, those killed, and those of them killed by running out of time."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for room in (row["room"], "all"):
            table[room].update(mutants=1, killed=row["status"] == "killed", by_time=row["by"] == "time")
    return {room: dict(table[room]) for room in [*ROOMS, "all"] if room in table}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--size", type=int, default=300, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--minutes", type=float, default=75.0, help="start no mutant after them; call again to go on")
    parser.add_argument("--only", default="", help="try mutants whose file:line matches this expression")
    parser.add_argument("--price", type=float, default=20.0, help="seconds of tests that one mutant may cost")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "mutants", help="map of tests and results so far")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    options.work.mkdir(parents=True, exist_ok=True)
    _preload()
    tests = TestMap(options.work, options.price)
    tests.refresh()
    path = options.work / f"results-{options.size}-{options.seed}.json"
    results: dict[str, Outcome] = json.loads(path.read_text()) if path.exists() else {}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    commit = head.stdout[:12]
    sample = draw(options.size, options.seed)
    for number, mutant in enumerate(sample, 1):
        earlier = results.get(mutant.key)
        if not re.search(options.only, f"{mutant.file}:{mutant.line}"):
            continue
        if earlier is not None and (earlier["status"] == "killed" or earlier["round"] == tests.round):
            continue
        if time.monotonic() > deadline:
            break
        row = results[mutant.key] = {**try_out(mutant, tests, earlier), "commit": commit}
        path.write_text(json.dumps(results, indent=1))
        print(number, row["status"], f"{row['file']}:{row['line']}", row["by"], row["diff"], flush=True)
    rows = [results[mutant.key] for mutant in sample if mutant.key in results]
    print(json.dumps(counts(rows), indent=1))
    if options.record:
        _record(options, rows)


def _preload() -> None:
    """Import what is slow and not mutated, so that forked processes have it."""
    os.environ.update({"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    for name in (
        "lit_recon._torchvision",
        "torch.func",
        "pytorch_lightning",
        "lpips",
        "scipy.stats",
        "sklearn.linear_model",
    ):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.startswith("lit_recon") and name != "lit_recon._torchvision"]:
        del sys.modules[name]


def _record(options: argparse.Namespace, rows: Sequence[Outcome]) -> None:
    """Keep counts of every room and the survivors in the folder of records."""
    from benchmarks.record import Record

    settings = {
        "size": options.size,
        "tried": len(rows),
        "seed": options.seed,
        "commits": sorted({row["commit"] for row in rows}),
        "least_per_room": LEAST,
        "seconds_of_tests": options.price,
    }
    with Record("mutants", settings) as record:
        for room, entry in counts(rows).items():
            record.add({"room": room, **entry})
        for row in rows:
            if row["status"] == "survived":
                record.add({name: row[name] for name in ("room", "file", "line", "diff", "tests")}, show=False)


if __name__ == "__main__":
    main()
