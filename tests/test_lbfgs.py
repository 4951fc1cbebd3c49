"""L-BFGS that is told losses, beside dense BFGS updates and functions with known minima."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lit_recon import solving
from lit_recon.solving import StepwiseLBFGS

Function = Callable[[Tensor], Tensor]


def started(values: list[float], history: int) -> tuple[Tensor, StepwiseLBFGS]:
    variable = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    return variable, StepwiseLBFGS(variable, history)


def evaluated(function: Function, variable: Tensor, search: StepwiseLBFGS) -> float:
    loss = function(variable)
    (variable.grad,) = torch.autograd.grad(loss, variable)
    search.told(loss.item())
    return loss.item()


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def bowl(x: Tensor) -> Tensor:
    return 0.5 * (torch.logspace(0, 3, len(x), dtype=x.dtype) * (x - 1) ** 2).sum()


@pytest.mark.parametrize("rows", [2, 64])  # of the memory at first, which grows
@pytest.mark.parametrize("history", [3, 50])
def test_directions_are_those_of_dense_updates(history: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "_ROWS", rows)
    variable, search = started([-1.2, 1.0, 0.5, -0.3, 0.8], history)
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(12):
        before = search._best
        evaluated(rosenbrock, variable, search)
        after = search._best
        assert after is not None
        if before is None or before is after:
            continue
        step, change = after[1] - before[1], after[2] - before[2]
        if float(step @ change) > 1e-10 * float(step.norm() * change.norm()):
            pairs = [*pairs, (step, change)][-history:]
        if not pairs:
            continue
        step, change = pairs[-1]
        inverse = float(step @ change / change.square().sum()) * torch.eye(5, dtype=torch.float64)
        for step, change in pairs:
            turn = torch.eye(5, dtype=torch.float64) - torch.outer(step, change) / (step @ change)
            inverse = turn @ inverse @ turn.T + torch.outer(step, step) / (step @ change)
        torch.testing.assert_close(search._direction, -inverse @ after[2], rtol=1e-6, atol=1e-9)
    assert len(pairs) > 2


@pytest.mark.parametrize(("function", "most"), [(rosenbrock, 150), (bowl, 60)])
def test_minima_are_found(function: Function, most: int) -> None:
    variable, search = started([0.0] * 5, 20)
    loss = min(evaluated(function, variable, search) for _ in range(most))
    assert loss < 1e-12


def test_the_loss_at_the_best_place_never_rises_and_steps_that_are_too_long_are_made_shorter() -> None:
    def walled(x: Tensor) -> Tensor:
        return bowl(x) if float(x.detach().max()) < 1.05 else torch.inf * x.sum()

    variable, search = started([0.0] * 4, 20)
    best = []
    for _ in range(80):
        evaluated(walled, variable, search)
        assert search._best is not None
        assert bool(variable.isfinite().all())
        best.append(search._best[0])
    assert all(after <= before for before, after in pairwise(best))
    assert best[-1] < 1e-8


def test_a_search_at_its_minimum_stands_still() -> None:
    variable, search = started([0.0] * 4, 20)
    for _ in range(200):
        evaluated(bowl, variable, search)
        if search.still:
            break
    assert search.still
    torch.testing.assert_close(variable.detach(), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_search_goes_on_from_its_state() -> None:
    variable, search = started([-1.2, 1.0, 0.5], 4)
    for _ in range(10):
        evaluated(rosenbrock, variable, search)
    other, again = started(variable.tolist(), 4)
    again.load_state_dict(copy.deepcopy(search.state_dict()))
    both = [[evaluated(rosenbrock, v, s) for _ in range(10)] for v, s in ((variable, search), (other, again))]
    assert both[0] == both[1]
