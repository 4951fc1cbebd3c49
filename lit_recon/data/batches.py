"""Batches gathered straight from a set in memory, for one of several processes.

A data set that fits into memory needs no worker processes and no collation: one gather makes a batch. The classes
here are plain sized iterables, which Lightning takes as they are (it never puts a sampler of its own into them), so
each process gets its share by `rank` and `world_size` with or without `use_distributed_sampler`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.data.dataset import ImageSet, seeded_generator
from lit_recon.data.splits import VictimBatch
from lit_recon.errors import ConfigError


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad every image with black on all sides and cut it back to its size at a random place of its own.

    Args:
        images: `(n, c, h, w)` of any dtype.
        padding: pixels on each side; 0 changes nothing.
        generator: of the `2 n` offsets.

    Returns:
        `(n, c, h, w)`, same dtype and device.
    """
    if padding == 0:
        return images
    n, _, height, width = images.shape
    top, left = torch.randint(2 * padding + 1, (2, n), generator=generator, device=generator.device).to(images.device)
    windows = nn.functional.pad(images, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(n, device=images.device), :, top, left]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image `(n, c, h, w)` from left to right with probability one half."""
    flipped = torch.rand(len(images), generator=generator, device=generator.device).to(images.device) < 0.5
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


class EpochShuffle:
    """The order of one process's training images, a function of seed and epoch alone.

    All processes get equally many images, as gradient averaging needs; up to `world_size - 1` images, different ones
    every epoch, are left out.
    """

    def __init__(self, n: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if n < world_size:
            raise ConfigError(f"each of {world_size} processes needs a training image; got {n}: start fewer processes")
        self.n, self.seed, self.rank, self.world_size = n, seed, rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; Lightning calls this before each one."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n // self.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def indices(self) -> Tensor:
        """Indices `(n // world_size,)` of this epoch and process."""
        order = torch.randperm(self.n, generator=seeded_generator(self.seed, "shuffle", self.epoch))
        return order[self.rank : len(self) * self.world_size : self.world_size]


class ResumableBatches(ABC):
    """Augmented `(images (n, c, h, w) in [0, 1], labels (n,))`; subclasses choose the images of every batch.

    Every batch is a function of seed, epoch, rank and position. A run that resumes within an epoch goes on with the
    batch that would have come next.

    Args:
        images: the whole training set.
        sampler: with the `seed`, the `rank` and the `epoch`, which Lightning sets by its `set_epoch`.
        padding: of the random crop, in pixels; 0 for none.
        flip: mirror half of the images.
    """

    def __init__(self, images: ImageSet, sampler: Any, padding: int, flip: bool) -> None:
        self.images, self.sampler, self.padding, self.flip = images, sampler, padding, flip
        self._reached = {"epoch": 0, "given": 0}
        self._resume: dict[str, int] = {}

    @abstractmethod
    def chunks(self) -> Sequence[Tensor]:
        """Indices of every batch of this epoch."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Runs at the first `next`, after Lightning has set the epoch.
        epoch, chunks = self.sampler.epoch, self.chunks()
        start = self._resume.get("given", 0) if self._resume.get("epoch") == epoch else 0
        self._resume = {}
        for position in range(start, len(chunks)):
            self._reached = {"epoch": epoch, "given": position + 1}
            yield self._batch(chunks[position], epoch, position)

    def _batch(self, indices: Tensor, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        generator = seeded_generator(self.sampler.seed, "augment", epoch, self.sampler.rank, position)
        pixels = random_crop(self.images.images.index_select(0, indices), self.padding, generator)
        if self.flip:
            pixels = random_flip(pixels, generator)
        return pixels.to(torch.float32).div_(255), self.images.labels[indices]

    def state_dict(self) -> dict[str, int]:
        """The last epoch begun and how many of its batches were given out; the same on every process."""
        return dict(self._reached)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume the saved epoch where it stopped."""
        self._resume = dict(state)


class TrainingBatches(ResumableBatches):
    """Shuffled batches, the last one of an epoch perhaps smaller.

    Args:
        images: the whole training set.
        batch_size: images per batch and process.
        padding, flip: as for `ResumableBatches`.
        seed: of order and augmentation.
        rank, world_size: which share of the set.
    """

    def __init__(
        self,
        images: ImageSet,
        batch_size: int,
        padding: int = 4,
        flip: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(images, EpochShuffle(len(images), seed, rank, world_size), padding, flip)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def chunks(self) -> Sequence[Tensor]:
        """Indices of every batch of this epoch."""
        return tuple(self.sampler.indices().split(self.batch_size))


class EvaluationBatches:
    """Each image once, over all processes, as `(images (n, c, h, w) in [0, 1], labels (n,))`.

    All processes get equally many batches, since the forward passes of a distributed model must pair up, but not
    necessarily equally many images: nothing is repeated to fill up.
    """

    def __init__(self, images: ImageSet, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if len(images) < world_size:
            raise ConfigError(
                f"each of {world_size} processes needs a test image; got {len(images)}: start fewer processes"
            )
        share = torch.arange(rank, len(images), world_size)
        largest_share, smallest_share = math.ceil(len(images) / world_size), len(images) // world_size
        n_batches = min(math.ceil(largest_share / batch_size), smallest_share)
        self.images, self.chunks = images, share.tensor_split(n_batches)

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self.chunks:
            yield self.images.pixels(indices), self.images.labels[indices]


class VictimBatches:
    """Every client's batch once, over all processes; the processes take turns.

    Some processes may get one batch more than others, so nothing inside a step may wait for the other processes.

    Args:
        images: the test split.
        batches: indices `(B,)` into it, as from `victim_batches`.
        rank, world_size: which share of the batches.

    Raises:
        ConfigError: if there are more processes than batches.
    """

    def __init__(self, images: ImageSet, batches: list[Tensor], rank: int = 0, world_size: int = 1) -> None:
        if len(batches) < world_size:
            raise ConfigError(
                f"each of {world_size} processes needs a batch of victims; got {len(batches)}: start at most "
                f"{len(batches)} processes, or raise n_victims"
            )
        self.images, self.batches = images, batches
        self.positions = range(rank, len(batches), world_size)

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[VictimBatch]:
        for index in self.positions:
            ids = self.batches[index]
            yield VictimBatch(index, self.images.pixels(ids), self.images.labels[ids], ids)
