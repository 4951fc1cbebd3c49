"""The noise in an update: its scale from singular values, or from the defense."""

from __future__ import annotations

import pytest
import torch

from lit_recon.attacks.updates.noise import _median, edge, estimated_std, hidden_shares, noise_of, singular_values
from lit_recon.clients import Client
from lit_recon.defenses import DPSGD, Defense, GaussianNoise, LaplaceNoise, OptimalGradientNoise
from lit_recon.errors import ThreatModelError
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Knowledge, Noise, Normalization, Observation


def noise(rows: int, columns: int, kind: str, seed: int = 0) -> torch.Tensor:
    """Independent noise of standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(rows, columns, generator=generator)
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


def test_noise_of_an_unknown_defense_is_estimated() -> None:
    # larger than the gradient
    found, known = noise_of(observed(LaplaceNoise(1.0), known=False), "laplace")
    assert not known
    assert found is not None
    assert found.family == "laplace"
    assert found.scale == pytest.approx(1.0, rel=0.1)  # 0.967 measured
