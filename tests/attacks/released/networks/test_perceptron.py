from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released.networks.perceptrons import NeuralReconstructor, ReconstructorModule
from lit_recon.attacks.released.networks.training import PairBatches, Standardization
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.reconstructors import ReconstructorMLP


def shadows(s: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(s, 1, 3, 3, generator=generator)
    labels = torch.arange(s) % 3
    rotation = torch.randn(9, 12, generator=generator)
    differences = torch.cat([images.flatten(1) @ rotation, torch.full((s, 2), 3.0)], dim=1)
    return 1e-3 * differences, images, labels


def test_dead_coordinates_are_constant_whatever_they_hold() -> None:
    differences = shadows()[0]
    noisy = differences.clone()
    noisy[:, -2] += 1e-9 * torch.randn(60, generator=torch.Generator().manual_seed(1))
    standardization = Standardization.fitted(noisy)
    features = standardization(noisy)
    assert features[:, -2:].abs().max() == 0
    assert standardization(noisy + 5)[:, -2:].abs().max() == 0
    torch.testing.assert_close(features[:, :-2].std(dim=0), torch.ones(12))
    torch.testing.assert_close(features[:, :-2].mean(dim=0), torch.zeros(12), rtol=0, atol=1e-6)


def test_features_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="two or more different models"):
        Standardization.fitted(torch.ones(4, 3))
    standardization = Standardization.fitted(shadows()[0])
    for wrong in (torch.zeros(2, 13), torch.full((2, 14), torch.nan)):
        with pytest.raises(ShapeError, match="are they of another network"):
            standardization(wrong)


def test_the_network_has_the_papers_size() -> None:
    network = ReconstructorMLP(7_960, (1, 28, 28))
    # Balle et al. 2022, table V: 9.7 million parameters.
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(9.7, abs=0.06)
    images = ReconstructorMLP(5, (1, 2, 3), [4])(torch.randn(7, 5))
    assert images.shape == (7, 1, 2, 3)
    assert (images > 0).all()
    assert (images < 1).all()
    with pytest.raises(ConfigError, match="positive layer sizes"):
        ReconstructorMLP(5, (1, 2, 3), [])


def test_every_epoch_sees_every_pair_once_in_an_order_of_its_own() -> None:
    features = torch.arange(10)[:, None].float()
    batches = PairBatches(features, features * 2, batch_size=4, seed=0)
    assert len(batches) == 3
    epochs = [[pair for batch in batches for pair in zip(*batch, strict=True)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(int(feature) for feature, _ in epoch) == list(range(10))
        assert all(image == 2 * feature for feature, image in epoch)
    assert [int(feature) for feature, _ in epochs[0]] != [int(feature) for feature, _ in epochs[1]]


def test_the_loss_is_mean_absolute_plus_mean_squared_error() -> None:
    network = ReconstructorMLP(4, (1, 2, 2), [3])
    module = ReconstructorModule(network, 1e-3)
    features, images = torch.randn(5, 4), torch.rand(5, 1, 2, 2)
    difference = (network(features) - images).detach()
    expected = difference.abs().mean() + difference.square().mean()
    torch.testing.assert_close(module.training_step((features, images), 0).detach(), expected)
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert optimizer.defaults["alpha"] == 0.9


def test_its_settings_are_those_of_table_v() -> None:
    paper = NeuralReconstructor()
    assert (list(paper.hidden), paper.lr, paper.batch_size, paper.epochs) == ([1000, 1000], 1e-3, 128, 100)


def test_it_learns_and_repeats_itself() -> None:
    differences, images, labels = shadows()
    reconstructor = NeuralReconstructor(hidden=[50], epochs=60, batch_size=16, accelerator="cpu")
    before = torch.get_rng_state()
    fitted = reconstructor.fitted(differences, images, labels, 3)
    assert torch.equal(torch.get_rng_state(), before)
    found = fitted.reconstruct(differences)
    mean = images.mean(dim=0)
    assert (found.images - images).square().mean() < 0.5 * (mean - images).square().mean()
    assert torch.equal(found.labels, labels)
    assert found.uncertainty.abs().max() < 1e-6
    again = reconstructor.fitted(differences, images, labels, 3)
    assert torch.equal(again.reconstruct(differences).images, found.images)
    assert again.facts == fitted.facts
    assert fitted.facts["training_loss"] < 0.25


@pytest.mark.parametrize("arguments", [{"hidden": []}, {"hidden": [0]}, {"epochs": 0}, {"lr": 0.0}])
def test_impossible_settings_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        NeuralReconstructor(**arguments)  # type: ignore[arg-type]
