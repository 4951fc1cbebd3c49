"""The shadow benchmark: what is compared with what, at tiny sizes."""

from __future__ import annotations

import pytest

from benchmarks import shadows
from benchmarks.shadows import agreement, arithmetic, convolutions, peak_flops, peak_mib, random_images, speed, training
from lit_recon.data import ImageSet
from lit_recon.models.released import ReleasedMLP


def digits(n: int) -> ImageSet:
    """Random images whose second half is black but in few of them."""
    images = random_images((1, 28, 28), n)
    images.images[:, :, 14:] = 0
    images.images[0, :, 14:20] = 255
    return images


def test_every_way_is_compared_with_the_plain_loop() -> None:
    row = speed(random_images((1, 28, 28), 1_020), 20, steps=1, rounds=2, peak=1e7)
    assert (row["images"], row["known_images"], row["steps"]) == ("random", 20, 1)
    assert set(row["ratio"]) == {"vmap", "batched_mlp"}
    assert row["ratio"]["batched_mlp"]["n"] == 2
    assert set(row["models"]) == {"loop", "vmap", "batched_mlp"}
    assert all(share > 0 for share in row["share_of_peak"].values())
    assert set(convolutions(random_images((3, 32, 32), 1_004), 4, rounds=1)["ratio"]) == {"vmap"}


def test_arithmetic_is_counted_by_hand() -> None:
    def counted(images: ImageSet, n: int) -> dict[str, float]:
        return arithmetic(training(ReleasedMLP(), images, n, 1)[0])

    assert counted(random_images((1, 28, 28), 1_100), 100) == {"plain": 4e3 * 784, "done_batched": 2e5}
    few = counted(digits(1_900), 900)
    # Half the pixels in all images (but for bytes of 0), and six rows of them in one.
    black = int((digits(1_900).images[:900, :, :14] == 0).sum())
    assert few == {"plain": 4e1 * 900 * 784, "done_batched": 4e1 * (900 * 14 * 28 + 6 * 28)}
    assert 0 < black < 4_000


def test_differences_agree_with_the_loop() -> None:
    row = agreement(random_images((1, 28, 28), 1_020), 20, steps=3, models=2)
    assert all(0 < float(error) < 1e-3 for error in row["error_of_difference"].values())


def test_memory_is_measured_while_a_store_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"VmRSS": 100.0, "VmHWM": 130.5}
    monkeypatch.setattr(shadows, "status_mib", measured.__getitem__)
    assert peak_mib(random_images((1, 28, 28), 20), 5, 3) == 30.5


def test_the_peak_is_that_of_a_real_processor() -> None:
    assert 1e8 < peak_flops(3) < 1e14
