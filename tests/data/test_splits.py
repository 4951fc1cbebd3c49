"""Splits: disjoint, of the sizes asked for, and told apart by their hashes."""

from __future__ import annotations

import pytest
import torch

from lit_recon.data.dataset import ImageSet
from lit_recon.data.splits import content_hash, hold_out
from lit_recon.errors import ConfigError


def image_set(level: int, label: int = 0) -> ImageSet:
    return ImageSet(torch.full((2, 1, 2, 2), level, dtype=torch.uint8), torch.tensor([0, label]), ["a", "b"], "toy")


def test_content_hash_sees_pixels_labels_and_roles() -> None:
    hashes = [
        content_hash(image_set(0), image_set(1)),
        content_hash(image_set(1), image_set(0)),
        content_hash(image_set(0, label=1), image_set(1)),
        content_hash(image_set(0), image_set(2)),
    ]
    assert len(set(hashes)) == len(hashes)
    assert content_hash(image_set(0), image_set(1)) == hashes[0]


def test_hold_out_is_stratified() -> None:
    labels = torch.tensor([0] * 100 + [1] * 20 + [2] * 5 + [3] * 2 + [4])
    train, test = hold_out(labels, fraction=0.2, seed=0)
    assert labels[test].bincount(minlength=5).tolist() == [20, 4, 1, 1, 0]
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(labels)))


def test_hold_out_leaves_every_class_something_to_train_on() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1])
    assert labels[hold_out(labels, fraction=0.99, seed=0)[0]].unique().tolist() == [0, 1]


def test_hold_out_depends_on_the_seed() -> None:
    labels = torch.zeros(100, dtype=torch.int64)
    first, again, other = (hold_out(labels, 0.5, seed)[1].tolist() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5])
def test_hold_out_refuses_other_fractions(fraction: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and below 1; got"):
        hold_out(torch.zeros(10, dtype=torch.int64), fraction, seed=0)


def test_hold_out_needs_two_images_of_a_class() -> None:
    with pytest.raises(ConfigError, match="every class has one image only"):
        hold_out(torch.arange(5), 0.1, seed=0)
