"""Schedules and solvers on problems with known answers."""

from __future__ import annotations

import pytest
import torch

from lit_recon.attacks.updates import LBFGS, Adam, CosineDecay, Solver, StepDecay
from lit_recon.attacks.updates.gradient_matching.solvers import Ended
from lit_recon.errors import ConfigError


def test_step_decay_is_the_papers() -> None:
    schedule = StepDecay()
    steps = 4800
    factors = [schedule(t / steps) for t in range(steps)]
    changes = [t for t in range(1, steps) if factors[t] != factors[t - 1]]
    assert changes == [1800, 3000, 4200]
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(1e-3)


def test_cosine_decay() -> None:
    schedule = CosineDecay(warmup=0.1, floor=0.2)
    assert schedule(0.05) == pytest.approx(0.5)
    assert schedule(0.1) == pytest.approx(1)
    assert schedule(0.55) == pytest.approx(0.6)
    assert schedule(1.0) == pytest.approx(0.2)


@pytest.mark.parametrize("solver", [Adam(0.1), Adam(0.1, signed=False), LBFGS(), LBFGS(0.1, line_search="none")])
def test_solvers_find_the_minimum_of_a_quadratic(solver: Solver) -> None:
    wanted = torch.tensor([1.0, -2.0, 0.5])
    variables = {"pixels": torch.zeros(3, requires_grad=True)}
    optimizer = solver.optimizer(variables)

    def evaluate() -> torch.Tensor:
        variables["pixels"].grad = None
        loss = (variables["pixels"] - wanted).square().sum()
        loss.backward()
        return loss.detach()

    for t in range(400):
        solver.step(optimizer, variables, ("pixels",), t / 400, evaluate)
    torch.testing.assert_close(variables["pixels"].detach(), wanted, atol=2e-3, rtol=0)


def test_an_iteration_ends_where_the_loss_says_so() -> None:
    variables, losses = {"pixels": torch.ones(3, requires_grad=True)}, []
    curvature = torch.tensor([1.0, 10.0, 100.0])

    def evaluate(enough: float) -> torch.Tensor:
        pixels = variables["pixels"]
        loss = (curvature * pixels.square()).sum()
        (pixels.grad,) = torch.autograd.grad(loss, pixels)
        losses.append(loss.item())
        if losses[-1] <= enough:
            raise Ended
        return loss.detach()

    solver = LBFGS(inner=50)
    solver.step(solver.optimizer(variables), variables, ("pixels",), 0.0, lambda: evaluate(0.5))
    assert losses[-1] <= 0.5 < min(losses[:-1])
    assert losses[-1] > 1e-3  # a whole iteration would end at 1e-12
    assert float((curvature * variables["pixels"].detach().square()).sum()) == pytest.approx(losses[-1])


def test_only_named_variables_are_signed() -> None:
    variables = {name: torch.zeros(2, requires_grad=True) for name in ("pixels", "labels")}
    solver = Adam()

    def evaluate() -> torch.Tensor:
        for value in variables.values():
            value.grad = torch.tensor([5.0, -0.1])
        return torch.tensor(0.0)

    solver.step(solver.optimizer(variables), variables, ("pixels",), 0.0, evaluate)
    assert variables["pixels"].grad.tolist() == [1, -1]
    assert variables["labels"].grad.tolist() == pytest.approx([5, -0.1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adam(lr=0),
        lambda: LBFGS(inner=0),
        lambda: LBFGS(lr=-1),
        lambda: StepDecay([0.5, 1.5]),
        lambda: CosineDecay(warmup=1.0),
    ],
)
def test_bad_settings(make: object) -> None:
    with pytest.raises(ConfigError):
        make()
