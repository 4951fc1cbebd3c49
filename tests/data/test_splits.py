"""Splits: disjoint, of the sizes asked for, and told apart by their hashes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lit_recon.data.dataset import ImageSet
from lit_recon.data.splits import Split, content_hash, disjoint_split, hold_out, split_hash
from lit_recon.errors import ConfigError


@pytest.mark.parametrize("sizes", [{"a": 60, "b": 40}, {"a": 5, "b": 0, "c": 30}, {"a": 100}, {}])
def test_parts_are_disjoint_and_sized(sizes: dict[str, int]) -> None:
    split = disjoint_split(100, sizes, seed=1)
    members = [index for name in sizes for index in split[name].tolist()]
    assert {name: len(split[name]) for name in sizes} == sizes
    assert len(set(members)) == len(members)
    assert set(members) <= set(range(100))


def test_every_index_may_be_in_every_part() -> None:
    seen = {int(index) for seed in range(40) for index in disjoint_split(10, {"a": 3, "b": 7}, seed)["a"]}
    assert seen == set(range(10))


def test_seed_decides() -> None:
    first, again, other = (disjoint_split(100, {"a": 50, "b": 50}, seed).hash for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("sizes", [{"a": 8, "b": 3}, {"a": -1}])
def test_refuses_impossible_sizes(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"at least 0 and at most 10 in sum; got"):
        disjoint_split(10, sizes, seed=0)


@pytest.mark.parametrize("parts", [([0, 1], [1, 2]), ([0, 0],)])
def test_an_overlapping_split_cannot_be_built(parts: tuple[list[int], ...]) -> None:
    with pytest.raises(ConfigError, match="must share no image"):
        Split({str(position): torch.tensor(part) for position, part in enumerate(parts)})


def test_hash_is_stable_across_types() -> None:
    expected = split_hash(torch.tensor([3, 1, 2]))
    assert expected == split_hash(np.array([1, 2, 3], dtype=np.int32)) == split_hash(np.array([2, 3, 1], dtype=">i8"))
    assert len(expected) == 16
    assert int(expected, 16) >= 0


def test_hash_sees_every_difference() -> None:
    a, b = torch.tensor([0, 1]), torch.tensor([2])
    hashes = [
        split_hash(a, b),
        split_hash(b, a),
        split_hash(a),
        split_hash(torch.cat([a, b])),
        split_hash(),
        split_hash(b),
    ]
    assert len(set(hashes)) == len(hashes)


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
    split = hold_out(labels, fraction=0.2, seed=0)
    assert labels[split["test"]].bincount(minlength=5).tolist() == [20, 4, 1, 1, 0]
    assert sorted([*split["train"].tolist(), *split["test"].tolist()]) == list(range(len(labels)))


def test_hold_out_leaves_every_class_something_to_train_on() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1])
    assert labels[hold_out(labels, fraction=0.99, seed=0)["train"]].unique().tolist() == [0, 1]


def test_hold_out_depends_on_the_seed() -> None:
    labels = torch.zeros(100, dtype=torch.int64)
    assert (
        hold_out(labels, 0.5, seed=0).hash == hold_out(labels, 0.5, seed=0).hash != hold_out(labels, 0.5, seed=1).hash
    )


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5])
def test_hold_out_refuses_other_fractions(fraction: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and below 1; got"):
        hold_out(torch.zeros(10, dtype=torch.int64), fraction, seed=0)


def test_hold_out_needs_two_images_of_a_class() -> None:
    with pytest.raises(ConfigError, match="every class has one image only"):
        hold_out(torch.arange(5), 0.1, seed=0)
