"""The Cocktail Party Attack against batches that the tests know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import CocktailPartyAttack, JointLabels, KnownLabels, UnmixingTerms
from lit_recon.attacks.updates.linear_layer import sparse_derivatives
from lit_recon.attacks.updates.linear_layer.first_layer import first_layer, to_inputs
from lit_recon.attacks.updates.linear_layer.sparse_derivatives import refined
from lit_recon.clients import Client
from lit_recon.defenses import GaussianNoise, GradientPruning
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.models import MLP, Backbone, ConvNet
from lit_recon.records import Knowledge, Normalization, Observation

NORMALIZATION = Normalization((0.45, 0.45, 0.42), (0.25, 0.25, 0.27))


def observe(
    images: Tensor, labels: Tensor, hidden: int = 128, activation: str = "relu", noise: float = 0.0, known: bool = True
) -> Observation:
    torch.manual_seed(0)
    model = Backbone(MLP((3, 32, 32), [hidden], activation=activation), 10, NORMALIZATION)
    defense = GaussianNoise(noise, relative=True) if noise else None
    return Client(model, defense=defense).observe(images, labels, Knowledge(labels=known))


def errors(images: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """RMSE of every image to the closest reconstruction, and which it is."""
    rmse = (images[:, None] - found[None]).square().flatten(2).mean(dim=2).sqrt()
    least = rmse.min(dim=1)
    return least.values, least.indices


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_a_batch_behind_a_relu_is_recovered_exactly(known: bool, photographs: Tensor) -> None:
    images, labels = photographs[:6], torch.tensor([3, 1, 4, 1, 5, 9])
    seen = observe(images, labels, known=known)
    result = CocktailPartyAttack(steps=500, labels=KnownLabels() if known else None)(seen)
    rmse, which = errors(images, result.images)
    assert rmse.max() < 1e-4
    assert torch.equal(result.labels[which], labels)
    assert result.loss < 1e-6
    assert "solved up to rounding" in result.notes[-1]


def test_volume_and_smoothness_separate_better_than_the_published_terms(photographs: Tensor) -> None:
    images, labels = photographs[:8], torch.arange(8)
    seen = observe(images, labels)
    published = UnmixingTerms(1.0, 1.47, 12.4, 3.1, volume=0.0, smoothness=0.0, bounds=0.0)
    ours, theirs = (
        errors(images, CocktailPartyAttack(terms, 500, refinements=0, labels=KnownLabels())(seen).images)[0].mean()
        for terms in (UnmixingTerms(), published)
    )
    assert ours < 0.8 * theirs


def test_consistency_leads_from_a_rough_guess_to_the_images(photographs: Tensor) -> None:
    images, labels = photographs[:8], torch.arange(8)
    seen = observe(images, labels)
    guess = (0.7 * images + 0.3 * images.roll(1, 0)).double()
    found, order, residual, curve = refined(guess, labels, first_layer(seen), 20)
    assert errors(images, guess.float())[0].mean() > 0.03
    assert errors(images, found.float())[0].max() < 1e-4
    assert order.tolist() == labels.tolist()
    assert residual == min(curve) < 1e-6


def test_derivatives_are_the_terms_of_the_bias_gradient(photographs: Tensor) -> None:
    images, labels = photographs[:5], torch.tensor([0, 2, 2, 7, 9])
    seen = observe(images, labels, activation="tanh")
    layer = first_layer(seen)
    parts = layer.derivatives(images, labels) / 5
    torch.testing.assert_close(parts.sum(dim=0), layer.bias, rtol=0.0, atol=1e-7)
    inputs = to_inputs(images.double(), seen)
    torch.testing.assert_close(parts.T @ inputs, layer.weight, rtol=0.0, atol=1e-6)


def test_little_noise_costs_little(photographs: Tensor) -> None:
    images, labels = photographs[:6], torch.arange(6)
    result = CocktailPartyAttack(steps=500, refinements=10, labels=KnownLabels())(observe(images, labels, noise=1e-4))
    assert errors(images, result.images)[0].max() < 0.02


def test_equal_images_lower_the_rank_and_are_filled_up(photographs: Tensor) -> None:
    images = torch.cat([photographs[:3], photographs[2:3]])
    result = CocktailPartyAttack(steps=100, labels=KnownLabels())(observe(images, torch.tensor([0, 1, 2, 2])))
    assert "mixes only 3 of 4 images" in result.notes[-1]


def test_no_gradient_gives_the_mean_color(photographs: Tensor) -> None:
    seen = observe(photographs[:3], torch.arange(3))
    for value in seen.update.values():
        value.zero_()
    result = CocktailPartyAttack(labels=KnownLabels())(seen)
    assert "fewer than two images" in result.notes[-1]
    assert result.images.flatten(2).std(dim=2).max() < 1e-6


def test_restarts_keep_the_best(photographs: Tensor) -> None:
    seen = observe(photographs[:4], torch.arange(4), activation="tanh")
    settings = {"steps": 60, "refinements": 1, "labels": KnownLabels()}
    single = [CocktailPartyAttack(seed=seed, **settings)(seen).loss for seed in (0, 1)]
    assert CocktailPartyAttack(restarts=2, **settings)(seen).loss == pytest.approx(min(single))


def test_what_it_cannot_separate_is_refused(photographs: Tensor) -> None:
    with pytest.raises(ThreatModelError, match="use AnalyticInversion"):
        CocktailPartyAttack().check([observe(photographs[:1], torch.tensor([1]))])
    with pytest.raises(UnsupportedModelError, match="attack smaller batches or a wider layer"):
        CocktailPartyAttack().check([observe(photographs[:5], torch.arange(5), hidden=4)])
    model = Backbone(ConvNet((3, 32, 32), widths=[4]), 10, NORMALIZATION)
    seen = Client(model).observe(photographs[:2], torch.arange(2))
    with pytest.raises(UnsupportedModelError, match="another layer comes first"):
        CocktailPartyAttack().check([seen])


@pytest.mark.parametrize("settings", [{"steps": 0}, {"restarts": 0}, {"refinements": -1}, {"lr": 0.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="CocktailPartyAttack needs"):
        CocktailPartyAttack(**settings)


def test_labels_cannot_be_optimized() -> None:
    with pytest.raises(ConfigError, match="cannot optimize labels"):
        CocktailPartyAttack(labels=JointLabels())


def test_rounds_of_consistency_make_a_loss_curve(photographs: Tensor) -> None:
    seen = observe(photographs[:2], torch.tensor([3, 1]))
    trace = CocktailPartyAttack(steps=20, refinements=3, labels=KnownLabels()).many([seen])[0].trace
    assert list(trace) == ["step", "loss"]
    assert trace["step"] == [float(step) for step in range(len(trace["loss"]))]


@pytest.mark.parametrize("fraction", [0.9, 0.9999])
def test_hardly_an_entry_left_gives_images_all_the_same(fraction: float, photographs: Tensor) -> None:
    torch.manual_seed(0)
    model = Backbone(MLP((3, 32, 32), [16]), 10, NORMALIZATION)
    client = Client(model, defense=GradientPruning(fraction))
    seen = client.observe(photographs[:3], torch.tensor([3, 1, 3]), Knowledge(labels=True))
    result = CocktailPartyAttack(steps=20, refinements=3, labels=KnownLabels())(seen)
    assert torch.isfinite(result.images).all()


def test_a_fit_that_is_not_finite_leaves_the_guess(photographs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK ends the process, or never returns, on values that are not finite."""
    images, labels = photographs[:4].double(), torch.arange(4)
    layer = first_layer(observe(photographs[:4], labels))

    def lost(layer: object, n: int) -> Callable[[Tensor], Tensor]:
        return lambda parts: torch.full((n, 3 * 32 * 32), torch.nan, dtype=parts.dtype)

    monkeypatch.setattr(sparse_derivatives, "_robust_separation", lost)
    guess = 0.7 * images + 0.3 * images.roll(1, 0)
    found, _, residual, curve = refined(guess, labels, layer, 5)
    assert torch.equal(found, guess)
    assert curve == [residual]
