"""The score of an attack on released models: whom it is compared with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released.base import ReconstructedTargets, Reconstructor
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.experiments.released_attack.score import ReconnOutcome, score_targets
from lit_recon.experiments.released_attack.settings import ReconnSettings

#: Levels of grey of the parts; targets are 100 and 200, the nearest other images 110 and 190.
GREY = {"fixed": [0, 110], "shadow": [30, 255], "targets": [100, 200], "rest": [150, 160], "pretraining": [190, 240]}


def part(name: str) -> ImageSet:
    levels = torch.tensor(GREY[name], dtype=torch.uint8)
    images = levels[:, None, None, None].expand(-1, 1, 12, 12).clone()
    return ImageSet(images, torch.arange(2), ["0", "1"], name)


def squared(*differences: int) -> list[float]:
    return [(value / 255) ** 2 for value in differences]


class Constant(Reconstructor):
    """Answers one level of grey, whatever it observes."""

    def __init__(self, level: int) -> None:
        self.level = level

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        """There is nothing to learn."""

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        n = len(differences)
        images = torch.full((n, 1, 12, 12), self.level / 255)
        return ReconstructedTargets(images, torch.zeros(n, dtype=torch.int64), torch.ones(n))


def scored(split: InformedSplit, level: int = 120) -> ReconnOutcome:
    weights = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    return score_targets(ReconnSettings(reconstructor=Constant(level)), split, weights, weights)


def split_of(*names: str) -> InformedSplit:
    return InformedSplit(**{name: part(name) for name in ("fixed", "shadow", "targets", *names)})


@pytest.mark.parametrize(
    ("others", "nearest"),
    [
        ((), squared(10, 55)),  # 110 of the fixed set and 255 of the shadow targets
        (("rest",), squared(10, 40)),  # 160 of the rest
        (("rest", "pretraining"), squared(10, 10)),  # 190 of the pre-training
    ],
)
def test_the_oracle_picks_from_all_images_but_the_targets(others: tuple[str, ...], nearest: list[float]) -> None:
    found = scored(split_of(*others))
    assert list(found.per_image["oracle_mse"]) == pytest.approx(nearest, rel=1e-5)
    assert found.metrics["oracle_mse"] == pytest.approx(sum(nearest) / 2, rel=1e-5)
    assert f"of all {4 + 2 * len(others)} other images" in found.notes[0]


def test_an_attack_succeeds_where_it_is_nearer_than_the_oracle() -> None:
    """With targets in its pool the oracle would be perfect, and no attack would ever succeed."""
    split = split_of("rest", "pretraining")
    assert [scored(split, level).metrics["success_rate"] for level in (95, 120, 195)] == [0.5, 0.0, 0.5]


def test_the_percentiles_are_those_of_the_same_pool() -> None:
    found = scored(split_of("rest", "pretraining")).metrics
    # of eight others the first is the nearest: 1 % of seven steps further is still the nearest
    assert found["oracle_mse_percentile_1"] == pytest.approx(squared(10)[0], rel=1e-5)
    # half of them: the distances from 100 and from 200 in order, at place 4
    middle = [
        sorted(squared(*(level - target for name in GREY if name != "targets" for level in GREY[name])))[4]
        for target in GREY["targets"]
    ]
    assert found["oracle_mse_percentile_50"] == pytest.approx(sum(middle) / 2, rel=1e-5)
