from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.agreement import (
    FLOOR,
    agreement,
    compared,
    computed,
    distances,
    moved_by_rounding,
    subjects,
)
from benchmarks.gpu.plan import Plan


@pytest.mark.slow
def test_every_form_agrees_with_float64(plan: Plan) -> None:
    rows = list(agreement(plan))

    judged = [row for row in rows if "agrees" in row]
    assert {(row["subject"], row["form"]) for row in judged} == {
        *((subject, form) for subject in ("ConvNet, digits", "ResNet-18, 32x32") for form in ("loop", "vmap")),
        ("deep image prior", "loop"),
    }
    assert all(row["agrees"] for row in judged)
    reconstructed = [row for row in rows if "rmse_between" in row]
    assert len(reconstructed) == 2
    assert all(row["rmse_between"] == 0 for row in reconstructed), "the CPU was compared with itself"


def test_another_computation_does_not_agree(plan: Plan) -> None:
    subject = subjects(plan)[0]
    exact = computed(subject, "cpu", torch.float64, "loop")
    allowed = dict.fromkeys(exact, FLOOR)
    off = replace(subject, images=subject.images * (1 + 1e-2))

    row = compared(replace(off, images=off.images.clamp(0, 1)), "cpu", "loop", exact, allowed)

    assert not row["agrees"]
    assert row["from_float64"]["update"] > FLOOR


def test_distances_are_relative() -> None:
    exact = {"update": torch.tensor([3.0, 4.0])}

    assert distances({"update": torch.tensor([3.0, 4.5])}, exact)["update"] == pytest.approx(0.1)


@pytest.mark.slow
def test_rounding_of_candidates_moves_a_derivative_that_lies_at_a_kink(plan: Plan) -> None:
    """What docs/performance.md says of the ResNet-18; the ConvNet has no kink so near."""
    small, large = subjects(replace(plan, quick=False))
    for subject, least, most in ((small, 0.0, 1e-6), (large, 7e-4, 0.1)):
        exact = computed(subject, "cpu", torch.float64, "loop")
        assert least <= moved_by_rounding(subject, exact)["derivative"] < most
