from __future__ import annotations

import base64
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lit_recon.errors import ShapeError
from lit_recon.reporting.images import ImageBlock, data_uri, image_grid, image_table, png
from tests.reporting.pixels import Pixels, decoded, enlarged, in_box, place, places, written


def levels(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_every_grey_level_and_color_survives_at_native_size() -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    assert np.array_equal(decoded(png(grey / np.float32(255))), grey[0])
    color = levels(3, 5, 7)
    assert np.array_equal(decoded(png(torch.from_numpy(color) / 255)), color.transpose(1, 2, 0))


def test_an_address_holds_the_image_itself() -> None:
    image = levels(3, 4, 4) / np.float32(255)
    start, content = data_uri(image).split(",")
    assert start == "data:image/png;base64"
    assert base64.b64decode(content, validate=True) == png(image)


def test_the_same_image_gives_the_same_bytes() -> None:
    stack = levels(4, 3, 8, 8) / np.float32(255)
    assert png(stack[0]) == png(stack[0].copy())
    assert image_grid({"a": stack, "b": stack}) == image_grid({"a": stack.copy(), "b": stack.copy()})


@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 4), (1, 3, 4, 4)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"must be \(c, h, w\) with at least one channel"):
        png(np.zeros(shape))


@pytest.mark.parametrize("channels", [2, 4])
def test_of_other_numbers_of_channels_the_mean_is_drawn(channels: int) -> None:
    stack = levels(2, channels, 64, 64) / np.float32(255)
    grey = stack.mean(axis=1, keepdims=True)
    assert png(stack[0]) == png(grey[0])
    assert image_grid({"found": stack}) == image_grid({"found": grey})


@pytest.mark.parametrize(("side", "scale"), [(8, 8), (28, 3), (32, 2), (64, 1), (100, 1)])
def test_a_grid_enlarges_by_whole_repetition_only(side: int, scale: int) -> None:
    stack = levels(2, 3, side, side) / np.float32(255)
    grid = decoded(image_grid({"target": stack}))
    assert [len(places(grid, enlarged(image, scale))) for image in stack] == [1, 1]


def test_grey_images_make_a_grid_with_all_rows_and_blocks() -> None:
    rows = {"target": levels(5, 1, 64, 64, seed=1), "found": levels(5, 1, 64, 64, seed=2)}
    shown = {name: stack / np.float32(255) for name, stack in rows.items()}
    grid = decoded(image_grid(shown, columns=2))
    assert all(len(places(grid, enlarged(image))) == 1 for stack in shown.values() for image in stack)
    assert grid.shape[0] > 6 * 64
    assert grid.shape[1] < 4 * 64


def test_a_grid_without_images_or_with_odd_rows_is_refused() -> None:
    with pytest.raises(ShapeError, match="rows of one shape"):
        image_grid({"a": np.zeros((2, 3, 4, 4)), "b": np.zeros((1, 3, 4, 4))})
    with pytest.raises(ShapeError, match="rows of one shape"):
        image_grid({"a": np.zeros((0, 3, 4, 4))})
    with pytest.raises(ShapeError, match="rows of one shape"):
        image_grid({})


def blocks(n: int, *shape: int, seed: int = 0) -> list[ImageBlock]:
    stacks = levels(n, *shape, seed=seed) / np.float32(255)
    return [ImageBlock(stack, f"number {index}") for index, stack in enumerate(stacks)]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_table_has_every_image_in_its_row_and_column_above_its_caption(channels: int) -> None:
    first, second = blocks(4, 2, channels, 16, 16)[:2], blocks(4, 2, channels, 16, 16)[2:]
    table = decoded(image_table(["left", "right"], {"upper": first, "lower": second}))
    found = {}
    for row, line in enumerate((first, second)):
        for column, block in enumerate(line):
            assert block.images is not None
            for number, image in enumerate(block.images):
                found[row, column, number] = place(table, enlarged(image, 4))
    tops = [{found[row, column, n][0] for column in range(2) for n in range(2)} for row in range(2)]
    lefts = [{found[row, column, n][1] for row in range(2)} for column in range(2) for n in range(2)]
    assert [len(same) for same in (*tops, *lefts)] == [1] * 6
    assert max(tops[0]) + 64 < min(tops[1])
    edges = [min(same) for same in lefts]
    assert all(right - left > 64 for left, right in pairwise(edges))
    for column, (title, block) in enumerate(zip(("left", "right"), second, strict=True)):
        top, left = place(table, written(title))
        assert left == pytest.approx(edges[2 * column], abs=2)
        assert top < min(tops[0])
        top, left = place(table, written(block.text, 12))
        assert left == pytest.approx(edges[2 * column], abs=2)
        assert min(tops[1]) + 64 < top < min(tops[1]) + 80
    assert place(table, written("lower"))[0] > max(tops[0]) + 64


def test_words_stand_in_the_place_of_missing_images() -> None:
    (block,) = blocks(1, 3, 1, 8, 8)
    assert block.images is not None
    table = decoded(image_table(["one", "two"], {"first": [block, ImageBlock(None, "not run yet")]}))
    top, left = place(table, in_box("not run yet"))
    first_top, first_left = place(table, enlarged(block.images[0], 8))
    assert first_top < top < first_top + 64
    assert left > first_left + 3 * 64
    with pytest.raises(ShapeError, match="rows of one shape"):
        image_table(["one"], {"first": [ImageBlock(None, "not run yet")]})


def first_place(table: Pixels, block: ImageBlock, scale: int) -> tuple[int, int]:
    assert block.images is not None
    return place(table, enlarged(block.images[0], scale))


def test_columns_that_do_not_fit_on_a_page_continue_below_with_all_rows() -> None:
    upper, lower = blocks(6, 4, 3, 32, 32), blocks(6, 4, 3, 32, 32, seed=1)
    table = decoded(image_table(list("abcdef"), {"upper": upper, "lower": lower}))
    assert table.shape[1] <= 1180
    tops = [[first_place(table, block, 2)[0] for block in row] for row in (upper, lower)]
    lefts = [[first_place(table, block, 2)[1] for block in row] for row in (upper, lower)]
    assert [len({*row[:3]}) + len({*row[3:]}) for row in tops] == [2, 2]
    assert tops[0][0] < tops[1][0] < tops[0][3] < tops[1][3]
    assert lefts[0] == lefts[1] == 2 * lefts[0][:3]
    assert len(places(table, written("upper"))) == 2


@pytest.mark.parametrize(("side", "largest", "factor", "scale"), [(96, 32, 3, 2), (120, 60, 2, 2), (64, 64, 1, 1)])
def test_larger_images_are_averaged_down_and_stay_legible(side: int, largest: int, factor: int, scale: int) -> None:
    image = levels(3, side, side) / np.float32(255)
    table = decoded(image_table([""], {"": [ImageBlock(image[None])]}, largest)).astype(int)
    small = side // factor
    means = image.reshape(3, small, factor, small, factor).mean(axis=(2, 4))
    (top, left), (bottom, right) = (edge(np.argwhere((table != 255).any(axis=-1)), axis=0) for edge in (np.min, np.max))
    shown = table[top : bottom + 1, left : right + 1]
    assert shown.shape == (scale * small, scale * small, 3)
    assert min(shown.shape[:2]) >= 64
    assert np.abs(shown - enlarged(means, scale)).max() <= 1  # of rounding


def test_long_words_and_reasons_stay_in_their_place() -> None:
    (block,) = blocks(1, 1, 3, 8, 8)
    assert block.images is not None
    long = ImageBlock(None, "the device ran out of memory while it computed a Jacobian of a very wide layer " * 3)
    label, title = "a" * 60, "unaware demonstrations"
    table = decoded(image_table([title, title], {label: [block, long]}))
    top, left = place(table, enlarged(block.images[0], 8))
    assert (table[top : top + 64, left - 6 : left] == 255).all()  # the label ends before
    assert (table[top - 6 : top, left:] == 255).all()  # the titles end above
    box = np.argwhere((table == (0xEE, 0xF0, 0xF2)).all(axis=-1))
    assert box[:, 0].min() == top
    assert (table[top : top + 64, box[:, 1].max() + 1 :] == 255).all()
    assert len(places(table, in_box("..."))) == 1
    assert [len(places(table, written(word))) for word in title.split()] == [2, 2]  # on a line each, uncut
