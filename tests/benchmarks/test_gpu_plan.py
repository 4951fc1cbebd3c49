from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.plan import Plan, attempt
from benchmarks.record import Row


@pytest.mark.parametrize("images", [None, Path("cifar10.npz")])
def test_a_plan_survives_the_way_to_another_process(plan: Plan, images: Path | None) -> None:
    sent = replace(plan, images=images, options=("attack.init_args.steps=10",))

    assert Plan.loads(sent.dumps()) == sent


def test_what_a_device_cannot_do_is_recorded() -> None:
    def measure() -> Row:
        raise RuntimeError("CUDA error:\n  out of memory")

    plan = Plan(device="cpu", quick=True, out=Path(), deadline=0)

    assert attempt(plan, {"batch": 32}, 5, measure) == {
        "batch": 32,
        "failed": "RuntimeError: CUDA error: out of memory",
    }


def test_what_does_not_fit_into_the_time_is_not_begun(plan: Plan) -> None:
    late = replace(plan, quick=False, deadline=0.0)

    row = attempt(late, {"batch": 1}, 5, lambda: pytest.fail("begun"))

    assert row == {"batch": 1, "skipped": "needs up to 5 s; 0 s were left"}
