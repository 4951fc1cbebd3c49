from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch

from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits, ImageSource
from lit_recon.data.splits import Pool
from lit_recon.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Numbered(ImageSource):
    """Images that hold their own number, `copies` times each, in half as training and half as test images."""

    n: int = 40
    classes: int = 4
    copies: int = 1
    side: int = 2
    first: int = 0

    def read(self) -> tuple[ImageSet, ImageSet]:
        numbers = torch.arange(self.first, self.first + self.n).repeat(self.copies)
        images = numbers.to(torch.uint8)[:, None, None, None].expand(-1, 1, self.side, self.side).clone()
        names = [f"{self.classes}:{label}" for label in range(self.classes)]
        labels = numbers % self.classes
        half = len(numbers) // 2
        return (
            ImageSet(images[:half], labels[:half], names, "numbers train"),
            ImageSet(images[half:], labels[half:], names, "numbers test"),
        )


def numbers(part: ImageSet | None) -> list[int]:
    return [] if part is None else part.images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_parts_never_overlap_and_leave_nothing_out(seed: int) -> None:
    sizes = torch.randint(2, 12, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
    split = draw_informed_split(Numbered(copies=1 + seed % 2), InformedSplitSettings(*sizes, seed=seed))
    parts = [numbers(part) for part in (split.fixed, split.shadow, split.targets, split.rest)]
    assert list(map(len, parts[:3])) == sizes
    assert sorted(number for part in parts for number in part) == list(range(40))
    assert split.fixed.labels.tolist() == [number % 4 for number in parts[0]]


def test_more_shadows_leave_the_other_parts_as_they_are() -> None:
    few = draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7, seed=3))
    many = draw_informed_split(Numbered(), InformedSplitSettings(5, 20, 7, seed=3))
    assert numbers(few.fixed) == numbers(many.fixed)
    assert numbers(few.targets) == numbers(many.targets)
    assert numbers(few.shadow) == numbers(many.shadow)[:6]
    other = draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7, seed=4))
    assert len({few.hash, many.hash, other.hash}) == 3
    assert few.hash == draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7, seed=3)).hash


def test_a_whole_source_leaves_no_rest() -> None:
    assert draw_informed_split(Numbered(n=12), InformedSplitSettings(3, 4, 5, pool="all")).rest is None


def test_unseen_images_are_of_the_same_source() -> None:
    other = Numbered(first=100, classes=6)
    for sizes, source, part in (((3, 4, 4), None, "rest"), ((3, 4, 5), None, "shadow"), ((3, 4, 8), other, "rest")):
        split = draw_informed_split(Numbered(n=12), InformedSplitSettings(*sizes, pool="all"), source)
        assert split.unseen is getattr(split, part)
    split = draw_informed_split(Numbered(n=12), InformedSplitSettings(3, 4, 9, pool="all"), other)
    with pytest.raises(ConfigError, match=r"none is left, .* of other data: lower split\.fixed"):
        _ = split.unseen


def test_no_target_is_in_both_pools() -> None:
    targets = {
        pool: {
            number
            for seed in range(30)
            for number in numbers(draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7, seed, pool)).targets)
        }
        for pool in get_args(Pool)
    }
    assert not targets["development"] & targets["evaluation"]
    assert targets["development"] | targets["evaluation"] == targets["all"] == set(range(40))


def test_the_pool_changes_no_fixed_set() -> None:
    splits = [draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7, pool=pool)) for pool in get_args(Pool)]
    assert len({tuple(numbers(split.fixed)) for split in splits}) == 1


def test_a_pool_may_be_too_small() -> None:
    with pytest.raises(ConfigError, match=r"split.targets must be at most \d+, the images of pool development of"):
        draw_informed_split(Numbered(), InformedSplitSettings(3, 4, 30, pool="development"))


def test_shadows_from_elsewhere_get_classes_of_the_released_models() -> None:
    elsewhere = Numbered(n=60, classes=30, first=100)
    split = draw_informed_split(Numbered(), InformedSplitSettings(10, 50, 10), elsewhere)
    assert min(numbers(split.shadow)) >= 100
    assert split.shadow.class_names == split.fixed.class_names
    assert set(split.shadow.labels.tolist()) == {0, 1, 2, 3}
    same_classes = draw_informed_split(Numbered(), InformedSplitSettings(10, 50, 10), Numbered(n=60, first=100))
    assert same_classes.shadow.labels.tolist() == [number % 4 for number in numbers(same_classes.shadow)]


def test_digits_have_enough_different_images() -> None:
    split = draw_informed_split(Digits(), InformedSplitSettings(200, 1_000, 100))
    assert split.rest is not None
    assert 480 <= len(split.rest) <= 497


@pytest.mark.parametrize("part", ["targets", "shadow"])
def test_a_target_inside_the_fixed_set_is_refused(part: str) -> None:
    split = draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7))
    inside = split.fixed.subset(torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match=r"must share no image with the fixed set; image 0 of"):
        replace(split, **{part: inside})


def test_a_target_among_the_shadows_is_refused() -> None:
    split = draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7))
    with pytest.raises(ConfigError, match="the test targets must share no image with the shadow targets"):
        replace(split, targets=split.shadow)


@pytest.mark.parametrize(
    ("sizes", "shadow_source", "complaint"),
    [
        (
            (20, 20, 20),
            None,
            r"20 fixed \+ 20 targets \+ 20 shadow images; numbered has 40 different ones: lower split.fixed",
        ),
        ((20, 20, 10), None, "lower split.shadow to at most 10$"),
        ((20, 41, 20), Numbered(first=100), "split.shadow must be at most 40"),
        ((20, 5, 21), Numbered(first=100), r"20 fixed \+ 21 targets images.*lower split.fixed or split.targets$"),
    ],
)
def test_more_than_the_pool_holds_is_refused(
    sizes: tuple[int, int, int], shadow_source: ImageSource | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        draw_informed_split(Numbered(), InformedSplitSettings(*sizes, pool="all"), shadow_source)


def test_copies_do_not_count() -> None:
    with pytest.raises(ConfigError, match="40 different ones"):
        draw_informed_split(Numbered(copies=3), InformedSplitSettings(20, 20, 20))


def test_other_shapes_and_classes_are_refused() -> None:
    split = draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7))
    with pytest.raises(ShapeError, match="one shape"):
        draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7), Numbered(side=3, first=100))
    many = Numbered(n=60, classes=30, first=100).load()[0]
    with pytest.raises(ConfigError, match="shadow labels must be 0 to 3"):
        InformedSplit(split.fixed, many, split.targets)


@pytest.mark.parametrize("sizes", [(0, 2, 1), (1, 1, 1), (1, 2, 0)])
def test_empty_parts_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        InformedSplitSettings(*sizes)


def test_images_for_pre_training_are_the_last_of_the_rest() -> None:
    few = draw_informed_split(Numbered(), InformedSplitSettings(5, 6, 7, seed=3))
    many = draw_informed_split(Numbered(), InformedSplitSettings(5, 20, 7, seed=3))
    own, other = few.with_pretraining(4), many.with_pretraining(4)
    assert numbers(own.pretraining) == numbers(few.rest)[-4:] == numbers(other.pretraining)
    assert numbers(own.rest) == numbers(few.rest)[:-4]
    assert [len(part) for part in own.others] == [18, 4]
    assert own.hash != few.hash
    with pytest.raises(ConfigError, match="pre-training needs 9 images .* got 8"):
        many.with_pretraining(9)
    with pytest.raises(ConfigError, match="the images of the pre-training must share no image with the test targets"):
        replace(few, pretraining=few.targets)
