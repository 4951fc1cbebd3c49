from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from lit_recon.errors import ShapeError
from lit_recon.reporting.plots import Plot, Series, data_uri, draw, image_grid, png


def decoded(content: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(content)))


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


@pytest.mark.parametrize("shape", [(2, 4, 4), (4, 4, 3), (4, 4), (1, 3, 4, 4)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"must be \(1, h, w\) or \(3, h, w\)"):
        png(np.zeros(shape))


@pytest.mark.parametrize(("side", "scale"), [(8, 8), (28, 3), (32, 2), (64, 1), (100, 1)])
def test_a_grid_enlarges_by_whole_repetition_only(side: int, scale: int) -> None:
    stack = levels(2, 3, side, side)
    grid = decoded(image_grid({"target": stack / np.float32(255)}))
    for image in stack:
        enlarged = image.transpose(1, 2, 0).repeat(scale, 0).repeat(scale, 1)
        assert holds(grid, enlarged)


def holds(grid: NDArray[np.uint8], part: NDArray[np.uint8]) -> bool:
    """Whether `part` lies somewhere in `grid`, pixel by pixel."""
    height, width = part.shape[:2]
    corners = np.argwhere((grid == part[0, 0]).all(axis=-1))
    return any(np.array_equal(grid[y : y + height, x : x + width], part) for y, x in corners)


def test_grey_images_make_a_grid_with_all_rows_and_blocks() -> None:
    rows = {"target": levels(5, 1, 64, 64, seed=1), "found": levels(5, 1, 64, 64, seed=2)}
    grid = decoded(image_grid({name: stack / np.float32(255) for name, stack in rows.items()}, columns=2))
    for stack in rows.values():
        for image in stack:
            assert holds(grid, image[0][..., None].repeat(3, axis=-1))
    assert grid.shape[0] > 6 * 64
    assert grid.shape[1] < 4 * 64


def test_a_grid_without_images_or_with_odd_rows_is_refused() -> None:
    with pytest.raises(ShapeError, match="rows of one shape"):
        image_grid({"a": np.zeros((2, 3, 4, 4)), "b": np.zeros((1, 3, 4, 4))})
    with pytest.raises(ShapeError, match="rows of one shape"):
        image_grid({"a": np.zeros((0, 3, 4, 4))})
    with pytest.raises(ShapeError, match="rows of one shape"):
        image_grid({})


def test_equal_plots_are_equal_files_with_one_legend() -> None:
    series = [Series("error", [1, 10], [0.2, 0.1], marker="o", errors=[0.01, 0.02], labels=["weak", "strong"])]
    right = Series("accuracy", [1, 10], [0.8, 0.9], right=True)
    plots = [
        Plot("first", y_label="MSE", right_label="share", series=[*series, right], levels={"mean": 0.3}, x_scale="log"),
        Plot("second", y_label="MSE", series=series, x_ticks={"one": 1, "ten": 10}, y_range=(0, None)),
    ]
    content = draw(plots, shared_y=True).decode()
    assert content == draw(plots, shared_y=True).decode()
    counts = [content.count(f"<!-- {words} -->") for words in ("error", "accuracy", "mean", "MSE", "weak", "ten")]
    assert counts == [1, 1, 1, 1, 2, 1]  # the legend and the label of the shared axis are there once
    assert draw(plots, kind="png").startswith(b"\x89PNG")


@pytest.mark.parametrize("bars", [{"errors": [0.05, 0.05]}, {"x_errors": [1.0, 2.0]}])
def test_bars_are_drawn_in_their_direction(bars: dict[str, list[float]]) -> None:
    content = draw([Plot(series=[Series("error", [1, 10], [0.2, 0.1], **bars)])]).decode()
    (drawn,) = re.findall(r'<g id="LineCollection_1">(.*?)</g>', content, re.DOTALL)
    lines = [[float(number) for number in re.findall(r"[-\d.]+", path)] for path in re.findall(r' d="([^"]*)"', drawn)]
    assert len(lines) == 2
    for x, y, other_x, other_y in lines:
        assert (x == other_x, y == other_y) == ("errors" in bars, "x_errors" in bars)


def test_one_value_and_one_tick_fit_a_logarithmic_axis() -> None:
    series = Series("error", [10], [0.2], marker="o", errors=[0.01])
    assert draw([Plot(series=[series], levels={"mean": 0.3}, x_scale="log", x_range=(5, 20))])
    assert draw([Plot(series=[series], levels={"mean": 0.3}, x_scale="log", x_ticks={"10": 10})])


def test_a_symmetric_logarithmic_axis_is_linear_below_its_smallest_positive_tick() -> None:
    places = (0, 0.001, 0.01, 0.1)
    plot = Plot(series=[Series("", places, places)], x_scale="symlog", x_ticks={f"at {x:g}": x for x in places})
    content = draw([plot]).decode()
    ticks = [float(x) for x in re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="[\d.]+" style="stroke', content)]
    steps = np.diff(sorted(set(ticks))[1 : 1 + len(places)])  # the first is the y axis
    assert steps.max() < 1.2 * steps.min()  # equal decades, and the linear part as wide as one


def test_few_distinct_samples_are_lines_and_many_a_histogram() -> None:
    many = draw([Plot(samples={"loss": list(range(60))}, levels={"mean": 30})]).decode()
    few = draw([Plot(samples={"loss": [3.0] * 60}, levels={"mean": 30})]).decode()
    assert "patch_6" in many  # the filled histogram
    assert "patch_6" not in few
    boxes = draw([Plot(samples={"first": [1, 2, 3], "second": [2, 3, 9]}, boxes=True)]).decode()
    assert "<!-- second -->" in boxes


def test_an_empty_plot_says_why() -> None:
    assert "<!-- nothing was measured -->" in draw([Plot(message="nothing was measured")]).decode()
