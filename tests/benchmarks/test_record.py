from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks.record import RESULTS, ROOT, Record, alternate, digest, portable, ratios
from lit_recon.data.splits import Pool


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
