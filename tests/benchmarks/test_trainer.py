from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.trainer import Timed, measure
from lit_recon.inversion import Adam


def test_every_iteration_after_the_first_is_timed_in_both_forms() -> None:
    row = measure(rounds=1, steps=4, width=2)

    assert {name: part["n"] for name, part in row["seconds"].items()} == {"bare": 2, "trainer": 2}
    for name in ("overhead_of_means", "overhead_of_medians"):
        assert row[name]["n"] == 1
        assert row[name]["median"] > -1


def test_a_timed_solver_takes_the_steps_of_the_one_inside() -> None:
    def descend(solver: Adam | Timed) -> Tensor:
        variables = {"x": torch.tensor([1.0, -2.0])}
        optimizer = solver.optimizer(variables)

        def evaluate() -> Tensor:
            variables["x"].grad = variables["x"].clone()
            return variables["x"].square().sum()

        for step in range(3):
            solver.step(optimizer, variables, ("x",), step / 3, evaluate)
        return variables["x"]

    timed = Timed(Adam())
    assert torch.equal(descend(timed), descend(Adam()))
    assert len(timed.iterations()) == 1
    assert timed.iterations() == []
