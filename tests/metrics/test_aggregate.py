from __future__ import annotations

import json
import math
import pickle
import statistics
from pathlib import Path

import pytest
import scipy.stats
import torch

from lit_recon.errors import ShapeError
from lit_recon.metrics.aggregate import ImageScore, error_of_mean, recorded_error, recorded_mean
from tests.processes import outputs, ranks

RANK = Path(__file__).with_name("synchronized_rank.py")


def scored(*batches: list[float], name: str = "rmse") -> ImageScore:
    score = ImageScore(name)
    for values in batches:
        score.update(torch.tensor(values, dtype=torch.float64))
    return score


def test_mean_and_sample_deviation_agree_with_the_standard_library() -> None:
    values = [0.1, 0.25, 0.15, 0.4, 0.35]
    result = scored(values[:2], [], values[2:]).compute()
    assert result["mean"].item() == pytest.approx(statistics.mean(values), rel=1e-12)
    assert result["std"].item() == pytest.approx(statistics.stdev(values), rel=1e-12)
    assert result["n"].item() == 5


def test_many_images_need_no_more_memory_and_lose_no_precision() -> None:
    values = 30 + 1e-3 * torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = ImageScore("psnr")
    for batch in values.split(1_000):
        score.update(batch)
    assert score.compute()["std"].item() == pytest.approx(values.std().item(), rel=1e-6)
    assert len(pickle.dumps(score)) < 20_000


@pytest.mark.parametrize(
    ("values", "record"),
    [
        ([0.25, 0.75], {"rmse": 0.5, "rmse_std": math.sqrt(0.125)}),
        ([0.5, 0.5, 0.5], {"rmse": 0.5, "rmse_std": 0.0}),
        ([0.25], {"rmse": 0.25, "rmse_std": None}),
        ([math.inf, 20.0], {"rmse": None, "rmse_std": None, "rmse_reason": "infinite for at least one image"}),
        ([-math.inf, 2.0], {"rmse": None, "rmse_std": None, "rmse_reason": "negative infinite for at least one image"}),
        (
            [math.inf, -math.inf],
            {
                "rmse": None,
                "rmse_std": None,
                "rmse_reason": "infinite for some images, negative infinite for others",
            },
        ),
        ([], {"rmse": None, "rmse_std": None, "rmse_reason": "no image was scored"}),
    ],
)
def test_the_record_holds_what_json_can_say(values: list[float], record: dict[str, object]) -> None:
    found = scored(values).record()
    assert found.keys() == record.keys()
    assert [found[key] for key in record] == [pytest.approx(value) for value in record.values()]
    json.dumps(record, allow_nan=False)
    mean = statistics.mean(values) if values else math.nan
    assert recorded_mean(found, "rmse") == (None if math.isnan(mean) else pytest.approx(mean))


def test_single_images_have_the_interval_of_a_plain_mean() -> None:
    values = [0.1, 0.25, 0.15, 0.4, 0.35]
    score = scored(*([value] for value in values))
    expected = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = score.compute()
    assert (found["low"].item(), found["high"].item()) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert score.record().keys() == {"rmse", "rmse_std", "rmse_low", "rmse_high"}


@pytest.mark.slow
@pytest.mark.parametrize("correlated", [0.0, 1.0])
def test_the_interval_holds_however_alike_the_images_of_a_batch_are(correlated: float) -> None:
    """Of 1,000 runs of 12 batches of 4, some 950 intervals hold the true mean; 3.3 standard errors are 0.023."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(1_000):
        shared, own = torch.randn(12, 1, generator=generator), torch.randn(12, 4, generator=generator)
        found = scored(*(correlated * shared + own).tolist()).compute()
        held += bool(found["low"] <= 0 <= found["high"])
    assert held / 1_000 == pytest.approx(0.95, abs=0.023)


@pytest.mark.parametrize(("batches", "size"), [(2, 8), (3, 4), (12, 4)])
def test_the_interval_has_one_degree_of_freedom_less_than_batches(batches: int, size: int) -> None:
    """Of equal batches, exactly the interval of the batches' means: the images' number plays no part."""
    values = torch.rand(batches, size, dtype=torch.float64, generator=torch.Generator().manual_seed(batches))
    means = values.mean(dim=1).tolist()
    expected = scipy.stats.ttest_1samp(means, 0.0).confidence_interval(0.95)
    score = scored(*values.tolist())
    found = score.compute()
    assert (found["low"].item(), found["high"].item()) == pytest.approx((expected.low, expected.high), rel=1e-9)
    error = recorded_error({**score.record(), "n": batches * size, "n_batches": batches}, "rmse")
    assert error == pytest.approx(statistics.stdev(means) / math.sqrt(batches), rel=1e-9)


def test_the_error_is_that_of_batches_however_many_images_they_have() -> None:
    images = [[0.1], [0.25], [0.4]]
    deviations = sum((value - 0.25) ** 2 for (value,) in images)
    error = error_of_mean(3, 3, deviations)
    assert error == pytest.approx(statistics.stdev([0.1, 0.25, 0.4]) / math.sqrt(3), rel=1e-9)
    copies = [4 * batch for batch in images]  # copies of an image say nothing new
    assert error_of_mean(12, 3, 16 * deviations) == pytest.approx(error, rel=1e-9)
    record = {**scored(*copies).record(), "n": 12, "n_batches": 3}
    assert recorded_error(record, "rmse") == pytest.approx(error, rel=1e-9)


def test_the_error_of_images_in_batches_of_their_own_follows_from_their_deviation() -> None:
    record = {"n": 4, "n_batches": 4, "mse": 0.25, "mse_std": 0.5}
    assert recorded_error(record, "mse") == pytest.approx(0.25, rel=1e-12)
    assert recorded_error({**record, "n": 8}, "mse") is None  # batches of two, whose interval is not known
    assert recorded_error({**record, "mse_std": None}, "mse") is None
    assert recorded_error({"n": 1, "n_batches": 1, "mse": 0.25, "mse_std": 0.5}, "mse") is None


def test_one_batch_has_neither_interval_nor_error() -> None:
    record = scored([0.1, 0.3]).record()
    assert record.keys() == {"rmse", "rmse_std"}
    assert recorded_error({**record, "n": 2, "n_batches": 1}, "rmse") is None
    assert error_of_mean(2, 1, 0.0) is None


def test_a_result_does_not_change_when_images_are_added() -> None:
    score = scored([0.5, 0.25])
    before = score.compute()
    score.update(torch.tensor([1.0]))
    assert before["n"].item() == 2
    assert score.compute()["n"].item() == 3


def test_a_reset_forgets_every_image() -> None:
    score = scored([0.5, 0.25])
    score.reset()
    score.update(torch.tensor([0.125]))
    assert score.record() == {"rmse": 0.125, "rmse_std": None}


@pytest.mark.parametrize("values", [torch.tensor(1.0), torch.ones(2, 2), torch.tensor([1.0, math.nan])])
def test_what_is_not_one_number_per_image_is_refused(values: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="score 'ssim' needs one number per image"):
        ImageScore("ssim").update(values)


@pytest.mark.processes
def test_two_processes_agree_on_the_figures_of_all_images() -> None:
    first, second = map(json.loads, outputs(ranks(RANK)))
    assert first == second
    psnr = [10.0, 20.0, 30.0, 12.5, 41.0]
    alone = scored(psnr[:4], psnr[4:], name="psnr").compute()
    low, high = alone["low"].item(), alone["high"].item()
    expected = {"mean": statistics.mean(psnr), "std": statistics.stdev(psnr), "low": low, "high": high, "n": 5.0}
    assert first["psnr"] == pytest.approx(expected, rel=1e-12)
    entries = {"psnr": expected["mean"], "psnr_std": expected["std"], "psnr_low": low, "psnr_high": high}
    assert first["psnr_record"] == pytest.approx(entries, rel=1e-12)
    one_batch = {"mean": 0.375, "std": statistics.stdev([0.25, 0.5]), "low": math.nan, "high": math.nan, "n": 2.0}
    assert first["rmse"] == pytest.approx(one_batch, nan_ok=True)
