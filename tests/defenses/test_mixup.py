"""MixUp: convex mixtures with one weight and one permutation."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from lit_recon.defenses import Batch, MixUp
from lit_recon.models import Backbone


def test_images_and_labels_are_mixed_alike(model: Backbone, batch: Batch, generator: torch.Generator) -> None:
    mixed = MixUp(1.0).transform_batch(batch, model, generator)
    one_hot = torch.nn.functional.one_hot(batch.labels, 5).double()
    # labels of this batch are distinct: they spell out the mixing matrix
    mixing = mixed.labels[:, batch.labels]
    torch.testing.assert_close(mixing.sum(1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(mixing @ one_hot, mixed.labels)
    torch.testing.assert_close(mixing @ batch.images.flatten(1), mixed.images.flatten(1))
    assert mixed.images.amin() >= 0
    assert mixed.images.amax() <= 1


def test_probabilities_can_be_mixed_again(model: Backbone, batch: Batch, generator: torch.Generator) -> None:
    twice = MixUp(1.0).transform_batch(MixUp(1.0).transform_batch(batch, model, generator), model, generator)
    torch.testing.assert_close(twice.labels.sum(1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_weights_follow_the_beta_law(model: Backbone, alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    two = Batch(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), torch.tensor([0, 1]))
    drawn = [float(MixUp(alpha).transform_batch(two, model, generator).images[1]) for _ in range(600)]
    # the partner is the image itself half of the time, which leaves it as it is
    weights = [weight for weight in drawn if not math.isclose(weight, 1.0, rel_tol=1e-6)]
    assert 200 < len(weights) < 400
    assert stats.kstest(weights, stats.beta(alpha, alpha).cdf).pvalue > 1e-3
