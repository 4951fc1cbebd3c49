"""Search over class counts, with a solver that knows how far each is from the true ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_recon.attacks.updates.labels.counts import _Search
from lit_recon.attacks.updates.labels.equations import Fit
from lit_recon.attacks.updates.labels.head import HeadGradient

TRUE = torch.tensor([0, 0, 4, 1])


class Oracle:
    """Scores counts by the number of examples in a wrong class; the expected counts point to the true ones."""

    def __init__(self, score: Callable[[int], float]) -> None:
        self.score = score

    def solve(self, counts: Tensor, seed: int = 0) -> Fit:
        wrong = int((counts - TRUE).clamp(min=0).sum())
        return Fit(self.score(wrong), 0.0, TRUE.double(), explained=wrong == 0)


def searched(score: Callable[[int], float]) -> list[list[int]]:
    """Counts in the order in which they are tried, from all five examples in the first class."""
    zeros = torch.zeros(4, dtype=torch.float64)
    weights = torch.tensor([[1.0], [-1.0], [0.0], [0.0]], dtype=torch.float64)  # without noise, the columns sum to zero
    head = HeadGradient(weights, zeros, weights, zeros, 5, non_negative=False, usual=zeros + 0.25)
    search = _Search(head, torch.zeros(4, dtype=torch.int64), Oracle(score))
    search.run(torch.tensor([5, 0, 0, 0]), 200, 0)
    return [counts.tolist() for counts, _ in search.tried]


def test_a_much_better_neighbour_is_followed_at_once() -> None:
    path = [[5, 0, 0, 0], [4, 0, 1, 0], [3, 0, 2, 0], [2, 0, 3, 0]]
    tried = searched(lambda wrong: 100 * 3.0**wrong)
    assert tried[:4] == path
    assert len(tried) == 6  # five moves, each the first of its neighbours
    assert tried[-1] == TRUE.tolist()


def test_a_slightly_better_neighbour_waits_for_the_others() -> None:
    tried = searched(lambda wrong: 1 + 0.1 * wrong)
    assert tried[1:4] == [[4, 0, 1, 0], [4, 0, 0, 1], [4, 1, 0, 0]]  # all neighbours of the start
    assert tried[-1] == TRUE.tolist()
