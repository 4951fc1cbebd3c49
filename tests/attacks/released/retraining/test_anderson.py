"""Anderson acceleration ends where the fixed point is, in as many steps as theory says."""

from __future__ import annotations

import torch

from lit_recon.attacks.anderson import Anderson


def test_it_solves_linear_problems_in_as_many_steps_as_there_are_proportions() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2, 12, 12, generator=generator, dtype=torch.float64)).Q
    # Four distinct proportions; 3 and -0.5 make the simple iteration diverge, in every other direction.
    proportions = torch.tensor([0.3, 1.0, 3.0, -0.5], dtype=torch.float64).repeat(3)
    slope = basis @ torch.diag(proportions) @ basis.mT
    solution = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    guesses, simple = torch.zeros_like(solution), torch.zeros_like(solution)
    memory, whole = Anderson(2, 12, 6), torch.ones(2, dtype=torch.float64)

    def correction(values: torch.Tensor) -> torch.Tensor:
        return (slope @ (solution - values)[:, :, None]).squeeze(2)

    for _ in range(9):
        guesses = memory.next(guesses, correction(guesses), whole)
        simple = simple + correction(simple)
    assert (simple - solution).norm() > 10
    assert (guesses - solution).norm() < 1e-5 * solution.norm()  # measured 1e-8


def test_iterations_side_by_side_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    solution = torch.randn(3, 5, generator=generator, dtype=torch.float64)

    def run(which: torch.Tensor, forget: bool = False) -> list[torch.Tensor]:
        guesses, memory = torch.zeros(len(which), 5, dtype=torch.float64), Anderson(len(which), 5, 3)
        seen = []
        for step in range(5):
            if forget and step == 3:
                memory.forget(torch.ones(len(which), dtype=torch.bool))
            corrections = (solution[which] - guesses) @ slope.T
            guesses = memory.next(guesses, corrections, torch.ones(len(which), dtype=torch.float64))
            seen.append(guesses)
        return seen

    together, alone = run(torch.arange(3)), run(torch.tensor([1]))
    torch.testing.assert_close(together[-1][1], alone[-1][0])
    forgotten = run(torch.tensor([1]), forget=True)
    torch.testing.assert_close(forgotten[2], alone[2])
    # Without memory the next guess is the plain correction.
    torch.testing.assert_close(forgotten[3], alone[2] + (solution[1] - alone[2]) @ slope.T)


def test_some_go_on_without_the_others() -> None:
    solution = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)
    both, one = Anderson(3, 2, 2), Anderson(1, 2, 2)
    whole, keep = torch.ones(3, dtype=torch.float64), torch.tensor([False, True, False])
    guesses = torch.zeros(3, 2, dtype=torch.float64)
    scale = torch.tensor([0.3, 2.5], dtype=torch.float64)
    expected = guesses[1:2]
    for _ in range(2):
        guesses = both.next(guesses, scale * (solution - guesses), whole)
        expected = one.next(expected, scale * (solution[1:2] - expected), whole[:1])
    both.keep(keep)
    guesses = both.next(guesses[keep], scale * (solution[1:2] - guesses[keep]), whole[:1])
    expected = one.next(expected, scale * (solution[1:2] - expected), whole[:1])
    torch.testing.assert_close(guesses, expected)


def test_damping_is_the_share_of_a_plain_step() -> None:
    memory, guess = Anderson(1, 2, 2), torch.zeros(1, 2, dtype=torch.float64)
    corrected = memory.next(guess, torch.ones(1, 2, dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64))
    assert corrected.tolist() == [[0.25, 0.25]]
