"""Search a file reader by coverage, with atheris: bytes that reach new lines of the package are changed further.

python -m tests.fuzzing.coverage READER [--runs N]

For readers of one file. Needs `pip install atheris`, which is no dependency of the package: it has no wheels for some
systems. The code of the package and of NumPy's and safetensors' readers is instrumented; the first fault ends the
search, and its input is kept in build/fuzzing.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from typing import Any


def main() -> None:
    """Search one reader."""
    import atheris

    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing.coverage", description=__doc__)
    parser.add_argument("reader", help="of a single file, such as Npz")
    parser.add_argument("--runs", type=int, default=10_000, help="inputs")
    arguments = parser.parse_args()
    with atheris.instrument_imports(include=["lit_recon", "numpy.lib", "zipfile", "yaml", "json"]):
        from hypothesis import find

        from tests.fuzzing.__main__ import KEPT
        from tests.fuzzing.harness import examine, scratch, write_files
        from tests.fuzzing.readers import READERS
    reader = READERS[arguments.reader]
    first: Any = find(reader.inputs, lambda files: all(isinstance(content, bytes) for content in files.values()))
    if len(first) != 1:
        raise SystemExit(f"{arguments.reader} reads several files: name one that reads a single one")
    [name] = first
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    counts = {"valid": 0, "refused": 0}

    def one(data: bytes) -> None:
        with scratch() as folder:
            verdict = examine(reader, {name: data}, folder / "input")
        if verdict.is_fault:
            write_files(KEPT / arguments.reader / "atheris", {name: data})
            raise RuntimeError(f"{verdict.kind}: {verdict.told}")
        counts[verdict.kind] += 1
        if sum(counts.values()) == arguments.runs:
            print(counts, flush=True)

    with scratch() as folder:
        corpus = folder / "corpus"
        for number, content in enumerate(_examples(reader.inputs)):
            write_files(corpus, {f"{number}": content})
        atheris.Setup([sys.argv[0], f"-runs={arguments.runs}", "-max_len=20000", str(corpus)], one)
        atheris.Fuzz()


def _examples(inputs: Any, n: int = 50) -> list[bytes]:
    """Some inputs to begin with."""
    from hypothesis import HealthCheck, Phase, given, settings

    found: list[bytes] = []

    @settings(
        max_examples=n, phases=[Phase.generate], derandomize=True, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(inputs)
    def collect(files: Any) -> None:
        found.extend(content for content in files.values() if isinstance(content, bytes))

    collect()
    return found


if __name__ == "__main__":
    main()
