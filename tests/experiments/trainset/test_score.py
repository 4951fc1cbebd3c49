"""Scores of reconstructed training sets, against values computed by hand."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from lit_recon.attacks.trainset.base import ReleasedModel
from lit_recon.experiments.trainset import score
from lit_recon.experiments.trainset.score import PairScores
from lit_recon.metrics import ssim
from lit_recon.models.centered import CenteredMLP
from lit_recon.records import Reconstruction


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_correlation_is_pearsons_of_deviations_from_the_mean_image() -> None:
    images, others, mean = uniform(2, 3, 4, 4), uniform(3, 3, 4, 4, seed=1), uniform(3, 4, 4, seed=2)
    found = score.correlations(images, others, mean)
    for i in range(2):
        for j in range(3):
            own = [
                np.corrcoef((images[i, c] - mean[c]).flatten(), (others[j, c] - mean[c]).flatten())[0, 1]
                for c in range(3)
            ]
            assert float(found[i, j]) == pytest.approx(np.mean(own), abs=1e-12)


def test_correlation_ignores_brightness_and_contrast_of_the_deviation_and_is_zero_for_the_mean_image() -> None:
    images, mean = uniform(2, 1, 5, 5), torch.full((1, 5, 5), 0.5, dtype=torch.float64)
    assert score.correlations(0.3 * images + 0.2, images, mean).diagonal().tolist() == pytest.approx([1, 1])
    assert score.correlations(mean[None], images, mean).tolist() == [[0, 0]]


def test_every_training_image_gets_its_nearest_candidate() -> None:
    truth, mean = uniform(4, 1, 8, 8), torch.full((1, 8, 8), 0.5, dtype=torch.float64)
    pool = torch.cat([uniform(5, 1, 8, 8, seed=3), truth[[2, 0, 3, 1]]])
    found = score.score_pool(truth, pool, mean)
    assert found.nearest.tolist() == [6, 8, 5, 7]
    assert found.pool == 9
    assert found.scores.ncc == pytest.approx([1] * 4)
    assert found.scores.rmse == pytest.approx([0] * 4, abs=1e-12)
    assert found.scores.summary()["n_good"] == 4


def test_min_max_scaling_flatters() -> None:
    truth, mean = score.stretched(uniform(1, 1, 12, 12)), torch.full((1, 12, 12), 0.5, dtype=torch.float64)
    faint = 0.1 * truth + 0.45  # the right image with a tenth of its contrast
    found = PairScores.of(faint, truth, mean)
    assert found.ssim_stretched == pytest.approx([1])
    assert found.ncc == pytest.approx([1])
    assert found.ssim == pytest.approx(ssim(faint, truth).tolist())
    assert found.ssim[0] < 0.5  # 0.24
    assert found.mse == pytest.approx([float((faint - truth).square().mean())])
    assert found.rmse[0] ** 2 == pytest.approx(found.mse[0])


def test_summary_counts_good_images_and_averages_the_best_ten() -> None:
    values = [0.05 * number for number in range(12)]
    found = PairScores(values, [1 - value for value in values], values, values, values).summary()
    assert found["n"] == 12
    assert found["n_good"] == 3  # 0.45, 0.5, 0.55
    assert found["n_good_stretched"] == 12
    assert found["best_ssim"] == pytest.approx(sum(values[2:]) / 10)
    assert found["ssim"] == pytest.approx(sum(values) / 12)


def test_baselines_are_the_mean_image_and_the_nearest_public_one() -> None:
    public = (255 * uniform(9, 1, 8, 8)).to(torch.uint8)
    mean = (public.double() / 255).mean(dim=0)
    truth = public[[4, 7]].double() / 255
    found = score.baselines(truth, public, mean, 5)
    assert found["nearest public image"].rmse == pytest.approx([0, 0], abs=1e-7)
    assert found["nearest public image in MSE"].rmse == pytest.approx([0, 0], abs=1e-7)
    assert found["mean image"].rmse == pytest.approx((truth - mean).square().mean(dim=(1, 2, 3)).sqrt().tolist())
    assert found["mean image"].ncc == [0, 0]
    assert sum(found[score.SAME_POOL].ncc) < sum(found["nearest public image"].ncc)
    assert score.baselines(truth, public, mean, 9)[score.SAME_POOL].ncc == pytest.approx([1, 1])


def test_candidates_near_members_are_told_from_candidates_near_others() -> None:
    members, others = uniform(6, 1, 8, 8), uniform(6, 1, 8, 8, seed=1)
    mean = torch.full((1, 8, 8), 0.5, dtype=torch.float64)
    pool = torch.cat([members[:3], others[:1]]) * 0.9 + 0.05
    found = score.neighbours(pool, members, others, mean)
    assert found["closer_ncc"]["value"] == found["closer_rmse"]["value"] == 0.75
    assert found["closer_ncc"]["n"] == 4
    assert found["closer_ncc"]["low"] < 0.75 < found["closer_ncc"]["high"]
    assert found["members"]["ncc"] > found["others"]["ncc"]


def test_closest_images_come_with_the_restart_of_their_candidate() -> None:
    images, mean = uniform(3, 1, 8, 8), torch.full((1, 8, 8), 0.5, dtype=torch.float64)
    pools = [uniform(4, 1, 8, 8, seed=1), torch.cat([uniform(3, 1, 8, 8, seed=2), images[1:2]])]
    assert score.closest(images, pools, mean, 1) == [(1, 1)]
    assert float(score.distances(images[1:2], pools[1])) == pytest.approx(0, abs=1e-7)
    far = (pools[0] - images[1]).square().mean(dim=(1, 2, 3)).sqrt().min()
    assert float(score.distances(images[1:2], pools[0])) == pytest.approx(float(far))


def test_distances_below_the_rounding_of_products_are_told() -> None:
    """Nearly exact candidates among many: squared norms less twice the products would leave 0 or 2e-4."""
    images = torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    errors = torch.logspace(-6, -4, 40).view(-1, 1, 1, 1)
    found = score.distances(images, (images + errors).flip(0))
    torch.testing.assert_close(found, errors.flatten(), rtol=0.05, atol=0)  # rounding of pixels: 3 % of 1e-6


def test_stationarity_has_the_best_multipliers() -> None:
    truth = uniform(4, 1, 4, 4)
    labels, signs = torch.tensor([0, 0, 1, 1]), torch.tensor([-1, -1, 1, 1])
    # of a linear network the gradients do not depend on the weights
    linear = CenteredMLP((1, 4, 4), hidden=[]).double()
    signed = signs[:, None] * torch.cat([truth.flatten(1), torch.ones(4, 1)], dim=1)
    combined = signed.T @ torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    exact = {"layers.1.weight": combined[None, :16], "layers.1.bias": combined[16:]}
    mean = torch.zeros(1, 4, 4, dtype=torch.float64)
    seen = ReleasedModel(linear, exact, "binary", (1, 4, 4), 2, mean, 4)
    assert score.stationarity(seen, truth, labels) == pytest.approx(0, abs=1e-12)
    opposite = ReleasedModel(linear, {name: -w for name, w in exact.items()}, "binary", (1, 4, 4), 2, mean, 4)
    assert score.stationarity(opposite, truth, labels) > 0.5  # 1: multipliers cannot be negative
    free = ReleasedModel(linear, opposite.weights, "regression", (1, 4, 4), 2, mean, 4)
    assert score.stationarity(free, truth, labels) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("task", ["regression", "binary"])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_candidates_that_are_alike_explain_no_more_than_one(task: Literal["regression", "binary"], m: int) -> None:
    image, linear = uniform(1, 1, 4, 4), CenteredMLP((1, 4, 4), hidden=[]).double()
    weight, gradient = uniform(17, 1, 1, 1, seed=3).flatten(), torch.cat([image.flatten(), torch.ones(1)])
    weights = {"layers.1.weight": weight[None, :16], "layers.1.bias": weight[16:]}
    mean = torch.zeros(1, 4, 4, dtype=torch.float64)
    seen = ReleasedModel(linear, weights, task, (1, 4, 4), 2, mean, 1)
    left = weight - gradient * (gradient @ weight) / gradient.square().sum()
    found = score.stationarity(seen, image.repeat(m, 1, 1, 1), torch.ones(m, dtype=torch.int64))
    assert found == pytest.approx(float(left.norm() / weight.norm()), rel=1e-9)


def test_selections_show_what_recurs() -> None:
    truth, mean = uniform(12, 1, 8, 8), torch.full((1, 8, 8), 0.5, dtype=torch.float64)
    labels = torch.zeros(24, dtype=torch.int64)
    runs = [
        Reconstruction(torch.cat([uniform(12, 1, 8, 8, seed=seed), truth]), labels, loss)
        for seed, loss in ((1, 0.2), (2, 0.1))
    ]
    found = score.selections(runs, truth, mean)
    assert found["agreement"]["ssim"] == found["clusters"]["ssim"] == found["truth"]["ssim"] == pytest.approx(1)
    assert found["residual"]["ssim"] < 0.5  # the first ten of a run are noise
    assert score.selections(runs[:1], truth, mean) == {}
