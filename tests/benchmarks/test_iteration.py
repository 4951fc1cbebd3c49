from __future__ import annotations

import pytest

from benchmarks.iteration import measure


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_an_iteration_is_compared_with_one_forward_and_backward_pass(mode: str) -> None:
    row = measure(batch=1, mode=mode, rounds=2, compiled=False, width=2)  # type: ignore[arg-type]  # a literal

    assert (row["batch"], row["batch_norm"]) == (1, mode)
    assert set(row["ratio"]) == {"eager"}
    assert row["ratio"]["eager"]["n"] == 2
