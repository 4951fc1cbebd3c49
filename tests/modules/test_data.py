"""The DataModules alone, under a Trainer, across a resumption and in two processes."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import lit_recon._torchvision

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lit_recon.data import VictimBatch, measure_normalization
from lit_recon.data.sources import Digits, Npz
from lit_recon.data.splits import Pool, in_pool
from lit_recon.errors import ConfigError, MissingDataError
from lit_recon.modules.data import BackboneDataModule, VictimDataModule
from tests.processes import outputs, ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """41 training and 15 test images of two classes; each is constant and equal to its index in its split."""
    path = tmp_path / "numbers.npz"
    content = {}
    for part, n in (("train", 41), ("test", 15)):
        content[f"{part}_images"] = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None], (n, 4, 4))
        content[f"{part}_labels"] = np.arange(n) % 2
    np.savez(path, **content)
    return path


def members(images: Tensor) -> list[int]:
    return (images[:, 0, 0, 0] * 255).round().int().tolist()


def test_backbone_batches_without_a_trainer() -> None:
    data = BackboneDataModule(Digits(), padding=1, flip=False)
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (64, 1, 8, 8)
    assert images.dtype == torch.float32
    assert 0 <= images.min() < images.max() <= 1
    assert labels.dtype == torch.int64
    assert sum(len(labels) for _, labels in data.val_dataloader()) == len(data.test) == 359
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 359


def test_what_a_model_needs_to_know_is_there_before_setup() -> None:
    data = BackboneDataModule(Digits())
    assert data.image_shape == (1, 8, 8)
    assert data.n_classes == len(data.class_names) == 10
    assert data.normalization == measure_normalization(Digits().load()[0])
    assert data.train is data.splits[0]


def test_the_modules_agree_on_the_split() -> None:
    digits = [VictimDataModule(Digits()), BackboneDataModule(Digits(), n_train=100), BackboneDataModule(Digits(seed=1))]
    victims, same, other = (data.split_hash for data in digits)
    assert victims == same != other


def test_evaluation_is_not_augmented() -> None:
    data = BackboneDataModule(Digits(), padding=1)
    images = torch.cat([images for images, _ in data.val_dataloader()])
    assert torch.equal(images, data.test.pixels())


def test_augmentation_can_be_switched_off() -> None:
    plain = BackboneDataModule(Digits(), augment=False)
    known = {image.numpy().tobytes() for image in plain.train.pixels()}
    assert all(image.numpy().tobytes() in known for images, _ in plain.train_dataloader() for image in images)
    moved = next(iter(BackboneDataModule(Digits(), padding=1).train_dataloader()))[0]
    assert sum(image.numpy().tobytes() in known for image in moved) < 32


def test_training_on_a_part() -> None:
    data = BackboneDataModule(Digits(), n_train=95)
    assert len(data.train) == 95
    assert set(data.train.labels.bincount().tolist()) == {9, 10}
    assert data.normalization == BackboneDataModule(Digits()).normalization


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"padding": -1}, "padding must be at least 0 pixels; got -1"),
        ({"padding": 8}, "padding must be below the image side.*got 8 for 8x8"),
        ({"n_train": 1439}, "n_train must be 1 to 1438, the size of digits train; got 1439"),
        ({"n_train": 0}, "n_train must be 1 to 1438"),
    ],
)
def test_backbone_settings_that_do_not_fit(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackboneDataModule(Digits(), **settings).setup("fit")  # type: ignore[arg-type]  # all of these are int


def test_victims_are_of_the_test_split() -> None:
    data = VictimDataModule(Digits(), n_victims=50, batch_size=4)
    data.setup("test")
    batches = list(data.test_dataloader())
    assert [batch.index for batch in batches] == list(range(12))
    for batch in batches:
        assert torch.equal(batch.images, data.test.pixels(batch.ids))
        assert torch.equal(batch.labels, data.test.labels[batch.ids])
        assert len(batch.labels.unique()) == 4
    public = {image.numpy().tobytes() for image in data.public.pixels()}
    assert len(data.public) == 1438
    assert not any(image.numpy().tobytes() in public for batch in batches for image in batch.images)


@pytest.mark.parametrize(("batch_size", "n_batches", "n_left_over"), [(1, 50, 0), (8, 6, 2)])
def test_left_over_victims_are_told(
    caplog: pytest.LogCaptureFixture, batch_size: int, n_batches: int, n_left_over: int
) -> None:
    data = VictimDataModule(Digits(), n_victims=50, batch_size=batch_size)
    # commands silence both loggers of Lightning for the whole process, and other tests run commands
    with caplog.at_level("INFO", "pytorch_lightning"), caplog.at_level("INFO", "lightning_fabric"):
        data.setup("test")
    assert data.n_left_over == n_left_over
    told = (
        f"50 victims of digits test: {n_batches} batches of {batch_size}, {n_left_over} left over; 1438 public images"
    )
    assert told in caplog.text


def test_a_public_sample_for_baselines() -> None:
    data = VictimDataModule(Digits(), n_public=20)
    assert data.public.labels.bincount().tolist() == [2] * 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_victims": 360, "pool": "all"}, "victims.n must be 1 to 359, the size of digits test; got 360"),
        (
            {"n_victims": 300},
            "victims.n must be 1 to 205, the images of pool evaluation of digits test; got 300; pool `all` has every",
        ),
        ({"n_victims": 0, "pool": "development"}, "victims.n must be 1 to 154"),
        (
            {"n_victims": 4, "batch_size": 5},
            "batch_size must be 1 to 4, the number of victims; got 5: lower it, or raise victims.n",
        ),
        ({"batch_size": 11}, "batches of 11 distinct labels need victims of 11 classes"),
        ({"n_victims": 6, "batch_size": 0}, "batch_size must be 1 to 6"),
    ],
)
def test_victim_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VictimDataModule(Digits(), **settings).setup("test")


def test_a_pool_without_an_image_is_named(tmp_path: Path) -> None:
    images, labels = np.zeros((3, 4, 4), dtype=np.uint8), np.arange(3)
    np.savez(tmp_path / "x.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    source = Npz(tmp_path / "x.npz")
    empty = next(pool for pool in get_args(Pool) if not len(in_pool(source.load()[1], pool)))
    with pytest.raises(ConfigError, match=f"no image of x test is in pool {empty}; pool `all` has every image"):
        VictimDataModule(source, pool=empty).setup("test")


def test_no_victim_is_in_both_pools() -> None:
    drawn = {
        pool: {int(index) for seed in range(20) for batch in victims_of(pool, seed) for index in batch}
        for pool in ("development", "evaluation")
    }
    assert not drawn["development"] & drawn["evaluation"]
    assert len(drawn["development"]) + len(drawn["evaluation"]) == 359  # every image is drawn by one of the seeds


def victims_of(pool: Pool, seed: int) -> list[Tensor]:
    return VictimDataModule(Digits(), n_victims=140, distinct_labels=False, seed=seed, pool=pool).batches


@pytest.mark.parametrize("n_public", [0, 1439])
def test_public_samples_that_do_not_fit(n_public: int) -> None:
    with pytest.raises(ConfigError, match=f"n_public must be 1 to 1438, the size of digits train; got {n_public}"):
        VictimDataModule(Digits(), n_public=n_public).setup("test")


def test_missing_files_are_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"expected an \.npz file"):
        VictimDataModule(Npz(tmp_path / "x.npz")).setup("test")


class Recorder(pl.LightningModule):
    """A linear classifier that notes which training images it was shown, and saves itself after every step."""

    def __init__(self, checkpoints: Path | None = None) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        torch.manual_seed(0)
        self.net = nn.Linear(16, 2)
        self.shown: list[list[int]] = []
        self.victims: list[VictimBatch] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        self.shown.append(members(images))
        return nn.functional.cross_entropy(self.net(images.flatten(1)), labels)

    def on_train_batch_end(self, *args: object) -> None:
        if self.checkpoints:
            self.trainer.save_checkpoint(self.checkpoints / f"{self.global_step}.ckpt")

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        assert len(batch[0]) == 15

    def test_step(self, batch: VictimBatch) -> None:
        self.victims.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet_trainer(folder: Path, **settings: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,  # type: ignore[arg-type]  # settings of several types
    )


def backbone_data(archive: Path) -> BackboneDataModule:
    return BackboneDataModule(Npz(archive), batch_size=8, augment=False, seed=5)


@pytest.mark.parametrize("steps", [5, 6, 8, 11])
def test_a_resumed_training_sees_what_it_would_have_seen(archive: Path, tmp_path: Path, steps: int) -> None:
    """Six batches an epoch: stopped within the first, at its end, and within the second."""
    whole = Recorder(checkpoints=tmp_path)
    quiet_trainer(tmp_path, max_epochs=3, enable_checkpointing=False).fit(whole, datamodule=backbone_data(archive))
    assert [sorted(chain.from_iterable(whole.shown[i : i + 6])) for i in (0, 6, 12)] == [list(range(41))] * 3

    resumed = Recorder()
    trainer = quiet_trainer(tmp_path, max_epochs=3, enable_checkpointing=False)
    checkpoint = tmp_path / f"{steps}.ckpt"
    trainer.fit(resumed, datamodule=backbone_data(archive), ckpt_path=checkpoint, weights_only=True)
    assert resumed.shown == whole.shown[steps:]
    assert torch.equal(resumed.net.weight, whole.net.weight)


def test_victims_under_a_trainer(archive: Path, tmp_path: Path) -> None:
    data, recorder = VictimDataModule(Npz(archive), n_victims=10, batch_size=2, pool="all"), Recorder()
    quiet_trainer(tmp_path, enable_checkpointing=False).test(recorder, datamodule=data)
    assert [batch.ids.tolist() for batch in recorder.victims] == [ids.tolist() for ids in data.batches]
    assert all(isinstance(batch, VictimBatch) for batch in recorder.victims)
    assert all(members(batch.images) == batch.ids.tolist() for batch in recorder.victims)


@pytest.fixture
def shares(archive: Path) -> list[dict[str, list[list[int]]]]:
    """What each of two processes saw."""
    return [json.loads(line) for line in outputs(ranks(Path(__file__).with_name("victims_rank.py"), archive, cwd=ROOT))]


@pytest.mark.processes
def test_two_processes_share_the_work(shares: list[dict[str, list[list[int]]]], archive: Path) -> None:
    first, second = shares
    for kind in ("train", "validate"):
        assert len(first[kind]) == len(second[kind])
    for epoch in range(2):
        images = [chain.from_iterable(rank["train"][3 * epoch : 3 * epoch + 3]) for rank in shares]
        assert len(set(chain(*images))) == 40
        checked = [index for rank in shares for index in rank["validate"][epoch]]
        assert sorted(checked) == list(range(15))
    batches = VictimDataModule(Npz(archive), n_victims=10, batch_size=2, pool="all").batches
    assert first["victims"] == [ids.tolist() for ids in batches[0::2]]
    assert second["victims"] == [ids.tolist() for ids in batches[1::2]]
