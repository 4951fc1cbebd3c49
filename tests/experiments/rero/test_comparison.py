"""The verdict on an attack beside the bound on its chance of success."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import beta

from lit_recon.bounds.baseline_error import BaselineError
from lit_recon.experiments.rero.bounds import Bounds, PriorSpec
from lit_recon.experiments.rero.page import judged
from lit_recon.experiments.rero.score import comparison, study_metrics

PRIOR = PriorSpec("one of 10 candidates", BaselineError(math.log(0.1)), candidates=10)
N = 100


def won(successes: int) -> torch.Tensor:
    return torch.arange(N) < successes


def limit(tight: float) -> Bounds:
    return Bounds(tight, 0.9, 0.9, 0.9, 0.9)


def ends(successes: int) -> tuple[float, float]:
    """The interval of Clopper and Pearson by quantiles of the beta distribution."""
    low = beta.ppf(0.025, successes, N - successes + 1)
    return float(low), float(beta.ppf(0.975, successes + 1, N - successes))


def test_the_rate_has_an_interval() -> None:
    found = comparison(PRIOR, won(30), limit(0.3))
    assert (found["n"], found["success_rate"]) == (N, 0.3)
    assert (found["low"], found["high"]) == pytest.approx(ends(30), rel=1e-6)


@pytest.mark.parametrize(
    ("tight", "below"),
    [
        (0.9, True),
        (0.35, True),  # within the interval, above the rate
        (0.25, True),  # within the interval, below the rate: chance explains it
        (ends(30)[0] + 1e-3, True),
        (ends(30)[0] - 1e-3, False),
        (0.05, False),
    ],
)
def test_a_rate_lies_above_its_bound_only_if_the_whole_interval_does(tight: float, below: bool) -> None:
    low, high = ends(30)
    assert 0.2 < low < 0.25 < 0.3 < 0.35 < high < 0.41  # measured 0.212 and 0.400
    assert comparison(PRIOR, won(30), limit(tight))["below"] is below


def test_the_verdict_is_on_the_tight_bound() -> None:
    loose = replace(limit(0.05), theorem_2=1.0, corollary_3=1.0, corollary_4=1.0, approximate=1.0)
    assert comparison(PRIOR, won(30), loose)["below"] is False
    strict = Bounds(0.5, 0.0, 0.0, 0.0, 0.0)
    assert comparison(PRIOR, won(30), strict)["below"] is True


def test_estimates_and_trainings_without_a_bound_have_no_verdict() -> None:
    assert comparison(PRIOR._replace(is_certified=False), won(30), limit(0.05))["below"] is None
    assert comparison(PRIOR, won(30), None)["below"] is None
    unmeasured = comparison(PRIOR, None, limit(0.05))
    assert (unmeasured["below"], unmeasured["success_rate"]) == (None, None)


@pytest.mark.parametrize(
    ("tights", "words"),
    [
        ((0.9, 0.8, 1.0), "beyond chance, in 2 comparisons (in 1 more the bound is 1, which allows any rate)."),
        ((0.9, None), "beyond chance, in 1 comparison."),
        ((0.05, 0.9, 1.0), "1 of 2 success rates lie above their bound: see the table (in 1 more the bound is 1, "),
        ((1.0, 1.0), "No success rate was compared with a bound below 1 (in 2 more the bound is 1, "),
        ((), "No success rate was compared with a bound below 1."),
    ],
)
def test_the_page_counts_only_bounds_that_an_attack_could_exceed(tights: tuple[float | None, ...], words: str) -> None:
    rows = [comparison(PRIOR, won(30), None if tight is None else limit(tight)) for tight in tights]
    assert words in judged({"cells": [{"comparisons": rows}]})


def test_a_study_counts_what_lies_above_its_bound() -> None:
    rows = [comparison(PRIOR, won(30), limit(tight)) for tight in (0.05, 0.25, 0.9, 1.0)]
    keys = ("mse", "mse_std", "accuracy", "accuracy_std", "baseline_mean_image_mse", "oracle_mse", "noise_multiplier")
    cell = {"name": "private", "epsilon": 1.0, "n": N, "comparisons": rows, **dict.fromkeys(keys, 0.5)}
    found = study_metrics({"cells": [cell]})
    assert [found[f"comparisons{key}"] for key in ("", "_below", "_idle")] == [3, 2, 1]
