from __future__ import annotations

import pytest

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.throughput import throughput, together


def test_iterations_are_timed_beside_a_forward_and_backward_pass(plan: Plan) -> None:
    rows = list(throughput(plan))

    measured = [row for row in rows if "seconds" in row]
    pixels = [row for row in measured if "parametrization" not in row]
    assert [(row["batch"], row["batch_norm"]) for row in pixels] == [
        (batch, mode) for mode in ("eval", "train") for batch in plan.sizes.batches
    ]
    assert [row["batch"] for row in measured if row not in pixels] == list(plan.sizes.batches)
    for row in pixels:
        assert set(row["seconds"]) == {"forward_backward", "eager", "eager_derivative"}
        assert row["ratio"]["eager"]["median"] > 1
        assert row["seconds"]["eager"]["n"] == plan.sizes.rounds
    assert "skipped" in rows[-1], "nothing is compiled without a GPU"


def test_victims_are_attacked_one_by_one_and_at_once(plan: Plan) -> None:
    rows = list(together(plan))

    assert [row["victims"] for row in rows] == list(plan.sizes.victims)
    for row in rows:
        for execution in ("loop", "vmap"):
            once, each = row["iterations_per_second"][execution], row["victim_iterations_per_second"][execution]
            assert each == pytest.approx(row["victims"] * once, rel=0.05)
