from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.linear_shadows import _peak, attack, speed
from lit_recon.attacks.shadow import LinearResponse

RESPONSE = LinearResponse(rank=5, hessian_images=10)


def test_both_ways_are_timed_per_model() -> None:
    row = speed(n=20, models=12, steps=2, rounds=2, response=RESPONSE)
    assert row["known_images"] == 20
    assert set(row["models_per_second"]) == set(row["seconds_per_model"]) == {"exact", "linear"}
    assert row["ratio"]["linear"]["n"] == row["seconds_once"]["n"] == 2
    assert row["response"]["rank"] == 5


def test_memory_is_above_that_of_the_images() -> None:
    # large enough to stand out from the kernel's own rounding of a process's memory, some pages
    assert _peak(2_000, 300, RESPONSE) > 0


def test_an_attack_learns_from_either(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(80, 28, 28), dtype=np.uint8)
    labels = np.arange(80) % 10
    np.savez(
        tmp_path / "images.npz",
        train_images=pixels[:60],
        train_labels=labels[:60],
        test_images=pixels[60:],
        test_labels=labels[60:],
    )
    row = attack(tmp_path / "images.npz", n=30, shadows=20, targets=5, response=LinearResponse())
    assert 0 < row["mse_linear"] < 0.2
    assert 0 < row["mse_exact"] < 0.2
    assert row["error"]["n"] == 20
