"""Poisson batches: every image by a coin toss of its own, on one process or several, resumable."""

from __future__ import annotations

import math

import pytest
import torch

from lit_recon.data.sources import Digits
from lit_recon.modules.data import BackboneDataModule, PoissonBatches, PoissonSampling

DATA = BackboneDataModule(Digits(), padding=1, flip=True, n_train=100)


def test_every_image_is_drawn_at_the_given_rate() -> None:
    """Counts over 400 batches within 4.5 standard errors for each of 100 images; pairs are independent."""
    sampling, rate, n_batches = PoissonSampling(100, 0.2, seed=0), 0.2, 400
    drawn = torch.zeros(n_batches, 100)
    for step in range(n_batches):
        drawn[step, sampling.indices(0, step)] = 1.0
    error = math.sqrt(rate * (1 - rate) / n_batches)
    assert (drawn.mean(0) - rate).abs().max() < 4.5 * error
    sizes = drawn.sum(1)
    assert abs(float(sizes.var()) - 100 * rate * (1 - rate)) < 5.0  # of a fixed batch size: 0
    assert len(set(sizes.tolist())) > 10


def test_processes_share_out_the_images() -> None:
    whole = torch.cat([PoissonSampling(10, 0.5, 0, rank, 3).share for rank in range(3)])
    assert sorted(whole.tolist()) == list(range(10))
    for rank in range(3):
        sampling = PoissonSampling(10, 1.0, 0, rank, 3)
        assert torch.equal(sampling.indices(0, 0), sampling.share)
    assert PoissonSampling(2, 1.0, 0, 2, 3).indices(0, 0).tolist() == []


def test_batches_depend_on_seed_epoch_and_step_alone() -> None:
    def batches(seed: int = 0, epoch: int = 0) -> list[torch.Tensor]:
        loader = PoissonBatches(DATA.train, 0.3, 4, padding=1, flip=True, seed=seed)
        loader.sampler.set_epoch(epoch)
        return [images for images, _ in loader]

    def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, one, two))

    assert same(batches(), batches())
    assert not same(batches(), batches(seed=1))
    assert not same(batches(), batches(epoch=1))
    assert len({len(images) for images in batches()}) > 1


def test_an_interrupted_epoch_goes_on_with_the_next_batch() -> None:
    whole = PoissonBatches(DATA.train, 0.3, 5)
    expected = [labels for _, labels in whole]
    begun = PoissonBatches(DATA.train, 0.3, 5)
    passing = iter(begun)
    next(passing), next(passing)
    resumed = PoissonBatches(DATA.train, 0.3, 5)
    resumed.load_state_dict(begun.state_dict())
    assert all(map(torch.equal, [labels for _, labels in resumed], expected[2:]))
    assert len(list(resumed)) == 5


def test_empty_batches_have_a_shape() -> None:
    for images, labels in PoissonBatches(DATA.train, 1e-12, 2, padding=1, flip=True):
        assert images.shape == (0, 1, 8, 8)
        assert images.dtype == torch.float32
        assert labels.shape == (0,)


@pytest.mark.parametrize(("augment", "same"), [(False, True), (True, False)])
def test_the_data_modules_augmentation_is_kept(augment: bool, same: bool) -> None:
    data = BackboneDataModule(Digits(), augment=augment, padding=1, flip=False, n_train=50)
    data.poisson = 1.0, 1
    data.prepare_data()
    [(images, labels)] = data.train_dataloader()
    assert torch.equal(images, data.train.pixels()) == same
    assert torch.equal(labels, data.train.labels)
    assert len(list(data.val_dataloader())) == len(data.test_dataloader()) == 1
