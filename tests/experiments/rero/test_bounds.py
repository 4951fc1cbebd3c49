"""Bounds on reconstruction by budget: three ways to the tight one, their order, and budgets of any size."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lit_recon.errors import ConfigError
from lit_recon.experiments.rero.bounds import bounds, equivalence_row, full_batch, priors, sampled_rows
from lit_recon.experiments.rero.settings import BudgetSettings, PriorSettings, SampledSettings

BUDGET = BudgetSettings()
KAPPAS = [0.5, 0.1, 1e-3, 1e-10, 1e-30]
EPSILONS = [0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0]


def gamma(epsilon: float, kappa: float, steps: int = 100) -> float:
    return bounds(full_batch(BUDGET, epsilon, steps), epsilon, BUDGET.delta, math.log(kappa)).tight


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [
        (1.0, [0.1554, 2.385e-3, 5.53e-10, 2.13e-29]),
        (10.0, [0.7639, 0.1379, 6.48e-6, 1.49e-21]),
        (100.0, [1.0, 1.0, 0.99999, 0.1838]),
    ],
)
def test_the_tight_bound_has_the_values_of_the_closed_form(epsilon: float, expected: list[float]) -> None:
    # Reference values to the digits that they were given with.
    found = [gamma(epsilon, kappa) for kappa in (0.1, 1e-3, 1e-10, 1e-30)]
    assert found == pytest.approx(expected, rel=2e-3)


def test_the_tight_bound_rises_with_epsilon_and_kappa() -> None:
    table = np.array([[gamma(epsilon, kappa) for kappa in sorted(KAPPAS)] for epsilon in EPSILONS])
    assert (np.diff(table, axis=0) >= 0).all()
    assert (np.diff(table, axis=1) >= 0).all()
    assert (table >= np.array(sorted(KAPPAS))).all()
    assert (np.diff(table[:3], axis=0) > 0).all()


@pytest.mark.parametrize("epsilon", [1_000.0, 10_000.0])
def test_huge_budgets_answer(epsilon: float) -> None:
    training = full_batch(BUDGET, epsilon, 100)
    assert training.epsilon(BUDGET.delta) == pytest.approx(epsilon, rel=1e-9)
    assert gamma(epsilon, 1e-10) == 1.0
    assert 0 < gamma(epsilon, 1e-300) <= 1
    assert equivalence_row(training, epsilon) is None


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_other_bounds_are_looser_in_the_right_order(epsilon: float, kappa: float) -> None:
    training = full_batch(BUDGET, epsilon, 100)
    found = bounds(training, epsilon, BUDGET.delta, math.log(kappa))
    assert found.tight <= found.corollary_4 * (1 + 1e-9)
    assert found.tight <= found.approximate * (1 + 1e-9)
    # Corollary 4 is theorem 2 at the best order; a grid of orders comes near it.
    assert found.corollary_4 * (1 - 1e-9) <= found.theorem_2 <= found.corollary_4 * 1.02 + 1e-300


def test_replacing_a_record_asks_for_more_noise_and_so_bounds_better() -> None:
    replace = BudgetSettings(neighbors="replace_one")
    training = full_batch(replace, 10.0, 100)
    assert training.noise_multiplier == pytest.approx(2 * full_batch(BUDGET, 10.0, 100).noise_multiplier)
    assert bounds(training, 10.0, 1e-5, math.log(0.1)).tight < gamma(10.0, 0.1)


def test_three_ways_agree_on_full_batches() -> None:
    settings = SampledSettings(rate=1.0, epsilons=[1.0, 10.0], kappas=[0.1, 1e-2], simulations=20_000)
    rows = sampled_rows(settings, BUDGET, 20, seed=1)
    assert len(rows) == 4
    for row in rows:
        closed, profile, simulated, error = (row[key] for key in ("closed", "profile", "simulated", "standard_error"))
        assert closed is not None
        assert profile is not None
        assert simulated is not None
        assert error is not None
        assert closed <= profile <= closed * (1 + 1e-5)
        assert abs(simulated - closed) < 4 * error


def test_sampled_batches_have_no_closed_form() -> None:
    settings = SampledSettings(rate=0.2, epsilons=[5.0], kappas=[0.1, 1e-9], simulations=5_000)
    full, small, sampled, tiny = sampled_rows(settings, BUDGET, 10, seed=0)
    assert (full["rate"], sampled["rate"], sampled["closed"]) == (1.0, 0.2, None)
    assert sampled["noise_multiplier"] is not None
    assert full["noise_multiplier"] is not None
    assert sampled["noise_multiplier"] < full["noise_multiplier"]
    assert sampled["simulated"] is not None
    assert sampled["standard_error"] is not None
    assert sampled["profile"] is not None
    assert abs(sampled["simulated"] - sampled["profile"]) < 4 * sampled["standard_error"]
    assert small["closed"] is not None
    assert tiny["profile"] is not None
    assert tiny["profile"] < 1e-5
    assert (tiny["simulated"], tiny["standard_error"]) == (None, None)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 5.0])
def test_theorem_5_leads_back_to_delta(epsilon: float) -> None:
    row = equivalence_row(full_batch(BUDGET, epsilon, 10), epsilon)
    assert row is not None
    assert row["delta_from_gamma"] == pytest.approx(row["delta"], rel=1e-9)
    # One record replaced lies twice as far as one added, for which delta is 1e-5.
    assert row["delta"] > 1e-5
    assert row["guess"] < row["gamma"] < 1


def test_priors_are_ordered_as_they_must_be() -> None:
    samples = np.random.default_rng(0).random((60, 20))
    settings = PriorSettings(thresholds=[0.02, 0.05], candidates=[10, 2], samples=60, kappas=[])
    found = priors(settings, samples)
    assert [prior.candidates for prior in found[:2]] == [2, 10]
    assert [round(prior.baseline.kappa, 12) for prior in found[:2]] == [0.5, 0.1]
    for start in (2, 7):
        sought, ceiling, ball, gaussian, chernoff = found[start : start + 5]
        assert sought.baseline.log_kappa <= ceiling.baseline.log_kappa
        assert gaussian.baseline.log_kappa <= chernoff.baseline.log_kappa
        assert ball.log10_kappa == pytest.approx(10 * math.log10(sought.threshold / samples.var(axis=0).mean()))
        assert sought.baseline.caveat
        assert not ball.baseline.caveat
    assert found[2].log10_kappa <= found[7].log10_kappa


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BudgetSettings(epsilons=[0.0]), "budget.epsilons must be above 0 and finite; got 0"),
        (lambda: BudgetSettings(epsilons=[1.0, -2.0]), "budget.epsilons must be above 0"),
        (lambda: BudgetSettings(epsilons=[math.inf]), "budget.epsilons must be above 0 and finite; got inf"),
        (lambda: BudgetSettings(epsilons=[math.nan]), "budget.epsilons must be above 0"),
        (lambda: BudgetSettings(epsilons=[1.0, 1.0]), "one or more different numbers"),
        (lambda: BudgetSettings(epsilons=[]), "one or more different numbers"),
        (lambda: BudgetSettings(delta=0.0), "budget.delta must be strictly between 0 and 1; got 0"),
        (lambda: BudgetSettings(delta=1.0), "budget.delta must be strictly between 0 and 1; got 1"),
        (lambda: BudgetSettings(bound=0.0), "budget.bound must be above 0"),
        (lambda: PriorSettings(kappas=[1.5]), "prior.kappas must be probabilities above 0 and at most 1"),
        (lambda: PriorSettings(kappas=[0.0]), "prior.kappas must be probabilities"),
        (lambda: PriorSettings(thresholds=[-0.1]), "prior.thresholds must be above 0"),
        (lambda: PriorSettings(candidates=[1]), "prior.candidates and prior.samples must be at least 2"),
        (lambda: SampledSettings(rate=0.0), "sampled.rate must be above 0"),
        (lambda: SampledSettings(kappas=[1.0]), "sampled.kappas must be strictly between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
