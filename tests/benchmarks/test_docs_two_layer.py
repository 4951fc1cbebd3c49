"""Tables of bounds on two-layer networks: means over draws, and exponents from a sweep of one size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks.docs import two_layer
from benchmarks.docs.tables import configuration
from tests.benchmarks.test_docs_tables import lines

STUDY = configuration("bounds/two_layer_small.yaml")
BASE = STUDY["base"]


@pytest.fixture
def record() -> dict[str, Any]:
    """Errors of `s sqrt(d / m)` for the bound and the exact attack, and of `B sqrt(d / m)` for the tensor method."""
    rows = []
    for size, values in STUDY["sweeps"].items():
        for value, draw in itertools.product(values, range(2)):
            sizes = {**BASE, size: value}
            order = (sizes["d"] / sizes["m"]) ** 0.5
            bound, attack = sizes["noise"] * order, sizes["batch"] * order
            errors = {"bound_unit_norm": bound, "bound_van_trees": bound, "error_exact": bound, "error_tensor": attack}
            rows.append({"defense": "none", **sizes, "draw": draw, **errors})
    rows = [row for number, row in enumerate(rows) if row not in rows[:number]]
    clipped = {"defense": "clipping", "strength": 0.1, **BASE, "bound_unit_norm": 0.25, "error_exact": 0.5}
    rows += [{**clipped, "draw": 0}, {**clipped, "draw": 1, "bound_unit_norm": 0.75}]
    metrics = {"n_below_bound": 1, "n_compared": 9}
    return {"name": "two_layer_small", "rows": [{"metrics": metrics, "tables": {"bounds": rows}}]}


def test_exponents_are_those_of_the_sweeps(record: dict[str, Any]) -> None:
    _, *found = lines(two_layer.orders(record))
    assert [[name, *(float(value) for value in values)] for name, *values in found] == [
        ["`d`", 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        ["`m`", -0.5, -0.5, -0.5, -0.5, -0.5, -0.5],
        ["`B`", 0, 0, 0, 1, 0, 1],
        ["`s`", 1, 1, 1, 0, 1, 0],
    ]


def test_defenses_are_compared_at_the_base_network(record: dict[str, Any]) -> None:
    text = two_layer.defenses(record)
    _, none, clipped = lines(text.replace(r"\|", "/"))
    assert none[0] == "none"
    assert clipped == ["clipping, S//g/ 0.1", "0.5", "–", "0.5", "–"]
    assert "Means of 2 draws. Below its bound beyond chance: 1 of 9 comparisons" in text
