"""Running tests against a mutant: which reach its line, and whether one of them fails."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mutants.sample import ROOT, Mutant, mutated, python_files

#: The tests that may notice; journeys and experiments are too slow to be run for a mutant.
TESTS = ("attacks", "bounds", "clients", "contracts", "defenses", "metrics", "modules", "privacy", "test_records.py")
#: What ran, how it ended, and how long it took.
Outcome = dict[str, Any]


class MutatedModule(importlib.machinery.SourceFileLoader):
    """Finds and loads one module from source that stands in no file."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        folder = [str(Path(self.path).parent)] if Path(self.path).name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, self.path, loader=self, submodule_search_locations=folder)

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class Reports:
    """Plugin of pytest: seconds of every test, and the first test that failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _child(arguments: Sequence[str], mutant: Mutant | None, cpu: int, answer: Any) -> None:
    """Run pytest in this process, with the mutant in place of its module."""
    import pytest

    if mutant is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        name = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        sys.meta_path.insert(0, MutatedModule(name, str(ROOT / mutant.file), mutated(mutant)))
    reports = Reports()
    with tempfile.TemporaryDirectory() as folder:
        common = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not processes", f"--basetemp={folder}/tests"]
        code = int(pytest.main([*common, *arguments], plugins=[reports]))
    answer.send({"code": code, "failed": reports.failed, "seconds": reports.seconds})
    answer.close()
    os._exit(0)  # nothing of a mutant's is to run at exit


def run(arguments: Sequence[str], mutant: Mutant | None = None, cpu: int = 0) -> Outcome | None:
    """What pytest reports; None where it was ended: after `cpu` seconds of work, ten times as many of waiting."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(arguments, mutant, cpu, theirs))
    process.start()
    theirs.close()
    result = None
    if ours.poll(10 * cpu or None):
        try:
            result = ours.recv()
        except EOFError:
            result = None
    process.kill()
    process.join()
    return result


class TestMap:
    """Which test reaches which line, and its seconds; kept in a folder, and made anew for test files that changed.

    Args:
        folder: of the map.
        price: seconds of tests, as measured without a mutant, that one mutant may cost.
    """

    __test__ = False

    def __init__(self, folder: Path, price: float) -> None:
        self.folder, self.path, self.price = folder, folder / "tests.json", price
        self.known: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    @property
    def round(self) -> int:
        """How often test files were new or changed."""
        return max((entry["round"] for entry in self.known.values()), default=-1)

    def refresh(self) -> None:
        """Run the tests of new and changed files without a mutant; only those that pass are used."""
        digests = {
            str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()
            for name in TESTS
            for path in python_files(ROOT / "tests" / name)
            if path.name.startswith("test_")
        }
        number = self.round + 1
        self.known = {file: entry for file, entry in self.known.items() if entry["digest"] == digests.get(file)}
        stale = sorted(set(digests) - set(self.known))
        if not stale:
            return
        os.environ["COVERAGE_FILE"] = str(self.folder / "coverage")
        outcome = run(["--cov", "--cov-append", "--cov-context=test", "--cov-report=", *stale])
        assert outcome is not None
        for file in stale:
            passed = {
                name: seconds
                for name, seconds in outcome["seconds"].items()
                if name.partition("::")[0] == file and name not in outcome["failed"]
            }
            self.known[file] = {"digest": digests[file], "tests": passed, "round": number}
        self.path.write_text(json.dumps(self.known))
        print(f"{len(outcome['seconds'])} tests mapped; failed without a mutant: {outcome['failed']}", flush=True)

    def reaching(self, mutant: Mutant, after: int = -1) -> dict[str, float]:
        """Tests that reach the mutant's line, or the smallest statement around it that any test reaches, and seconds.

        Tests beside the module in the tree of tests come first, then quick ones, up to the price. Those that were
        there in the round `after` are left out.
        """
        from coverage import CoverageData

        data = CoverageData(str(self.folder / "coverage"))
        data.read()
        lines = data.contexts_by_lineno(str(ROOT / mutant.file))
        files = [entry for entry in self.known.values() if entry["round"] > after]
        seconds = {name: value for entry in files for name, value in entry["tests"].items()}
        found: set[str] = set()
        for first, last in _around((ROOT / mutant.file).read_text("utf-8"), mutant.line):
            for context in {context for line in range(first, last + 1) for context in lines.get(line, ())}:
                test, _, phase = context.rpartition("|")
                if phase == "run":
                    found.add(test)
                elif phase:  # a fixture that other tests of the file may share
                    found |= set(self.known.get(test.partition("::")[0], {"tests": ()})["tests"])
            found &= seconds.keys()
            if found:
                break
        beside = str(Path("tests", *Path(mutant.file).parts[1:]).parent) + "/"
        chosen: dict[str, float] = {}
        for test in sorted(found, key=lambda test: (not test.startswith(beside), seconds[test], test)):
            if chosen and sum(chosen.values()) + seconds[test] > self.price:
                break
            chosen[test] = seconds[test]
        return chosen


def _around(source: str, line: int) -> list[tuple[int, int]]:
    """First and last line of the line itself and of every statement around it, from the smallest on."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    spans = {(node.lineno, node.end_lineno or node.lineno) for node in statements if node.lineno <= line}
    around = sorted((span for span in spans if span[1] >= line), key=lambda span: span[1] - span[0])
    return [(line, line), *around, (1, len(source.splitlines()))]


def try_out(mutant: Mutant, tests: TestMap, earlier: Outcome | None = None) -> Outcome:
    """Whether the tests notice the mutant; if they did not in an earlier round, only those that are new are run."""
    chosen = tests.reaching(mutant, -1 if earlier is None else earlier["round"])
    before = (ROOT / mutant.file).read_text("utf-8").splitlines()
    changes = difflib.unified_diff(before, mutated(mutant).splitlines(), lineterm="", n=0)
    diff = [line for line in changes if not line.startswith(("---", "+++", "@@"))]
    row: Outcome = {"room": mutant.room, "file": mutant.file, "line": mutant.line, "diff": diff, "round": tests.round}
    row["tests"] = len(chosen) + (0 if earlier is None else earlier["tests"])
    if not chosen:
        return {**row, "status": "survived", "by": ""}
    outcome = run(["-x", *chosen], mutant, 20 + round(2 * sum(chosen.values())))
    if outcome is None:
        return {**row, "status": "killed", "by": "time"}
    if outcome["code"] == 0:
        return {**row, "status": "survived", "by": ""}
    return {**row, "status": "killed", "by": (outcome["failed"] or ["collection"])[0]}
