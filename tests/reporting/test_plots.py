from __future__ import annotations

import re

import numpy as np
import pytest

from lit_recon.reporting.plots import Plot, Series, draw


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
