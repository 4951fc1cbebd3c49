"""The moment method and Cocktail Party against their reference figures and against known sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import GELU, RELU, Activation
from lit_recon.attacks.updates.features.cocktail_party import CocktailParty, labels_told, signs_told
from lit_recon.attacks.updates.features.layer import LayerGradient
from lit_recon.attacks.updates.features.moments import MomentRecovery
from lit_recon.errors import ConfigError, UnsupportedModelError

Build = Callable[..., tuple[LayerGradient, Tensor, Tensor]]


def cosines(truth: Tensor, found: Tensor) -> Tensor:
    return (truth @ found.T).abs().amax(dim=1)


def error(truth: Tensor, basis: Tensor) -> float:
    return float((truth - truth @ basis @ basis.T).norm(dim=1).mean())


@pytest.mark.parametrize(
    ("n", "plain", "reduced"), [(1, 0.177, 0.076), (2, 0.177, 0.077), (4, 0.162, 0.072), (8, 0.130, 0.064)]
)
def test_reference_errors_of_the_moment_method(build: Build, n: int, plain: float, reduced: float) -> None:
    # d=64, m=20,480, ReLU, positive features, distinct labels: means over two draws; ours differ by up to 7 %
    seen, truth, _ = build(RELU, n=n, d=64, m=20_480, kind="positive")
    assert error(truth, MomentRecovery().recover(seen).span) == pytest.approx(plain, rel=0.25)
    assert error(truth, MomentRecovery(control_variates=True).recover(seen).span) == pytest.approx(reduced, rel=0.25)


def test_exact_span_makes_moments_good(build: Build) -> None:
    seen, truth, _ = build(GELU, n=4, d=64, m=8192, kind="random")
    found = MomentRecovery(control_variates=True, span="layer").recover(seen)
    assert cosines(truth, found.features).min() > 0.98  # measured 0.995
    assert not found.exact
    assert found.certificate is None


def test_rows_are_chosen(build: Build) -> None:
    seen, truth, _ = build(GELU, n=2, m=8192, kind="random", trained=4096)
    random = error(truth, MomentRecovery().recover(seen).span)
    trained = error(truth, MomentRecovery(rows="trained").recover(seen).span)
    everything = error(truth, MomentRecovery(rows="all").recover(seen).span)
    assert random < everything < trained
    all_random = MomentRecovery(rows="trained").recover(replace(seen, gaussian=torch.ones_like(seen.gaussian)))
    assert "no trained neurons" in all_random.notes[0]


def test_power_iterations_are_an_option(build: Build) -> None:
    seen, truth, _ = build(GELU, n=1, m=8192, kind="random")
    assert error(truth, MomentRecovery(power_iterations=40).recover(seen).span) < 0.3


@pytest.mark.parametrize("settings", [{"span": "both"}, {"rows": "none"}, {"power_iterations": 0}])
def test_moment_settings_out_of_range(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="MomentRecovery needs"):
        MomentRecovery(**settings)  # type: ignore[arg-type]


def test_moments_need_a_gradient(build: Build) -> None:
    seen, _, _ = build(GELU)
    with pytest.raises(UnsupportedModelError, match="head, which is zero"):
        MomentRecovery().recover(replace(seen, head_gradient=torch.zeros_like(seen.head_gradient)))
    silent = replace(seen, weight_gradient=torch.zeros_like(seen.weight_gradient))
    with pytest.raises(UnsupportedModelError, match="set span to 'head'"):
        MomentRecovery(span="layer").recover(silent)
    with pytest.raises(UnsupportedModelError, match="CocktailParty unmixes"):
        CocktailParty().recover(silent)


@pytest.mark.parametrize("sources", ["uniform", "peaked"])
def test_cocktail_party_unmixes_known_sources(build: Build, sources: str) -> None:
    generator = torch.Generator().manual_seed(0)
    n, d = 3, 600
    uniform = torch.rand(n, d, generator=generator, dtype=torch.float64) - 0.5
    truth = uniform if sources == "uniform" else uniform.sign() * uniform.abs().reciprocal().log().square()
    seen, _, _ = build(GELU, n=n, d=d, m=640)
    mixing = torch.randn(640, n, generator=generator, dtype=torch.float64)
    mixed = replace(
        seen, weight_gradient=mixing @ truth, bias_gradient=mixing @ torch.tensor([1.0, -1.0, 1.0]).double()
    )
    found = CocktailParty(decorrelation=1e-3, sharpness=2.0, steps=400, lr=0.02).recover(mixed)
    unit = torch.nn.functional.normalize(truth, dim=1)
    assert cosines(unit, found.features).mean() > 0.99  # measured 0.997
    assert error(unit, found.span) < 1e-6
    # the bias says that the second source has entered with the other sign
    signed = (unit @ found.features.T).gather(1, (unit @ found.features.T).abs().argmax(dim=1, keepdim=True))[:, 0]
    assert signed.sign().tolist() == [1.0, -1.0, 1.0]
    assert found.signed


@pytest.mark.slow
def test_features_are_unmixed_before_they_are_centered(build: Build) -> None:
    # features behind a ReLU are correlated and not negative; centered ones have both signs
    generator = torch.Generator().manual_seed(0)
    n, d = 4, 2000
    pattern = torch.randn(d, generator=generator, dtype=torch.float64)
    draws = pattern + 1.5 * torch.randn(200 + n, d, generator=generator, dtype=torch.float64)
    center, truth = draws[n:].relu().mean(dim=0), draws[:n].relu()
    unit = torch.nn.functional.normalize(truth - center, dim=1)
    seen, _, _ = build(GELU, n=n, d=d, m=64)
    mixing = torch.randn(64, n, generator=generator, dtype=torch.float64)
    mixed = replace(seen, weight_gradient=mixing @ unit, bias_gradient=mixing.sum(dim=1), center=center)
    attack = CocktailParty(decorrelation=5.3, sharpness=7.7, sparsity=5.0, non_negativity=0.13, steps=1000)
    found, blind = attack.recover(mixed), attack.recover(replace(mixed, center=None))
    assert (unit @ found.features.T).amax(dim=1).min() > 0.95  # measured 0.978
    assert cosines(unit, blind.features).min() < 0.85  # measured 0.730
    assert error(unit, found.span) < 1e-6
    assert found.signed
    # without the bias's gradient the center still tells the signs
    silent = attack.recover(replace(mixed, bias_gradient=torch.zeros(64, dtype=torch.float64)))
    assert silent.signed
    assert (unit @ silent.features.T).amax(dim=1).min() > 0.95


def test_mixtures_near_rounding_do_not_end_the_separation(build: Build) -> None:
    seen, truth, _ = build(GELU, n=4, d=60, m=64)
    generator = torch.Generator().manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(64, 4, generator=generator, dtype=torch.float64)).Q
    strength = torch.tensor([1.0, 1.0, 7e-7, 7e-7], dtype=torch.float64)
    weak = (mixing * strength) @ torch.linalg.qr((truth - truth.mean(dim=1, keepdim=True)).T).Q.T
    center = torch.randn(60, generator=generator, dtype=torch.float64)
    mixed = replace(seen, weight_gradient=weak, bias_gradient=mixing.sum(dim=1), center=center)
    found = CocktailParty(non_negativity=0.1, steps=5).recover(mixed)
    assert found.features.isfinite().all()
    assert len(found.features) < 4
    assert "for 4 examples" in found.notes[0]


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda activation: activation.name)
def test_signs_and_labels_of_true_features(build: Build, activation: Activation) -> None:
    seen, truth, labels = build(activation, n=6)
    flips = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    truth = truth.double()
    assert torch.equal(signs_told(truth * flips[:, None], seen), flips)
    assert torch.equal(labels_told(truth, seen), labels)


def test_without_a_bias_signs_stay_open(build: Build) -> None:
    seen, _, _ = build(GELU, n=2)
    found = CocktailParty(steps=5).recover(replace(seen, bias_gradient=torch.zeros_like(seen.bias_gradient)))
    assert not found.signed
    assert found.labels is None


def test_cocktail_party_objective_by_hand() -> None:
    generator = torch.Generator().manual_seed(1)
    whitened = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    mean = torch.tensor([[0.3], [-0.2]], dtype=torch.float64)
    angle = torch.tensor(0.4, dtype=torch.float64)
    unmixing = torch.stack([torch.tensor([1.0, 0.0]).double(), torch.stack([angle.sin(), angle.cos()])])
    attack = CocktailParty(0.5, 3.0, non_negativity=0.7, sparsity=0.2, gaussian_reference=False)
    sources = unmixing @ whitened
    shifted = sources + unmixing @ mean
    expected = -(torch.log(torch.cosh(sources)).mean(1) ** 2).mean()
    expected += 0.5 * 2 * (torch.exp(3.0 * angle.sin()) - 1) / 4
    expected += 0.7 * torch.minimum((-shifted).clamp(min=0).norm(dim=1), shifted.clamp(min=0).norm(dim=1)).mean()
    expected += 0.2 * shifted.abs().mean()
    torch.testing.assert_close(attack.objective(unmixing, whitened, mean), expected)
    without = CocktailParty(0.5, 3.0, 0.7, 0.2, negentropy=0.0)
    expected += (torch.log(torch.cosh(sources)).mean(1) ** 2).mean()
    torch.testing.assert_close(without.objective(unmixing, whitened, mean), expected)


@pytest.mark.parametrize("settings", [{"decorrelation": -1.0}, {"steps": 0}, {"lr": 0.0}])
def test_cocktail_party_settings_out_of_range(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="CocktailParty needs"):
        CocktailParty(**settings)  # type: ignore[arg-type]
