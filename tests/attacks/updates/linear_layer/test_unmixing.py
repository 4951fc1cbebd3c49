"""Source separation against sources that the tests know."""

from __future__ import annotations

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lit_recon.attacks.updates import UnmixingTerms
from lit_recon.attacks.updates.linear_layer.unmixing import (
    GAUSSIAN_LOG_COSH,
    in_scale,
    mixtures_of,
    negentropy,
    rank,
    scale_free,
    unmix,
)
from lit_recon.errors import ConfigError, ShapeError

ICA = UnmixingTerms(negentropy=100.0, decorrelation=0.1, temperature=2.0, volume=0.0, smoothness=0.0, bounds=0.0)


def draw(kind: str, n: int, d: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(n, d, generator=generator, dtype=torch.float64)
    centered = uniform - 0.5
    if kind == "uniform":
        return centered * 12**0.5
    return -centered.sign() * torch.log1p(-2 * centered.abs()) / 2**0.5


def mix(sources: Tensor, m: int, seed: int = 1) -> Tensor:
    mixing = torch.randn(m, len(sources), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return mixing @ sources


def matched_cosines(found: Tensor, true: Tensor) -> Tensor:
    unit = [torch.nn.functional.normalize(part - part.mean(dim=1, keepdim=True), dim=1) for part in (found, true)]
    cosines = (unit[0] @ unit[1].T).abs()
    rows, columns = linear_sum_assignment(-cosines.numpy())
    return cosines[rows, columns]


@pytest.mark.parametrize("kind", ["uniform", "laplace"])
@pytest.mark.parametrize("n", [4, 8])
def test_independent_sources_are_separated(kind: str, n: int) -> None:
    sources = draw(kind, n, 3000)
    mixtures = mixtures_of(mix(sources, 20), None, n)
    found = unmix(mixtures, ICA, (1, 3000), steps=400)
    assert matched_cosines(found, sources).mean() > 0.99


def test_without_negentropy_they_are_not() -> None:
    sources = draw("laplace", 4, 3000)
    terms = UnmixingTerms(negentropy=0.0, decorrelation=0.1, temperature=2.0, volume=0.0, smoothness=0.0, bounds=0.0)
    found = unmix(mixtures_of(mix(sources, 20), None, 4), terms, (1, 3000), steps=200)
    assert matched_cosines(found, sources).mean() < 0.97


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_true_sources_are_among_those_that_the_mixtures_allow(with_bias: bool) -> None:
    sources = draw("uniform", 5, 200) + 0.7
    mixing = torch.randn(9, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mixtures = mixtures_of(mixing @ sources, mixing.sum(dim=1) if with_bias else None, 5)
    assert mixtures.n_sources == 5
    centered = mixtures.basis - mixtures.basis.mean(dim=1, keepdim=True)
    identity = torch.eye(len(centered), dtype=torch.float64)
    torch.testing.assert_close(centered @ centered.T / 200, identity, rtol=0.0, atol=1e-8)
    coefficients = torch.linalg.lstsq(mixtures.basis.T, (sources - mixtures.offset).T).solution
    torch.testing.assert_close(mixtures.offset + coefficients.T @ mixtures.basis, sources, rtol=0.0, atol=1e-8)


def test_fewer_independent_mixtures_have_fewer_sources() -> None:
    sources = draw("uniform", 3, 100)
    rows = mix(sources, 9)
    assert rank(rows) == 3
    assert mixtures_of(rows, None, 7).n_sources == 3
    with pytest.raises(ShapeError, match="two independent mixtures"):
        mixtures_of(torch.ones(4, 10), torch.ones(4), 3)


def test_the_reference_of_negentropy_is_that_of_a_normal_variable() -> None:
    nodes, weights = (torch.from_numpy(part) for part in hermegauss(200))
    expected = (weights * nodes.cosh().log()).sum() / weights.sum()
    assert pytest.approx(expected.item(), abs=1e-7) == GAUSSIAN_LOG_COSH
    normal = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0))
    assert negentropy(normal).item() < 1e-5
    assert min(negentropy(draw(kind, 1, 200_000)).item() for kind in ("uniform", "laplace")) > 1e-4
    assert negentropy(torch.tensor([[1e4, -1e4]])).isfinite().all()


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        ("decorrelation", [[1, -1, 1, -1], [1, 1, -1, -1]], [[1, -1, 1, -1], [1, -1, 1, -1.5]]),
        ("total_variation", [[1, 1, -1, -1], [1, 1, -1, -1]], [[1, -1, -1, 1], [1, -1, -1, 1]]),
        ("non_negativity", [[1, 0, 2, 0], [0, -1, 0, -2]], [[1, 0, -2, 0], [0, 1, 0, -2]]),
        ("sparsity", [[1, 0, 0, -1], [0, 1, -1, 0]], [[1, -1, 1, -1], [1, 1, -1, -1]]),
        ("smoothness", [[0.1, 0, 0.1, 0], [0, 0, 0, 0.1]], [[1, 0, 1, 0], [0, 0, 0, 1]]),
    ],
)
def test_each_term_prefers_what_it_says(name: str, better: list[list[float]], worse: list[list[float]]) -> None:
    off = dict.fromkeys(("negentropy", "volume", "smoothness", "bounds"), 0.0)
    terms = UnmixingTerms(**{**off, name: 1.0})

    def penalty(rows: list[list[float]]) -> float:
        values = torch.tensor(rows).float()
        return float(scale_free(values, terms, (2, 2)) + in_scale(values, values[:, :2], False, terms, (2, 2)))

    assert penalty(better) < penalty(worse)


@pytest.mark.parametrize("settings", [{"volume": -1.0}, dict.fromkeys(vars(UnmixingTerms()), 0.0)])
def test_useless_weights_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="one of them positive"):
        UnmixingTerms(**settings)
