"""In a process that the harness has started: install the faults that the first argument describes, and run a script."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from tests.faults.injection import FileFault, FileOperations
from tests.faults.surroundings import SURROUNDINGS

if __name__ == "__main__":
    described, note, *script = sys.argv[1:]
    sys.argv = script
    told = json.loads(described)
    operations = FileOperations(FileFault(**told["file"]), Path.cwd())
    try:
        with operations.watched():
            for name, number in told["surroundings"].items():
                SURROUNDINGS[name](number)
            runpy.run_path(script[0], run_name="__main__")
    finally:
        Path(note).write_text(str(operations.count))
