"""Mutation testing: what is mutated, how a sample is drawn, which tests are run, and what the documentation says."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from coverage import CoverageData

from benchmarks.mutants import sample, trial
from benchmarks.mutants.sample import Mutant, shares, spared

ROOT = Path(__file__).parents[2]

SOURCE = '''\
"""Title 1 - 2."""

Alias = dict[str, int] | None

if TYPE_CHECKING:
    SIZE = 1


@cached(3)
def half(value: int | None = 4, *, scale: float = 0.5) -> int | str:
    assert value > 0, "é" * 3
    if value > 6:
        raise ValueError(f"{value + 1} é > {6}" + "a" * 7)
    warnings.warn("é" + str(value * 8))
    return "é", value + 1, list(zip(a, b, strict=True))
'''


def test_what_does_not_act_is_not_mutated() -> None:
    lines = SOURCE.splitlines()

    def is_spared(line: int, text: str) -> bool:
        column = lines[line - 1].index(text)
        return any(first <= (line, column) <= last for first, last in spared(SOURCE))

    acting = [(10, "4"), (10, "0.5"), (12, "> 6"), (15, "+"), (15, "zip")]
    wording = [
        (3, "|"),
        (6, "1"),
        (9, "3"),
        (10, "| None"),
        (10, "| str"),
        (11, ">"),
        (13, "+"),
        (13, "* 7"),
        (14, "* 8"),
    ]
    assert [place for place in acting if is_spared(*place)] == []
    assert [place for place in [*wording, (15, "True")] if not is_spared(*place)] == []


def test_operators_are_replaced_within_their_group() -> None:
    used = {
        "ReplaceBinaryOperator_Add_Sub",
        "ReplaceComparisonOperator_Lt_GtE",
        "ReplaceUnaryOperator_Delete_Not",
        "AddNot",
    }
    refused = {
        "ReplaceBinaryOperator_Add_LShift",
        "ReplaceComparisonOperator_Is_Lt",
        "RemoveDecorator",
        "VariableReplacer",
    }
    assert {name for name in used | refused if sample._is_used(f"core/{name}")} == used


def test_a_room_has_its_least_and_a_share_by_lines() -> None:
    assert shares({"large": 800, "small": 150, "tiny": 50}, 145) == {"large": 95, "small": 30, "tiny": 20}
    assert sum(shares({"a": 3, "b": 3, "c": 1}, 100).values()) == 100  # rounded down, they would be 99 or 98


def test_lines_of_code_are_counted_without_text() -> None:
    assert (
        sample.code_lines(
            '"""One.\n\nTwo."""\n\na = (\n    1,\n    2,\n)\n\n\ndef f():\n    """Text."""\n    return a\n'
        )
        == 4
    )


def test_the_mutant_is_imported_in_place_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mutable_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text("from mutable_package.two import b\na = b + 1\n")
    (folder / "two.py").write_text("b = 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    loader = trial.MutatedModule(
        "mutable_package.one", str(folder / "one.py"), "from mutable_package.two import b\na = b - 1\n"
    )
    monkeypatch.setattr(sys, "meta_path", [loader, *sys.meta_path])
    assert importlib.import_module("mutable_package.one").a == 9
    assert "a = b + 1" in (folder / "one.py").read_text()
    for name in ("mutable_package", "mutable_package.one", "mutable_package.two"):
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trial.TestMap:
    """A module of five lines, three tests that reach it, and one test that has gone since."""
    monkeypatch.setattr(trial, "ROOT", tmp_path)
    module = tmp_path / "lit_recon" / "bounds" / "one.py"
    module.parent.mkdir(parents=True)
    module.write_text("def f(a):\n    if a:\n        return 1\n    return 2\nb = 3\n")
    data = CoverageData(str(tmp_path / "coverage"))
    reached = {
        "tests/bounds/t.py::slow|run": [2, 3],
        "tests/clients/t.py::quick|run": [2, 4],
        "tests/bounds/t.py::gone|run": [3],
    }
    for context, lines in {**reached, "tests/metrics/t.py::first|setup": [4], "": [1, 5]}.items():
        data.set_context(context)
        data.add_lines({str(module): lines})
    data.write()
    files = {
        "tests/bounds/t.py": {"slow": 4.0},
        "tests/clients/t.py": {"quick": 1.0},
        "tests/metrics/t.py": {"first": 2.0, "next": 9.0},
    }
    known = {
        file: {
            "digest": "",
            "round": int("metrics" in file),
            "tests": {f"{file}::{name}": seconds for name, seconds in tests.items()},
        }
        for file, tests in files.items()
    }
    (tmp_path / "tests.json").write_text(json.dumps(known))
    return trial.TestMap(tmp_path, price=20.0)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (3, ["bounds/t.py::slow"]),
        (2, ["bounds/t.py::slow", "clients/t.py::quick"]),  # beside the module first
        (4, ["clients/t.py::quick", "metrics/t.py::first", "metrics/t.py::next"]),  # a fixture serves its whole file
        (1, ["bounds/t.py::slow", "clients/t.py::quick", "metrics/t.py::first", "metrics/t.py::next"]),  # the function
        (5, ["bounds/t.py::slow", "clients/t.py::quick", "metrics/t.py::first", "metrics/t.py::next"]),  # the module
    ],
)
def test_tests_that_reach_the_line_are_chosen(tests: trial.TestMap, line: int, names: list[str]) -> None:
    mutant = Mutant("bounds", "lit_recon/bounds/one.py", line, "core/AddNot", 0, "key")
    assert list(tests.reaching(mutant)) == [f"tests/{name}" for name in names]


def test_tests_chosen_have_a_price(tests: trial.TestMap) -> None:
    tests.price = 6.0
    found = tests.reaching(Mutant("bounds", "lit_recon/bounds/one.py", 1, "core/AddNot", 0, "key"))
    assert sum(found.values()) == 5.0


def test_a_survivor_meets_only_new_tests(tests: trial.TestMap) -> None:
    mutant = Mutant("bounds", "lit_recon/bounds/one.py", 4, "core/AddNot", 0, "key")
    assert tests.round == 1
    assert list(tests.reaching(mutant, after=0)) == ["tests/metrics/t.py::first", "tests/metrics/t.py::next"]
    assert tests.reaching(mutant, after=1) == {}


def test_the_documentation_has_the_figures_and_survivors_of_the_records() -> None:
    page = (ROOT / "docs" / "mutation_testing.md").read_text()
    names = re.findall(r"`([\w-]+-mutants-[\w-]+\.json)`", page)
    before, after = (json.loads((ROOT / "benchmarks" / "results" / name).read_text()) for name in names)
    assert not before["partial"]
    assert not after["partial"]
    assert after["settings"]["tried"] == after["settings"]["size"] == 300
    counted = [{row["room"]: row for row in record["rows"] if "mutants" in row} for record in (before, after)]
    told = re.findall(r"^\| \**(\w+)\** \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {room: [int(value) for value in values] for room, *values in told} == {
        room: [row["mutants"], counted[0][room]["killed"], row["killed"]] for room, row in counted[1].items()
    }
    survivors = sorted(f"{row['file']}:{row['line']}" for row in after["rows"] if "diff" in row)
    listed = re.findall(r"^\| `([\w/]+\.py:\d+)` \| `.+` \| \w.+ \|$", page, re.MULTILINE)
    assert sorted(f"lit_recon/{place}" for place in listed) == survivors
    assert counted[1]["all"]["killed"] == 300 - len(survivors) >= 270
