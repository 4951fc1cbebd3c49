from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.record import ROOT, alternate, portable, ratios, write_record


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
        (f"python {ROOT}/benchmarks/gpu.py --quick", "python -m benchmarks.gpu --quick"),
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
    first, second = (write_record("speed", {"rounds": n}, [{"x": 1.5}], folder=tmp_path) for n in (1, 2))

    assert first != second
    assert second.stem == f"{first.stem}-2"
    record = json.loads(second.read_text())
    assert (record["name"], record["settings"], record["rows"]) == ("speed", {"rounds": 2}, [{"x": 1.5}])
    assert {"device", "version_torch", "created", "command"} <= set(record)
