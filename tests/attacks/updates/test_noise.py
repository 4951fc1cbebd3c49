"""The noise in an update: its scale from singular values, or from the defense."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from lit_recon.attacks.updates.noise import (
    _median,
    edge,
    estimated_std,
    hidden_shares,
    noise_of,
    robust_rows,
    robust_rows_near,
    singular_values,
)
from lit_recon.clients import Client, LocalSteps
from lit_recon.defenses import DPSGD, Defense, GaussianNoise, GradientClipping, LaplaceNoise, OptimalGradientNoise
from lit_recon.errors import ThreatModelError
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Knowledge, Noise, Normalization, Observation


def noise(rows: int, columns: int, kind: str, seed: int = 0) -> torch.Tensor:
    """Independent noise of standard deviation 1; Student's t with 2 degrees of freedom has scale 1."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(rows, columns, generator=generator)
    if kind == "student":
        normal = torch.randn(rows, columns, generator=generator)
        return normal / (-torch.rand(rows, columns, generator=generator).clamp_min(1e-12).log()).sqrt()
    uniform = torch.rand(rows, columns, generator=generator) - 0.5
    return -uniform.sign() * (1 - 2 * uniform.abs()).clamp_min(1e-7).log() / 2**0.5


def low_rank(rows: int, columns: int, rank: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("std", [1e-4, 0.01, 1.0, 100.0])
def test_scale_is_estimated_behind_any_signal(kind: str, std: float) -> None:
    # columns in the shape of a kernel; the second tensor is all signal, the others cannot tell
    update = {
        "conv": (low_rank(64, 288, 6) + std * noise(64, 288, kind)).view(64, 32, 3, 3),
        "full": low_rank(32, 200, 32) + std * noise(32, 200, kind, 2),
        "small": torch.randn(8, 100),
        "bias": torch.randn(64),
    }
    # from 1.7 % too low to 2.6 % too high behind a rank of 6 of 64
    assert estimated_std(update) == pytest.approx(std, rel=0.1)


def test_without_a_matrix_there_is_no_estimate() -> None:
    assert estimated_std({"bias": torch.randn(64), "small": torch.randn(8, 100)}) is None
    assert estimated_std({"zero": torch.zeros(32, 32)}) is None


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (64, 128), (200, 40), (32, 900)])
def test_singular_values_of_noise(rows: int, columns: int) -> None:
    found = [singular_values(noise(rows, columns, "gaussian", seed).double()) for seed in range(10)]
    torch.testing.assert_close(found[0].flip(0), torch.linalg.svdvals(noise(rows, columns, "gaussian", 0).double()))
    middle = sum(float(values.median()) for values in found) / 10
    # 0.6 to 2.0 % below the law's median at these sizes, and 1.3 to 3.7 % below its edge
    assert middle == pytest.approx((_median(rows, columns) * max(rows, columns)) ** 0.5, rel=0.03)
    assert sum(float(values[-1]) for values in found) / 10 == pytest.approx(edge(rows, columns), rel=0.06)


@pytest.mark.parametrize(("rows", "columns"), [(64, 576), (200, 100)])
def test_shares_that_noise_hides_are_those_measured(rows: int, columns: int) -> None:
    left, right = (torch.linalg.qr(noise(n, 4, "gaussian", n).double())[0] for n in (rows, columns))
    strengths = torch.tensor([0.5, 2.0, 4.0, 20.0], dtype=torch.float64) * (rows * columns) ** 0.25
    measured, expected = torch.zeros(4), torch.zeros(4)
    for seed in range(40):
        noisy = left @ (strengths[:, None] * right.T) + noise(rows, columns, "gaussian", seed).double()
        _, values, vectors = torch.linalg.svd(noisy, full_matrices=False)
        expected += hidden_shares(values[:4], rows, columns, 1.0).float() / 40
        measured += (1 - (vectors[:4] * right.T.flip(0)).sum(1).square()).float() / 40
    torch.testing.assert_close(expected[:3], measured[:3], rtol=0.15, atol=0)  # up to 0.075 measured
    # the weakest signal is below the edge: its share is 1, up to chance
    assert expected[3] > 0.9
    assert measured[3] > 0.9


def share_hidden(matrix: torch.Tensor, truth: torch.Tensor, rank: int) -> float:
    """Share of the row space of `truth` that is outside of the leading directions of a noisy matrix."""
    found, true = (torch.linalg.svd(one.double(), full_matrices=False)[2][:rank] for one in (matrix, truth))
    return 1 - float((found @ true.T).square().sum()) / rank


@pytest.mark.parametrize("size", [0.3, 1.0, 10.0])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(64, 432, 8), (128, 576, 16), (576, 64, 8)])
def test_outliers_hide_little_once_they_are_pulled_in(rows: int, columns: int, rank: int, size: float) -> None:
    truth = size * low_rank(rows, columns, rank)
    noisy = truth + noise(rows, columns, "student", 3)
    robust = robust_rows(noisy, rank)
    assert robust.gain > 0.3  # 0.4 to 0.7 measured
    # with all the information that there is, normal noise of variance 5/3 in its place; behind it the fit itself errs
    equal = share_hidden(truth + (5 / 3) ** 0.5 * noise(rows, columns, "gaussian", 4), truth, rank)
    left = share_hidden(robust.values, truth, rank)
    assert left < 0.6 * share_hidden(noisy, truth, rank)
    assert left < 2.5 * equal  # 1.2 to 1.9 measured
    # rows are in units of what is left of the noise
    assert robust.scale == pytest.approx(1.15, rel=0.2)
    basis = torch.linalg.svd(truth, full_matrices=False)[2][:rank]
    rest = robust.values - robust.values @ basis.T @ basis
    assert float(rest.square().mean().sqrt()) == pytest.approx(1.0, rel=0.2)


def test_rows_around_the_best_fit_of_known_patches_are_those_of_the_likelihood() -> None:
    rows, columns, rank = 12, 400, 6
    patches = noise(rank, columns, "gaussian", 1).double()
    hidden = noise(rows, columns, "student", 3).double()
    noisy = noise(rows, rank, "gaussian", 2).double() @ patches + hidden
    near = robust_rows(noisy.float(), rank)
    for _ in range(5):
        near = robust_rows_near(noisy.float(), patches.float(), near)
    found = near.values.double()
    basis = torch.linalg.qr(patches.T)[0]
    inside = found @ basis
    # in units of the noise
    assert float((found - inside @ basis.T).square().mean().sqrt()) == pytest.approx(1.0, rel=0.05)
    sizes = hidden.abs().median(1).values
    for own, fit, size in zip(noisy, inside, sizes.clamp_min(float(sizes.median())) * 1.5**0.5, strict=True):

        def loss(given: np.ndarray, own: Tensor = own, size: Tensor = size) -> tuple[float, np.ndarray]:
            coefficients = torch.tensor(given, requires_grad=True)
            likely = ((own - basis @ coefficients) / size).square().div(2).log1p().sum()
            likely.backward()
            return float(likely.detach()), coefficients.grad.numpy()

        best = minimize(loss, (basis.T @ own).numpy(), jac=True, method="BFGS", options={"gtol": 1e-8})
        # the unit of a row is not told; least squares is off by 1e-3 and more
        cosine = torch.nn.functional.cosine_similarity(fit, torch.from_numpy(best.x), dim=0)
        assert 1 - float(cosine) < 2e-5


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_normal_tails_are_told_from_heavy_ones(kind: str) -> None:
    truth = low_rank(128, 576, 16)
    noisy = truth + noise(128, 576, kind, 5)
    robust = robust_rows(noisy, 16)
    assert (robust.gain > 0.02) == (kind == "laplace")  # -0.05 and 0.06 measured
    assert robust.gain < 0.2
    if kind == "laplace":
        assert share_hidden(robust.values, truth, 16) < 0.9 * share_hidden(noisy, truth, 16)


def test_rows_that_a_fit_follows_do_not_count_more() -> None:
    # rows far larger than the others, each of which a direction of the fit could follow
    truth = low_rank(64, 432, 8)
    truth[:4] *= 300
    noisy = truth + noise(64, 432, "student", 6)
    robust = robust_rows(noisy, 8)
    assert share_hidden(robust.values[4:], truth[4:], 8) < 0.1
    assert bool(torch.isfinite(robust.values).all())


def test_zeros_have_no_noise() -> None:
    truth = low_rank(64, 432, 8)
    noisy = truth + 0.3 * noise(64, 432, "student", 7)
    noisy[:, 100:120] = 0.0
    noisy[5] = 0.0
    robust = robust_rows(noisy, 8)
    assert robust.values.shape == (63, 432)
    assert bool((robust.values[:, 100:120] == 0).all())
    assert robust.scale == pytest.approx(0.3 * 1.15, rel=0.2)


@pytest.mark.parametrize("matrix", [torch.zeros(20, 30), torch.eye(20, 30)[:1], torch.ones(20, 30)])
def test_rows_without_noise_stay_finite(matrix: torch.Tensor) -> None:
    robust = robust_rows(matrix, 8)
    assert bool(torch.isfinite(robust.values).all())
    assert robust.scale < 1e-3
    assert robust.values.shape[1] == 30


def observed(defense: Defense | None, known: bool) -> Observation:
    torch.manual_seed(0)
    model = Backbone(ConvNet((3, 8, 8), widths=[32, 32]), 5, Normalization((0.5,) * 3, (0.25,) * 3))
    client = Client(model, "eval", defense=defense)
    images = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return client.observe(images, torch.tensor([1]), Knowledge(defense=known), torch.Generator().manual_seed(4))


def test_noise_is_that_of_the_known_defense() -> None:
    assert noise_of(observed(GaussianNoise(0.1), known=True)) == (Noise("gaussian", 0.1), True)
    assert noise_of(observed(DPSGD(2.0, 0.5), known=True)) == (Noise("gaussian", 1.0), True)
    assert noise_of(observed(LaplaceNoise(0.1), known=True), "gaussian") == (Noise("laplace", 0.1), True)
    with pytest.raises(ThreatModelError, match="no known density: .*the variances depend on the images"):
        noise_of(observed(OptimalGradientNoise(0.1), known=True))
    found, known = noise_of(observed(OptimalGradientNoise(1.0), known=True), exact=False)
    assert not known
    assert found is not None


def test_a_defense_that_is_known_to_add_no_noise_adds_none() -> None:
    clipped = observed(GradientClipping(0.1), known=True)
    assert noise_of(clipped, exact=False) == (None, True)
    # a density needs a scale, and weights have rounding
    step = replace(clipped, operator=LocalSteps(clipped.model, 1, 0.1))
    for found, known in (noise_of(clipped), noise_of(step, exact=False)):
        assert found is not None
        assert not known


def test_noise_of_an_unknown_defense_is_estimated() -> None:
    # larger than the gradient
    found, known = noise_of(observed(LaplaceNoise(1.0), known=False), "laplace")
    assert not known
    assert found is not None
    assert found.family == "laplace"
    assert found.scale == pytest.approx(1.0, rel=0.1)  # 0.967 measured
