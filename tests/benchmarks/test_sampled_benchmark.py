"""The benchmark of shadow models from some of the fixed images measures what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.sampled_shadows import Comparison


@pytest.fixture
def images(tmp_path: Path) -> Path:
    generator, path = np.random.default_rng(0), tmp_path / "images.npz"
    pixels = {
        f"{name}_images": generator.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8) for name in ("train", "test")
    }
    labels = {f"{name}_labels": np.arange(40) % 10 for name in ("train", "test")}
    np.savez(path, **pixels, **labels)
    return path


def test_all_images_are_exact_and_few_are_faster(images: Path) -> None:
    comparison = Comparison(images, 30, 2, steps=8)
    few, whole = comparison.measure(0.1), comparison.measure(1.0)
    assert (few["images"], whole["images"]) == (3, 30)
    assert few["models"] == whole["models"] == few["error"]["n"] == 2
    assert whole["error"]["max"] < 1e-2 < few["error"]["min"]
    assert few["seconds_exact"] == whole["seconds_exact"]
    assert few["times_as_fast"] == pytest.approx(few["seconds_exact"]["median"] / few["seconds"])


def test_linear_response_is_measured_beside_them(images: Path) -> None:
    comparison = Comparison(images, 30, 2, steps=8)
    row = comparison.respond(40)
    assert row["error"]["n"] == row["models"] == 2
    assert row["error"]["max"] < 0.5
    assert row["seconds_once"] > 0
    assert row["times_as_fast"] == pytest.approx(row["seconds_exact"]["median"] / row["seconds"])
