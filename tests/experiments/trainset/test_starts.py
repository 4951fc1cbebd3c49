"""Starts of attacks on training sets: how much of the truth is in them."""

from __future__ import annotations

import pytest
import torch

from lit_recon.errors import ConfigError
from lit_recon.experiments.trainset.starts import (
    MixtureStart,
    NoiseStart,
    OtherPartitionStart,
    PartialStart,
    StartMaterial,
    TruthStart,
)


@pytest.fixture
def material() -> StartMaterial:
    drawn = torch.Generator().manual_seed(0)
    truth, other = (torch.rand(10, 1, 8, 8, generator=drawn, dtype=torch.float64) for _ in range(2))
    return StartMaterial(truth, other, torch.full((1, 8, 8), 0.5, dtype=torch.float64), drawn)


def test_noise_and_other_images_hold_no_truth(material: StartMaterial) -> None:
    noise = NoiseStart(0.1).images(material, 0.0)
    assert float((noise - material.mean).std()) == pytest.approx(0.1, rel=0.1)  # 0.0998
    changed = StartMaterial(1 - material.truth, material.other, material.mean, torch.Generator().manual_seed(1))
    again = StartMaterial(material.truth, material.other, material.mean, torch.Generator().manual_seed(1))
    for start in (NoiseStart(), OtherPartitionStart()):
        assert start.truth_shares() == [0.0]
        assert torch.equal(start.images(changed, 0.0), start.images(again, 0.0))
        changed.generator.manual_seed(1)
        again.generator.manual_seed(1)


def test_truth_is_the_truth_and_no_view_of_it(material: StartMaterial) -> None:
    found = TruthStart().images(material, 1.0)
    assert torch.equal(found, material.truth)
    assert found.data_ptr() != material.truth.data_ptr()


@pytest.mark.parametrize("rest", ["noise", "other"])
def test_mixtures_have_their_share_of_the_truth(material: StartMaterial, rest: str) -> None:
    start = MixtureStart([0.0, 0.3, 1.0], rest, 0.2)
    assert torch.equal(start.images(material, 1.0), material.truth)
    material.generator.manual_seed(3)
    none = start.images(material, 0.0)
    material.generator.manual_seed(3)
    assert torch.allclose(start.images(material, 0.3), 0.3 * material.truth + 0.7 * none)
    assert "0.3 times a training image" in start.describe(0.3)


def test_partial_knowledge_is_that_of_whole_images(material: StartMaterial) -> None:
    found = PartialStart([0.3]).images(material, 0.3)
    equal = (found == material.truth).all(dim=(1, 2, 3))
    assert int(equal.sum()) == 3
    assert (found[~equal] - material.mean).abs().max() < 0.01


@pytest.mark.parametrize("build", [lambda: MixtureStart([]), lambda: MixtureStart([1.1]), lambda: PartialStart([1, 1])])
def test_shares_must_be_shares(build: object) -> None:
    with pytest.raises(ConfigError, match="shares of the truth must"):
        build()  # type: ignore[operator]


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="noise or other"):
        MixtureStart(rest="images")
    with pytest.raises(ConfigError, match="at least 0"):
        NoiseStart(-1)
