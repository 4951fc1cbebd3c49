"""Metrics are found by name, by import path, as classes and as objects; what is none is refused by name."""

from __future__ import annotations

import pytest
from torch import Tensor

from lit_recon.errors import ConfigError
from lit_recon.measures import MEASURES
from lit_recon.metrics import DEFAULT_METRICS, PSNR, Measure, Metric, PerceptualDistance, metrics_of, register


def keys(*chosen: str | Metric | type[Metric]) -> list[str]:
    return [metric.measure.key for metric in metrics_of(chosen)]


def metric(key: str) -> type[Metric]:
    class Own(Metric):
        measure = Measure(key, "Own")

        def __call__(self, found: Tensor, truth: Tensor) -> Tensor:
            return truth.mean(dim=(1, 2, 3))

    return Own


def test_metrics_come_in_the_order_asked_for_and_rmse_always() -> None:
    assert keys() == ["rmse"]
    assert keys("ssim", "rmse") == ["ssim", "rmse"]
    assert keys("psnr", "lit_recon.metrics.SSIM") == ["rmse", "psnr", "ssim"]
    assert keys(PSNR, PerceptualDistance("none")) == ["rmse", "psnr", "lpips"]


def test_the_names_of_all_metrics_lead_to_their_own_measures() -> None:
    assert set(DEFAULT_METRICS) | {"kl"} == set(MEASURES)
    assert [one.measure for one in metrics_of(list(MEASURES))] == list(MEASURES.values())


def test_a_configured_metric_stands_for_its_name() -> None:
    mine = PerceptualDistance("none")
    assert metrics_of(["rmse", "lpips"], [mine])[1] is mine


def test_a_registered_metric_is_found_by_name() -> None:
    own = register(metric("found_by_name"))
    assert isinstance(metrics_of(["found_by_name"])[1], own)
    assert register(own) is own


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        (["psnr", PSNR], "'psnr' is there 2 times"),
        (["blur"], r"there is no metric blur \(it is not registered\): name one of mse, "),
        (["nowhere.Blur"], "there is no metric nowhere.Blur .*No module named 'nowhere'"),
        (["lit_recon.metrics.Blur"], "has no attribute 'Blur'"),
        (["lit_recon.errors.ConfigError"], "must be a subclass of lit_recon.metrics.Metric"),
        ([metric("label")], "the key of a metric .* got 'label'"),
        ([metric("rmse_std")], "got 'rmse_std'"),
        ([metric("two words")], "got 'two words'"),
        ([Metric], "cannot be built without arguments .*abstract"),
    ],
)
def test_what_is_no_metric_is_refused(chosen: list[str | type[Metric]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        metrics_of(chosen)


def test_a_key_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="RMSE is registered as 'rmse' already"):
        register(metric("rmse"))
