from __future__ import annotations

from itertools import permutations

import pytest
import torch

from lit_recon.errors import ShapeError
from lit_recon.metrics.fidelity import mse
from lit_recon.metrics.scores import match


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_no_permutation_has_less_error(n: int) -> None:
    # Unrelated images: the greedy choice is often not the best one here.
    generator = torch.Generator().manual_seed(n)
    images, targets = torch.rand(n, 1, 2, 2, generator=generator), torch.rand(n, 1, 2, 2, generator=generator)
    totals = {order: mse(images[list(order)], targets).sum().item() for order in permutations(range(n))}
    assert tuple(match(images, targets).tolist()) == min(totals, key=totals.__getitem__)


def test_the_whole_batch_is_matched_at_once() -> None:
    # The first target is nearest to image 0, but taking it would cost the second more than the first gains.
    targets = torch.tensor([0.50, 0.40]).reshape(2, 1, 1, 1)
    images = torch.tensor([0.45, 0.90]).reshape(2, 1, 1, 1)
    assert match(images, targets).tolist() == [1, 0]


def test_a_shuffled_batch_is_put_back_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.rand(16, 3, 8, 8, generator=generator)
    images = (targets + 0.1 * torch.randn(targets.shape, generator=generator)).clamp(0, 1)
    shuffle = torch.randperm(16, generator=generator)
    assert shuffle[match(images[shuffle], targets)].tolist() == list(range(16))


def test_none_matches_none() -> None:
    assert match(torch.zeros(0, 1, 8, 8), torch.zeros(0, 1, 8, 8)).shape == (0,)


def test_batches_of_different_size_are_refused() -> None:
    with pytest.raises(ShapeError, match="pair up"):
        match(torch.rand(2, 1, 8, 8), torch.rand(3, 1, 8, 8))
