from __future__ import annotations

import math
import re

import numpy as np
import pytest

from lit_recon.reporting.plots import HEIGHT, WIDTH, Chart, loss_chart
from lit_recon.reporting.writing import LossCurve


def curve(losses: list[float], steps: list[float] | None = None) -> LossCurve:
    return LossCurve(0, 0, {"step": steps or [float(step) for step in range(len(losses))], "loss": losses})


def chart_of(*curves: LossCurve) -> Chart:
    chart = loss_chart(curves)
    assert chart is not None
    return chart


def points(line: str) -> list[tuple[float, float]]:
    assert re.fullmatch(r"M[\d. ]+(L[\d. ]+)*", line)
    return [(float(x), float(y)) for x, y in (place.split() for place in line[1:].split("L"))]


def test_a_falling_line_runs_from_top_left_to_bottom_right() -> None:
    chart = chart_of(curve([4.0, 3.0, 2.0]))
    assert not chart.logarithmic
    assert points(chart.lines[0]) == [(0, 0), (WIDTH / 2, HEIGHT / 2), (WIDTH, HEIGHT)]


def test_decades_are_equally_high_on_a_logarithmic_axis() -> None:
    chart = chart_of(curve([1.0, 0.1, 0.01, 0.001]))
    assert chart.logarithmic
    heights = [y for _, y in points(chart.lines[0])]
    assert np.diff(heights) == pytest.approx([HEIGHT / 3] * 3, abs=0.1)
    assert [(tick.label, round(tick.position, 6)) for tick in chart.y_ticks] == [
        ("0.001", 0),
        ("0.01", 0.333333),
        ("0.1", 0.666667),
        ("1", 1),
    ]


@pytest.mark.parametrize("losses", [[1.0, -0.5, 0.1], [1.0, 0.0], [1.0, 0.2]])
def test_losses_that_are_not_positive_or_hardly_differ_get_a_linear_axis(losses: list[float]) -> None:
    assert not chart_of(curve(losses)).logarithmic


def test_all_curves_share_the_axes() -> None:
    chart = chart_of(curve([10.0, 5.0]), curve([5.0, 0.5], steps=[0.0, 2.0]))
    first, second = map(points, chart.lines)
    assert first[0] == (0, 0)
    assert first[1] == (WIDTH / 2, second[0][1])
    assert second[1] == (WIDTH, HEIGHT)


def test_gaps_are_left_out_and_curves_without_points_too() -> None:
    chart = chart_of(curve([2.0, math.nan, math.inf, 1.0]), curve([math.nan, 3.0]), curve([]))
    assert [points(line) for line in chart.lines] == [[(0, 0), (WIDTH, HEIGHT)]]
    assert loss_chart([curve([1.0])]) is None
    assert loss_chart([]) is None


def test_a_constant_loss_is_a_line_in_the_middle() -> None:
    chart = chart_of(curve([0.5, 0.5]))
    assert points(chart.lines[0]) == [(0, HEIGHT / 2), (WIDTH, HEIGHT / 2)]
    assert [tick.label for tick in chart.y_ticks] == ["0.5"]


def test_long_curves_are_thinned_but_keep_their_ends() -> None:
    n = 24_001
    chart = chart_of(curve(list(np.linspace(3.0, 2.0, n))))
    line = points(chart.lines[0])
    assert 100 < len(line) <= 200
    assert (line[0], line[-1]) == ((0, 0), (WIDTH, HEIGHT))
    many = chart_of(*[curve(list(np.linspace(3.0, 2.0, 1000))) for _ in range(500)])
    assert sum(len(points(line)) for line in many.lines) <= 20_000
    assert 0.1 < many.opacity < chart.opacity <= 1


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.7), (0.0, 24_000.0), (1e-9, 3.0), (2e-3, 0.04), (-3.0, 5.0)])
def test_ticks_are_few_ordered_and_within_the_axis(low: float, high: float) -> None:
    chart = chart_of(curve([high, low], steps=[low, high]))
    for ticks in (chart.x_ticks, chart.y_ticks):
        assert 2 <= len(ticks) <= 8
        assert all(-1e-6 < tick.position < 1 + 1e-6 for tick in ticks)
        values = [float(tick.label.replace(",", "")) for tick in ticks]
        assert values == sorted(values)
        places = [tick.position for tick in ticks]
        assert places == sorted(places)
    for tick in chart.x_ticks:
        assert float(tick.label.replace(",", "")) == pytest.approx(low + tick.position * (high - low), abs=1e-9 * high)
