from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.capture import CapturedMatching
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.throughput import throughput, together
from benchmarks.workload import Workload


def test_iterations_are_timed_beside_a_forward_and_backward_pass(plan: Plan) -> None:
    rows = list(throughput(plan))

    measured = [row for row in rows if "seconds" in row]
    assert [(row["batch"], row["batch_norm"]) for row in measured] == [
        (batch, mode) for mode in ("eval", "train") for batch in plan.sizes.batches
    ]
    for row in measured:
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA kernels")
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_a_recorded_data_term_computes_what_the_launched_one_does(execution: str) -> None:
    workload = Workload.build(batch=2, victims=2, width=8, device="cuda")
    _, state = workload.attack(execution)  # type: ignore[arg-type]  # a literal
    labels = torch.stack([problem.labels for problem in state.problems])
    images = torch.rand(2, 2, 3, 32, 32, device="cuda")
    captured = CapturedMatching(state.matching, torch.rand_like(images), labels, [0, 1])

    expected, found = state.matching(images, labels, [0, 1]), captured(images, labels, [0, 1])

    torch.testing.assert_close(found.matching, expected.matching)
    torch.testing.assert_close(found.images, expected.images, rtol=1e-3, atol=1e-6)
