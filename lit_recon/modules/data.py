"""DataModules of trainings and of victims; Poisson-sampled batches for trainings with differential privacy.

Their loaders share the data between processes themselves (see `lit_recon.data.batches`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property

import lit_recon._torchvision

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from lit_recon.data.batches import AugmentedBatches, EvaluationBatches, TrainingBatches, VictimBatches
from lit_recon.data.dataset import ImageSet, fingerprints, measure_normalization, seeded_generator
from lit_recon.data.sources import ImageSource
from lit_recon.data.splits import Pool, content_hash, in_pool, sample_victims, victim_batches
from lit_recon.errors import ConfigError
from lit_recon.records import Normalization

#: Images per batch and process when accuracy is measured; it has no influence on the result.
_EVALUATION_BATCH = 500


class SourceDataModule(pl.LightningDataModule, ABC):
    """The two splits of a source, read on first use, with or without a Trainer."""

    def __init__(self, source: ImageSource) -> None:
        super().__init__()
        self.source = source

    def prepare_data(self) -> None:
        """Fetch the files; Lightning lets one process per machine do so."""
        self.source.prepare()

    @abstractmethod
    def setup(self, stage: str) -> None:
        """Read the images, and refuse settings that do not fit them before anything is computed."""

    @cached_property
    def splits(self) -> tuple[ImageSet, ImageSet]:
        """The whole public (training) split and the whole test split."""
        return self.source.load()

    @property
    def test(self) -> ImageSet:
        return self.splits[1]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(c, h, w)`."""
        return self.splits[0].image_shape

    @property
    def class_names(self) -> list[str]:
        """One name per class, in the order of the labels."""
        return self.splits[0].class_names

    @property
    def n_classes(self) -> int:
        return self.splits[0].n_classes

    @cached_property
    def normalization(self) -> Normalization:
        """Measured on the whole public split."""
        return measure_normalization(self.splits[0])

    @cached_property
    def split_hash(self) -> str:
        """Identifies both splits by content; a backbone with the same hash has seen no image of this test split."""
        return content_hash(*self.splits)

    def _public(self, name: str, n: int | None, seed: int) -> ImageSet:
        """A stratified sample of `n` public images, or all of them; `name` is the setting of `n`."""
        public = self.splits[0]
        if n is None:
            return public
        if not 1 <= n <= len(public):
            raise ConfigError(f"{name} must be 1 to {len(public)}, the size of {public.name}; got {n}")
        return public.subset(sample_victims(public.labels, n, seed))

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1


class BackboneDataModule(SourceDataModule):
    """Training and test images of a classifier; batches are `(images (n, c, h, w) in [0, 1], labels (n,))`.

    The arguments are the settings of the same names of `BackboneSettings`; the batch size is per process, and `seed`
    that of the sample, the order of images and the augmentation. With `poisson`, a sampling rate and a number of steps,
    an epoch has so many `PoissonBatches`.
    """

    poisson: tuple[float, int] | None = None

    def __init__(
        self,
        source: ImageSource,
        batch_size: int = 64,
        augment: bool = True,
        padding: int = 4,
        flip: bool = True,
        n_train: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(source)
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1; got {batch_size}")
        if padding < 0:
            raise ConfigError(f"padding must be at least 0 pixels; got {padding}")
        self.batch_size, self.augment, self.padding, self.flip = batch_size, augment, padding, flip
        self.n_train, self.seed = n_train, seed

    @cached_property
    def train(self) -> ImageSet:
        """The images trained on."""
        return self._public("n_train", self.n_train, self.seed)

    def setup(self, stage: str) -> None:
        height, width = self.train.image_shape[1:]
        if self.augment and self.padding >= min(height, width):
            raise ConfigError(
                f"padding must be below the image side, or a crop may miss the image; got {self.padding} for "
                f"{height}x{width}: set padding to about an eighth of the side"
            )

    def train_dataloader(self) -> TrainingBatches | PoissonBatches:
        """This process's share of the training images, in an order of its own for every epoch."""
        padding, flip = (self.padding, self.flip) if self.augment else (0, False)
        shared = padding, flip, self.seed, self._rank, self._world_size
        if self.poisson is not None:
            rate, steps = self.poisson
            return PoissonBatches(self.train, rate, steps, *shared)
        return TrainingBatches(self.train, self.batch_size, *shared)

    def val_dataloader(self) -> EvaluationBatches:
        return EvaluationBatches(self.test, _EVALUATION_BATCH, self._rank, self._world_size)

    test_dataloader = val_dataloader


class VictimDataModule(SourceDataModule):
    """The private batches of simulated clients, as `VictimBatch`, drawn from the test split.

    The arguments are those of `VictimSettings`, with `n_victims` for `n`.
    """

    def __init__(
        self,
        source: ImageSource,
        n_victims: int = 50,
        batch_size: int = 1,
        distinct_labels: bool = True,
        seed: int = 0,
        n_public: int | None = None,
        pool: Pool = "evaluation",
    ) -> None:
        super().__init__(source)
        self.n_victims, self.batch_size, self.distinct_labels = n_victims, batch_size, distinct_labels
        self.seed, self.n_public, self.pool = seed, n_public, pool

    @cached_property
    def public(self) -> ImageSet:
        """Public images: of the other split, in which copies of victims may be, see `public_victims`."""
        return self._public("n_public", self.n_public, self.seed)

    @cached_property
    def batches(self) -> list[Tensor]:
        """Indices into the test split `(batch_size,)`, one tensor per client."""
        labels, pool = self.test.labels, in_pool(self.test, self.pool)
        if not 1 <= self.n_victims <= len(pool):
            whole = "the size" if self.pool == "all" else f"the images of pool {self.pool}"
            remedy = "" if self.n_victims < 1 or self.n_victims > len(labels) else "; pool `all` has every image"
            if not len(pool):
                raise ConfigError(f"no image of {self.test.name} is in pool {self.pool}; pool `all` has every image")
            raise ConfigError(
                f"victims.n must be 1 to {len(pool)}, {whole} of {self.test.name}; got {self.n_victims}{remedy}"
            )
        victims = pool[sample_victims(labels[pool], self.n_victims, self.seed)]
        return victim_batches(labels, victims, self.batch_size, self.distinct_labels, self.seed)

    @cached_property
    def public_victims(self) -> Tensor:
        """Indices into the test split of those victims that are public, too: the public split holds equal images."""
        ids = torch.cat(self.batches)
        return ids[torch.isin(fingerprints(self.test.subset(ids)), fingerprints(self.splits[0]))]

    @property
    def n_left_over(self) -> int:
        """Number of victims left over by full batches."""
        return self.n_victims - self.batch_size * len(self.batches)

    def setup(self, stage: str) -> None:
        rank_zero_info(
            f"{self.n_victims} victims of {self.test.name}: {len(self.batches)} batches of {self.batch_size}, "
            f"{self.n_left_over} left over; {len(self.public)} public images for the baselines"
        )

    @cached_property
    def shares(self) -> VictimBatches:
        """This process's share of the batches: over all processes each one once."""
        return VictimBatches(self.test, self.batches, self._rank, self._world_size)

    def test_dataloader(self) -> VictimBatches:
        return self.shares


class PoissonSampling:
    """One process's share of every batch, drawn by Opacus' sampler; a function of seed, epoch and step alone.

    Each process has a fixed part of the images. Opacus' own distributed sampler skips a batch that is empty on one
    process, after which the processes disagree about the step; this one does not.
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
        [drawn] = UniformWithReplacementSampler(
            num_samples=len(self.share), sample_rate=self.rate, generator=generator, steps=1
        )
        return self.share[torch.tensor(drawn, dtype=torch.int64)]


class PoissonBatches(AugmentedBatches):
    """`steps` batches of random sizes, 0 included, which every image enters with probability `rate`.

    The other arguments are those of `TrainingBatches`.
    """

    sampler: PoissonSampling

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
        super().__init__(images, padding, flip)
        self.steps = steps
        self.sampler = PoissonSampling(len(images), rate, seed, rank, world_size)

    def __len__(self) -> int:
        return self.steps

    def indices(self, start: int) -> Iterable[Tensor]:
        epoch = self.sampler.epoch
        return (self.sampler.indices(epoch, step) for step in range(start, self.steps))
