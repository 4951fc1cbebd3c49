"""Selection among runs that hold some images in common and others of their own."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_recon.attacks.trainset.selection import by_agreement, by_clusters, by_residual, distinct, similarities
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.records import Reconstruction

SHAPE = (2, 5, 5)
MEAN = torch.linspace(0, 1, 50, dtype=torch.float64).view(SHAPE)


def drawn(n: int, seed: int) -> Tensor:
    """Images around the mean image, in different directions."""
    return torch.randn(n, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 0.1


COMMON = drawn(3, 0)


def runs(n: int = 4) -> list[Reconstruction]:
    """Each run holds two common images with a little noise, every other run a third, and two images of its own."""
    found = []
    for run in range(n):
        images = torch.cat([COMMON[: 2 + run % 2] + 0.2 * drawn(2 + run % 2, 10 + run), drawn(2, 20 + run)])
        labels = torch.tensor([0, 1, 1, 0, 1] if run % 2 else [0, 1, 0, 1])
        found.append(Reconstruction(MEAN + images, labels, loss=1.0 / (run + 1)))
    return found


def recovered(images: Tensor) -> list[int]:
    """The common image that each is, -1 for none."""
    alike = similarities(images - MEAN, COMMON)
    return [int(row.argmax()) if float(row.max()) > 0.9 else -1 for row in alike]


def test_similarity_against_correlation_coefficients() -> None:
    images = drawn(2, 5)
    images[:, 1] -= images[:, 1].mean() - images[:, 0].mean()  # of one channel: the same as numpy's correlation
    one, other = images[:1, :1], images[1:, :1]
    wanted = np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1]
    assert float(similarities(one, other)) == pytest.approx(wanted, rel=1e-12)
    shifted = 3 * images + torch.tensor([0.5, -0.2], dtype=torch.float64).view(2, 1, 1)
    torch.testing.assert_close(similarities(images, shifted).diagonal(), torch.ones(2, dtype=torch.float64))
    assert float(similarities(images[:1], -images[:1])) == pytest.approx(-1)
    assert float(similarities(torch.ones(1, *SHAPE), torch.rand(1, *SHAPE))) == 0


def test_the_run_with_the_smallest_loss_comes_first() -> None:
    found = runs()
    ranked = by_residual(found)
    assert ranked.runs.tolist() == [3] * 5 + [2] * 4 + [1] * 5 + [0] * 4
    torch.testing.assert_close(ranked.images[:5], found[3].images)
    torch.testing.assert_close(ranked.labels[:5], found[3].labels)
    assert ranked.scores[0] == pytest.approx(-0.25)


def test_candidates_that_other_runs_find_too_come_first() -> None:
    ranked = by_agreement(runs(), MEAN)
    assert sorted(recovered(ranked.images[:8])) == [0] * 4 + [1] * 4  # in all four runs
    assert recovered(ranked.images[8:10]) == [2, 2]  # in two of them
    assert set(recovered(ranked.images[10:])) == {-1}
    assert bool((ranked.scores.diff() <= 0).all())
    first, second = (found.images - MEAN for found in runs(2))
    scores = by_agreement(runs(2), MEAN).scores
    assert float(scores[0]) == pytest.approx(float(similarities(first[:2], second[:2]).diagonal().max()))


def test_agreement_is_among_equal_labels() -> None:
    found = runs(2)
    found[1].labels[0] = 1
    ranked = by_agreement(found, MEAN)
    assert recovered(ranked.images[:2]) == [1, 1]
    assert float(ranked.scores[2]) < 0.8


@pytest.mark.parametrize("representative", ["mean", "medoid"])
def test_one_candidate_for_every_cluster(representative: Literal["mean", "medoid"]) -> None:
    found = runs()
    ranked = by_clusters(found, MEAN, representative=representative)
    assert ranked.scores.tolist() == [4.0, 4.0, 2.0]
    assert sorted(recovered(ranked.images[:2])) == [0, 1]
    assert recovered(ranked.images[2:]) == [2]
    assert ranked.labels.tolist() == [recovered(image[None])[0] > 0 for image in ranked.images]
    first = recovered(ranked.images[:1])[0]
    if representative == "mean":
        torch.testing.assert_close(ranked.images[0], torch.stack([run.images[first] for run in found]).mean(dim=0))
    else:
        assert torch.equal(ranked.images[0], found[int(ranked.runs[0])].images[first])


def test_clusters_of_few_runs_are_left_out() -> None:
    assert by_clusters(runs(), MEAN, min_runs=3).scores.tolist() == [4.0, 4.0]
    assert len(by_clusters(runs(), MEAN, min_runs=1)) == 3 + 8
    assert len(by_clusters(runs(1), MEAN, min_runs=1)) == 4
    everywhere = [Reconstruction(MEAN + drawn(1, seed), torch.zeros(1, dtype=torch.int64), 0.0) for seed in range(3)]
    assert len(by_clusters(everywhere, MEAN)) == 0
    assert len(by_clusters(everywhere[:1], MEAN, min_runs=1)) == 1


def test_one_of_every_group_of_similar_candidates_is_kept() -> None:
    ranked = distinct(by_agreement(runs(), MEAN), MEAN)
    assert sorted(recovered(ranked.images[:3])) == [0, 1, 2]
    assert len(ranked) == 3 + 8
    assert bool((ranked.scores.diff() <= 0).all())


@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        (lambda: by_residual([]), ConfigError, "at least one run"),
        (lambda: by_agreement(runs(1), MEAN), ConfigError, "at least 2; got 1"),
        (lambda: by_clusters(runs(2), MEAN, similarity=1.0), ConfigError, "similarity must be"),
        (lambda: by_clusters(runs(2), MEAN, min_runs=3), ConfigError, "min_runs 1 to 2"),
        (
            lambda: by_residual([*runs(1), Reconstruction(torch.zeros(1, 1, 2, 2), torch.zeros(1).long(), 0.0)]),
            ShapeError,
            "one shape",
        ),
    ],
)
def test_selections_that_cannot_be_made(select: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select()
