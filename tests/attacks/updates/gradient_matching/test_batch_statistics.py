"""BatchNorm statistics alone: what they give away where nothing of the gradient does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import (
    LBFGS,
    BatchNormPrior,
    FeaturesOnly,
    GradientMatching,
    HeadCounts,
    KnownLabels,
    Pixels,
    TotalVariation,
)
from lit_recon.clients import Client, GradientOperator
from lit_recon.defenses import GaussianNoise
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Knowledge, Normalization, Observation


@pytest.fixture(scope="module")
def image(photographs: Tensor) -> Tensor:
    return photographs[1:2, :, ::4, ::4].contiguous()


@pytest.fixture(scope="module")
def seen(image: Tensor) -> Observation:
    """640 statistics of an image of 192 pixels, and a gradient that is noise."""
    torch.manual_seed(0)
    model = Backbone(ConvNet((3, 8, 8), widths=[64, 128, 128]), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    known = Knowledge(defense=True, batch_norm="batch", labels=True)
    client = Client(model, "eval", GaussianNoise(1.0))
    return client.observe(image, torch.tensor([1]), known, torch.Generator().manual_seed(0))


def attack(steps: int = 16) -> GradientMatching:
    return GradientMatching(
        FeaturesOnly(),
        [TotalVariation(0.01, until=0.7), BatchNormPrior(1.0, relative=True)],
        parametrization=Pixels(box=False, spread=0.2, smooth=0.5),
        solver=LBFGS(inner=20, history=100),
        labels=KnownLabels(),
        steps=steps,
        keep="best",
    )


@pytest.mark.slow
def test_statistics_of_a_single_image_give_it_behind_any_noise(seen: Observation, image: Tensor) -> None:
    running = replace(seen.knowledge, batch_norm="running")
    errors = [
        float((attack()(one).images - image).square().mean().sqrt())
        for one in (seen, replace(seen, knowledge=running, batch_statistics=None))
    ]
    assert errors[0] < 0.01  # 1.3e-4 and 0.28 measured
    assert errors[1] > 0.1  # running statistics are those of other images


def test_nothing_of_the_update_is_computed(seen: Observation, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> None:
        raise AssertionError("an update was computed")

    for name in ("__call__", "with_statistics"):
        monkeypatch.setattr(GradientOperator, name, refused)
    attack(1)(seen)


def test_something_has_to_be_matched(seen: Observation) -> None:
    with pytest.raises(ConfigError, match="give `features` or a BatchNormPrior"):
        GradientMatching(FeaturesOnly(), [TotalVariation(0.01)])
    unknown = replace(seen, knowledge=replace(seen.knowledge, batch_norm="none"), batch_statistics=None)
    with pytest.raises(ThreatModelError, match="BatchNormPrior needs BatchNorm statistics"):
        attack()(unknown)
    assert GradientMatching(FeaturesOnly(), [BatchNormPrior(1.0)], labels=HeadCounts()).features is None
