from __future__ import annotations

import math

import pytest

from lit_recon.reporting.wording import duration, format_printed, format_score, measure_of


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("rmse", 0.0, "0.000"),
        ("rmse", 0.123456, "0.123"),
        ("rmse", 0.000123, "0.00012"),
        ("psnr", math.inf, "∞"),
        ("psnr", -2.34, "-2.3\N{NO-BREAK SPACE}dB"),
        ("ssim", -0.05, "-0.050"),
        ("label_accuracy", 0.875, "88\N{NO-BREAK SPACE}%"),
        ("label_accuracy", 0.0, "0\N{NO-BREAK SPACE}%"),
        ("feature_error", 0.17149, "0.171"),
        ("lpips", None, "n/a"),
        ("rmse", math.nan, "nan"),
    ],
)
def test_scores_have_the_decimals_that_mean_something(key: str, value: float | None, text: str) -> None:
    assert format_score(key, value) == text


def test_units_can_be_left_to_the_heading() -> None:
    assert format_score("psnr", 25.77, unit=False) == "25.8"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("rmse", 0.2, "0.2"),
        ("psnr", 30, "30\N{NO-BREAK SPACE}dB"),
        ("label_accuracy", 0.5, "50\N{NO-BREAK SPACE}%"),
        ("lpips", "below 0.2", "below 0.2"),
    ],
)
def test_printed_figures_gain_no_digits(key: str, value: object, text: str) -> None:
    assert format_printed(key, value) == text


def test_an_unknown_metric_is_named_by_its_key() -> None:
    assert measure_of("feature_error").name == "Feature error"


@pytest.mark.parametrize(("seconds", "text"), [(59.6, "1 min 0 s"), (3600, "1 h 0 min"), (0, "0 ms"), (9.96, "10.0 s")])
def test_durations_roll_over(seconds: float, text: str) -> None:
    assert duration(seconds) == text
