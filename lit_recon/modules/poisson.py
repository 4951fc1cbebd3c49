"""Poisson-sampled batches: every image enters every batch by a coin toss of its own, as privacy accounting assumes."""

from __future__ import annotations

from collections.abc import Iterator

import lit_recon._torchvision

import pytorch_lightning as pl
import torch
from torch import Tensor

from lit_recon.data.batches import EvaluationBatches, random_crop, random_flip
from lit_recon.data.dataset import ImageSet
from lit_recon.data.seeding import seeded_generator
from lit_recon.modules.data import BackboneDataModule


class PoissonSampling:
    """One process's share of every batch, drawn by Opacus' sampler; a function of seed, epoch and step alone.

    The images are shared out once and for all. Opacus' own distributed sampler skips a batch that is empty on one
    process, so that the processes fall out of step; this one does not.
    """

    def __init__(self, n: int, rate: float, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.share = torch.arange(rank, n, world_size)
        self.rate, self.seed, self.rank = rate, seed, rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; Lightning calls this before each one."""
        self.epoch = epoch

    def indices(self, epoch: int, step: int) -> Tensor:
        """Indices of the images of a step, perhaps none."""
        from opacus.utils.uniform_sampler import UniformWithReplacementSampler

        if not len(self.share):
            return self.share
        generator = seeded_generator(self.seed, "poisson", epoch, self.rank, step)
        sampler = UniformWithReplacementSampler(
            num_samples=len(self.share), sample_rate=self.rate, generator=generator, steps=1
        )
        [drawn] = sampler
        return self.share[torch.tensor(drawn, dtype=torch.int64)]


class PoissonBatches:
    """Augmented `(images (n, c, h, w) in [0, 1], labels (n,))` of random sizes `n`, 0 included.

    A run that resumes within an epoch goes on with the batch that would have come next.

    Args:
        images: the whole training set.
        rate: chance of an image to enter a batch.
        steps: batches in an epoch.
        padding: of the random crop, in pixels; 0 for none.
        flip: mirror half of the images.
        seed: of sampling and augmentation.
        rank, world_size: which share of every batch.
    """

    def __init__(
        self,
        images: ImageSet,
        rate: float,
        steps: int,
        padding: int = 0,
        flip: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.images, self.steps, self.padding, self.flip = images, steps, padding, flip
        self.sampler = PoissonSampling(len(images), rate, seed, rank, world_size)
        self._reached = {"epoch": 0, "given": 0}
        self._resume: dict[str, int] = {}

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # runs at the first `next`, after Lightning has set the epoch
        epoch = self.sampler.epoch
        start = self._resume.get("given", 0) if self._resume.get("epoch") == epoch else 0
        self._resume = {}
        for step in range(start, self.steps):
            self._reached = {"epoch": epoch, "given": step + 1}
            yield self._batch(epoch, step)

    def _batch(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        indices = self.sampler.indices(epoch, step)
        pixels, labels = self.images.images.index_select(0, indices), self.images.labels[indices]
        if len(indices):
            generator = seeded_generator(self.sampler.seed, "augment", epoch, self.sampler.rank, step)
            pixels = random_crop(pixels, self.padding, generator)
            pixels = random_flip(pixels, generator) if self.flip else pixels
        return pixels.to(torch.float32).div_(255), labels

    def state_dict(self) -> dict[str, int]:
        """The last epoch begun and how many of its batches were given out; the same on every process."""
        return dict(self._reached)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass over that epoch start where the saved one stopped."""
        self._resume = dict(state)


class PoissonDataModule(pl.LightningDataModule):
    """A backbone's data with Poisson-sampled training batches.

    Args:
        data: images, augmentation, seed and test split.
        rate: chance of an image to enter a batch.
        steps: batches in an epoch.
    """

    def __init__(self, data: BackboneDataModule, rate: float, steps: int) -> None:
        super().__init__()
        self.data, self.rate, self.steps = data, rate, steps

    def prepare_data(self) -> None:
        """Fetch the files; Lightning lets one process per machine do so."""
        self.data.prepare_data()

    def setup(self, stage: str) -> None:
        """Read the images."""
        self.data.trainer = self.trainer
        self.data.setup(stage)

    def train_dataloader(self) -> PoissonBatches:
        """This process's share of the training batches."""
        data, trainer = self.data, self.trainer
        return PoissonBatches(
            data.train,
            self.rate,
            self.steps,
            padding=data.padding if data.augment else 0,
            flip=data.flip and data.augment,
            seed=data.seed,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
        )

    def val_dataloader(self) -> EvaluationBatches:
        """This process's share of the test images."""
        return self.data.val_dataloader()

    def test_dataloader(self) -> EvaluationBatches:
        """The same as for validation."""
        return self.data.val_dataloader()
