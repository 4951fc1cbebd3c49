from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics.features import LabelAccuracy, label_hits


@pytest.mark.parametrize("seed", range(10))
def test_the_overlap_is_that_of_multisets(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    recovered, true = torch.randint(0, 4, (2, 9), generator=generator)
    expected = (Counter(recovered.tolist()) & Counter(true.tolist())).total()
    hits = label_hits(recovered, true)
    assert hits.sum() == expected
    assert torch.equal(LabelAccuracy()(recovered, true), hits)


@pytest.mark.parametrize(
    ("recovered", "accuracy"), [([3, 1, 1], 1.0), ([1, 3, 3], 2 / 3), ([1, 0, 0], 1 / 3), ([0, 2, 4], 0.0)]
)
def test_order_does_not_count_and_multiplicity_does(recovered: list[int], accuracy: float) -> None:
    assert label_hits(torch.tensor(recovered), torch.tensor([1, 1, 3])).mean().item() == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("recovered", "true", "complaint"),
    [
        (torch.tensor([1.0]), torch.tensor([1]), "recovered labels must be integer classes"),
        (torch.tensor([1]), torch.tensor([[1]]), r"true labels .* shape \(1, 1\)"),
        (torch.tensor([1]), torch.tensor([True]), "torch.bool"),
        (torch.tensor([1, 2]), torch.tensor([1]), "2 recovered and 1 true"),
    ],
)
def test_what_are_no_labels_of_one_batch_is_refused(recovered: Tensor, true: Tensor, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        label_hits(recovered, true)
