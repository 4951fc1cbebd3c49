"""The benchmarks of the other attackers, on digits and random images."""

from __future__ import annotations

import pytest
import torch

from benchmarks import cocktail_party, imprint
from lit_recon.attacks.updates import UnmixingTerms
from lit_recon.data import ImageSet, measure_normalization
from lit_recon.data.sources import Digits
from lit_recon.defenses import GaussianNoise
from lit_recon.models.classifiers.imprint import find_imprint


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    _, held_out = Digits().load()
    return held_out


def test_terms_are_compared_on_the_same_images(digits: ImageSet, capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["published terms", "ours and consistency"]
    rows = list(cocktail_party.measure(measure_normalization(digits), digits, 3, 2, 30, 16, variants))
    assert [row["variant"] for row in rows] == ["mean color", *variants]
    assert all(row["rmse"]["n"] == 2 and 0 <= row["rmse"]["min"] <= row["rmse"]["max"] < 1 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_each_term_is_switched_off_once() -> None:
    ours = vars(UnmixingTerms())
    for name in ("negentropy", "volume", "smoothness", "bounds"):
        terms, rounds = cocktail_party.VARIANTS[f"ours without {name}"]
        assert vars(terms) == {**ours, name: 0}
        assert rounds == 0


def test_robbing_the_fed_is_compared_with_neighbouring_differences(digits: ImageSet) -> None:
    model = imprint.server(digits, bins=64)
    clean, noisy = (imprint.measure(model, digits, defense, 4, 1) for defense in (None, GaussianNoise(1e-6, True)))
    assert clean["hits"] == clean["alone"] == clean["largest_differences"] > 1
    assert clean["labels_alone"] == 1.0
    assert noisy["hits"] >= 0.95 * clean["hits"]
    assert noisy["smallest_differences"] < noisy["largest_differences"]


def test_images_in_one_bin_are_not_alone(digits: ImageSet) -> None:
    model = imprint.server(digits, bins=64)
    found = find_imprint(model)
    assert found is not None
    images = digits.pixels(torch.tensor([0, 1]))
    assert imprint.alone(torch.cat([images, images[:1]]), model, found[1]).tolist() == [False, True, False]
    assert imprint.hits(images[1:], images) == 1
    assert imprint.hits(images[:0], images) == 0
