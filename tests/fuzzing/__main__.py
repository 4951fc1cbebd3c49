"""Give 10,000 inputs to every reader of the package, and record how they end: the nightly profile of the fuzzing.

python -m tests.fuzzing [--only NAME ...] [--inputs N] [--seed N]

Every reader has a process of its own, so that even a crash of the interpreter is counted. A call that was interrupted
goes on with the readers that are missing, on the same commit. Inputs that are faults are kept in build/fuzzing. The
exit code is 1 if there was any. `tests.fuzzing.coverage` searches the file readers by coverage instead, with atheris,
which is no dependency.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, Record
from tests.fuzzing.harness import Tally, explore, write_files
from tests.fuzzing.readers import READERS

#: Where inputs that are faults are kept.
KEPT = ROOT / "build" / "fuzzing"
#: Seconds after which the process of a reader is ended, and counted as a hang.
_LIMIT = 3600


def main() -> int:
    """Run all readers, or one in this process."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="for each reader")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--only", nargs="*", default=[], help="names of readers; nothing is recorded then")
    parser.add_argument("--reader", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        print(json.dumps(measured(arguments.reader, arguments.inputs, arguments.seed)))
        return 0
    if arguments.only:
        rows = [_in_process(name, arguments.inputs, arguments.seed) for name in arguments.only]
        print(*rows, sep="\n")
        return int(any(row["crashes"] + row["hangs"] + row["wrong"] for row in rows))
    with Record("fuzzing", {"inputs": arguments.inputs, "seed": arguments.seed}) as record:
        for name, reader in READERS.items():
            key = {"reader": name, "kind": reader.kind}
            record.measure(key, lambda name=name: _in_process(name, arguments.inputs, arguments.seed))  # type: ignore[misc]
    return int(any(row["crashes"] + row["hangs"] + row["wrong"] for row in record.rows))


def measured(name: str, n: int, seed: int) -> dict[str, Any]:
    """The row of one reader: counts of its inputs by how they ended, and the kinds of faults."""
    warnings.simplefilter("error")  # as in the tests
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    logging.disable(logging.CRITICAL)
    started = time.perf_counter()
    tally = explore(READERS[name], n, seed)
    for number, files in enumerate(tally.faults.values()):
        folder = KEPT / name.replace(" ", "_") / f"{seed}-{number}"
        if not folder.exists():
            write_files(folder, files)
    return row_of(tally, time.perf_counter() - started)


def row_of(tally: Tally, seconds: float) -> dict[str, Any]:
    """Counts and kinds of faults as a row of the record."""
    counts = tally.counts
    return {
        "inputs": tally.total,
        "valid": counts["valid"],
        "refused": counts["refused"],
        "crashes": counts["crash"],
        "hangs": counts["hang"],
        "wrong": counts["wrong"],
        "faults": sorted(tally.faults),
        "seconds": round(seconds, 1),
    }


def _in_process(name: str, n: int, seed: int) -> dict[str, Any]:
    """The row of a reader from a process of its own."""
    command = [sys.executable, "-m", "tests.fuzzing", "--reader", name, "--inputs", str(n), "--seed", str(seed)]
    started = time.perf_counter()
    ended: dict[str, Any] = {"inputs": 0, "valid": 0, "refused": 0, "crashes": 0, "hangs": 0, "wrong": 0}
    try:
        found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return {
            **ended,
            "hangs": 1,
            "faults": ["the process did not end"],
            "seconds": round(time.perf_counter() - started),
        }
    if found.returncode:
        fault = f"the process ended with code {found.returncode}"
        return {**ended, "crashes": 1, "faults": [fault], "seconds": round(time.perf_counter() - started)}
    row: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return row


def kept() -> list[Path]:
    """Folders of inputs that were faults."""
    return sorted(path for path in KEPT.glob("*/*") if path.is_dir())


if __name__ == "__main__":
    raise SystemExit(main())
