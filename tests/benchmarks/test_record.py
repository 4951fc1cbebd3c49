from __future__ import annotations

import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import features, iteration, linear_shadows, record, shadows
from benchmarks.record import RESULTS, ROOT, Record, alternate, digest, portable, ratios
from lit_recon.data.splits import Pool
from lit_recon.reporting.provenance import environment


def test_variants_take_turns_and_the_first_round_is_not_counted() -> None:
    calls: list[str] = []
    ticks = itertools.count()
    variants = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}

    seconds = alternate(variants, rounds=2, clock=lambda: float(next(ticks)))

    assert calls == ["a", "b"] * 3
    assert seconds == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_ratios_compare_round_by_round() -> None:
    found = ratios({"base": [1.0, 2.0, 4.0], "slow": [3.0, 6.0, 12.0]}, "base")

    assert found == {"slow": {"median": 3.0, "min": 3.0, "max": 3.0, "n": 3}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"python {ROOT}/benchmarks/gpu/__main__.py --quick", "python -m benchmarks.gpu --quick"),
        (f"python {ROOT}/benchmarks/maps.py --quick", "python -m benchmarks.maps --quick"),
        (f"--config={ROOT}/configs/attack/a.yaml", "--config=configs/attack/a.yaml"),
        ("no file '/srv/someone/sets/cifar10.npz'", "no file 'cifar10.npz'"),
        (Path("/srv/sets/cifar10.npz"), "cifar10.npz"),
        ("relative/path and 3 it/s, https://host/a/b", "relative/path and 3 it/s, https://host/a/b"),
        ({"loss": float("nan"), "n": (1, 2)}, {"loss": "nan", "n": [1, 2]}),
    ],
)
def test_a_record_names_no_path_of_this_machine(value: object, expected: object) -> None:
    assert portable(value) == expected


def test_records_of_one_day_are_kept_apart(tmp_path: Path) -> None:
    paths = []
    for n in (1, 2):
        with Record("speed", {"rounds": n}, folder=tmp_path) as record:
            record.add({"x": 1.5})
        paths.append(record.path)

    assert paths[1].stem == f"{paths[0].stem}-2"
    content = json.loads(paths[1].read_text())
    assert (content["name"], content["settings"], content["rows"]) == ("speed", {"rounds": 2}, [{"x": 1.5}])
    assert {"device", "version_torch", "created", "command", "commit", "tree", "pool"} <= set(content)
    assert content["partial"] is False


def test_a_killed_measurement_goes_on_where_it_stopped(tmp_path: Path) -> None:
    measured: list[int] = []

    def measure(n: int, fail: bool) -> dict[str, int]:
        if fail:
            raise KeyboardInterrupt
        measured.append(n)
        return {"square": n * n}

    def squares(pool: Pool, killed: bool) -> Record:
        with Record("squares", {}, pool, folder=tmp_path) as record:
            for n in (1, 2, 3):
                record.measure({"n": n}, lambda n=n: measure(n, killed and n == 3))
        return record

    with pytest.raises(KeyboardInterrupt):
        squares("development", killed=True)
    [first] = tmp_path.iterdir()
    assert json.loads(first.read_text())["partial"] is True
    assert squares("evaluation", killed=False).path != first  # another pool: a record of its own
    measured.clear()
    assert squares("development", killed=False).path == first

    content = json.loads(first.read_text())
    assert content["partial"] is False
    assert content["rows"] == [{"n": n, "square": n * n} for n in (1, 2, 3)]
    assert measured == [3]


@pytest.mark.parametrize(
    "other", [{"device": "Chip"}, {"device": "Chip 2.0", "version_torch": "0.1"}], ids=["device", "version"]
)
def test_it_does_not_go_on_elsewhere(other: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def squares(facts: dict[str, str], last: int) -> Record:
        monkeypatch.setattr(record, "environment", lambda device: {**environment(device), **facts})
        with Record("squares", {}, folder=tmp_path) as written:
            for n in (1, 2):
                written.measure({"n": n}, lambda n=n: {"square": n * n} if n <= last else sys.exit(1))
        return written

    with pytest.raises(SystemExit):
        squares({"device": "Chip 2.0"}, last=1)
    [killed] = tmp_path.iterdir()
    assert squares(other, last=2).path != killed
    assert squares({"device": "Chip 2.0"}, last=2).path == killed


@pytest.mark.parametrize(
    ("program", "arguments", "measurements", "n_rows"),
    [
        (iteration, "--batches 1 2", ["measure"], 4),
        (features, "--batches 1 2", ["measure"], 4),
        (shadows, "--known 5 6 --memory 1", ["peak_flops", "speed", "agreement", "convolutions", "memory"], 7),
        (linear_shadows, "--mnist x.npz", ["speed", "memory", "attack"], 3),
    ],
    ids=["iteration", "features", "shadows", "linear_shadows"],
)
def test_a_program_goes_on_where_it_was_killed(
    program: ModuleType,
    arguments: str,
    measurements: list[str],
    n_rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count(1)

    def fake(*_: object) -> Any:
        if (number := next(calls)) == n_rows:
            raise KeyboardInterrupt
        return 1e9 if program is shadows and number == 1 else {"number": number}

    for name in measurements:
        monkeypatch.setattr(program, name, fake)
    monkeypatch.setattr(program, "Record", partial(Record, folder=tmp_path))
    monkeypatch.setattr(sys, "argv", ["program.py", *arguments.split()])

    with pytest.raises(KeyboardInterrupt):
        program.main()
    [path] = tmp_path.iterdir()
    killed = json.loads(path.read_text())["rows"]
    program.main()

    rows = json.loads(path.read_text())["rows"]
    assert len(killed) == n_rows - 1
    assert rows[:-1] == killed
    assert next(calls) == n_rows + 2, "one measurement was missing"


def test_an_edited_record_has_another_digest(tmp_path: Path) -> None:
    with Record("speed", {}, folder=tmp_path) as record:
        record.add({"x": 1.5, "y": [0.1, "inf"]})
    content = json.loads(record.path.read_text())
    assert content["digest"] == digest(content)
    assert digest({**content, "rows": [{"x": 1.4, "y": [0.1, "inf"]}]}) != content["digest"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_record_was_edited(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["digest"] == digest(content)
    assert re.fullmatch("[0-9a-f]{40}", content["commit"])
    assert content["tree"] == "clean"
