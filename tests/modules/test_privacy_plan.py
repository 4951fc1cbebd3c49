"""Settings of a private training: the resulting noise and epsilon, and the settings that are refused."""

from __future__ import annotations

import math

import pytest

from lit_recon.errors import ConfigError
from lit_recon.modules.private import PrivacySettings
from lit_recon.privacy import FullBatchSGD, PoissonSGD, calibrate_noise


def test_a_plan_for_given_noise() -> None:
    plan = PrivacySettings(max_grad_norm=0.5, noise_multiplier=1.5).plan(1000, 64, epochs=3)
    assert (plan.noise_multiplier, plan.descent.bound, plan.sampling_rate) == (1.5, 0.5, 0.064)
    assert plan.steps_per_epoch == 16
    assert plan.epsilon(0) == 0.0
    assert plan.epsilon(48) == PoissonSGD(1.5, 48, sampling_rate=0.064).epsilon(1e-5)


@pytest.mark.parametrize(("target", "batch_size"), [(0.5, 1000), (1000.0, 1000), (8.0, 100)])
def test_the_noise_is_chosen_for_the_budget(target: float, batch_size: int) -> None:
    """Spent to within 1 %, never more; 1,000 images, two epochs."""
    plan = PrivacySettings(max_grad_norm=1.0, target_epsilon=target).plan(1000, batch_size, epochs=2)
    assert plan.noise_multiplier == calibrate_noise(target, 1e-5, 2 * plan.steps_per_epoch, batch_size / 1000)
    assert 0.99 * target <= plan.epsilon(2 * plan.steps_per_epoch) <= target * (1 + 1e-9)


def test_replacing_an_image_takes_more() -> None:
    added = PrivacySettings(max_grad_norm=1.0, noise_multiplier=1.0).plan(100, 100, 1)
    replaced = PrivacySettings(max_grad_norm=1.0, noise_multiplier=1.0, neighbors="replace_one").plan(100, 100, 1)
    assert replaced.epsilon(1) == FullBatchSGD(1.0, 1, "replace_one").epsilon(1e-5) > added.epsilon(1)


def test_no_noise_no_epsilon() -> None:
    plan = PrivacySettings(noise_multiplier=0.0).plan(100, 10, 1)
    assert plan.descent.bound == math.inf
    assert plan.epsilon(1) == math.inf


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs a noise_multiplier, such as 1.0, or a target_epsilon"),
        ({"noise_multiplier": 1.0}, "clipping norm is infinite, but the noise is scaled by it: give a finite norm"),
        ({"target_epsilon": 1.0}, "clipping norm is infinite"),
        ({"noise_multiplier": -1.0, "max_grad_norm": 1.0}, "noise_multiplier must be at least 0 and finite"),
        ({"noise_multiplier": math.inf, "max_grad_norm": 1.0}, "at least 0 and finite"),
        ({"noise_multiplier": 1.0, "max_grad_norm": -1.0}, "clipping norm must be at least 0"),
        ({"noise_multiplier": 1.0, "max_grad_norm": math.nan}, "clipping norm must be at least 0"),
        ({"target_epsilon": 0.0, "max_grad_norm": 1.0}, "target_epsilon must be above 0"),
        ({"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1.0}, "strictly between 0 and 1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrivacySettings(**settings)  # type: ignore[arg-type]  # no text among them


@pytest.mark.parametrize(("batch_size", "nearest"), [(0, 1), (101, 100)])
def test_a_batch_larger_than_the_data(batch_size: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=f"nearest valid batch_size is {nearest}$"):
        PrivacySettings(max_grad_norm=1.0, noise_multiplier=1.0).plan(100, batch_size, 1)


def test_a_delta_that_guarantees_nothing() -> None:
    with pytest.raises(ConfigError, match="below 0.01, such as 0.001"):
        PrivacySettings(max_grad_norm=1.0, noise_multiplier=1.0, delta=0.01).plan(100, 10, 1)


def test_an_epsilon_out_of_reach_of_the_given_noise() -> None:
    settings = PrivacySettings(max_grad_norm=1.0, noise_multiplier=1.0, target_epsilon=1.0)
    smallest = FullBatchSGD(1.0, 10).epsilon(1e-5)
    with pytest.raises(ConfigError, match=r"smallest possible epsilon is (\S+); raise the target, or leave") as caught:
        settings.plan(100, 100, 10)
    named = float(str(caught.value).split("possible epsilon is ")[1].split(";")[0])
    assert smallest <= named <= 1.01 * smallest
    assert PrivacySettings(1.0, 1.0, named).plan(100, 100, 10).noise_multiplier == 1.0


def test_an_epsilon_out_of_anybodys_reach() -> None:
    settings = PrivacySettings(max_grad_norm=1.0, target_epsilon=1e-9)
    with pytest.raises(ConfigError, match=r"cannot be reached in 500000 steps .* take fewer steps") as caught:
        settings.plan(100, 100, 500_000)
    named = float(str(caught.value).split("possible epsilon is ")[1].split(";")[0])
    assert PrivacySettings(1.0, None, named).plan(100, 100, 500_000).noise_multiplier <= 1000.0


def test_a_budget_that_no_noise_keeps() -> None:
    with pytest.raises(ConfigError, match="smallest possible epsilon is inf"):
        PrivacySettings(1.0, 0.0, 5.0).plan(100, 10, 1)
