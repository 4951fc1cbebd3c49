"""Batches gathered straight from a set in memory, for one of several processes.

The classes are plain sized iterables, into which Lightning never puts a sampler of its own: each process gets its share
by `rank` and `world_size`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from lit_recon.data.dataset import ImageSet, seeded_generator
from lit_recon.data.splits import VictimBatch
from lit_recon.errors import ConfigError


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad every image `(n, c, h, w)` with black pixels and cut it back to its size at a random place of its own."""
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


class EpochSampler(Protocol):
    """Chooses the images of one process; has a `set_epoch` too, which Lightning calls before each epoch."""

    seed: int
    rank: int
    epoch: int


class AugmentedBatches(ABC):
    """Augmented `(images (n, c, h, w) in [0, 1], labels (n,))`, a function of seed, epoch, rank and position.

    A run that resumes within an epoch goes on with the batch that would have come next. Subclasses set `sampler`.

    Args:
        images: the whole training set.
        padding: of the random crop, in pixels; 0 for none.
        flip: mirror half of the images.
    """

    sampler: EpochSampler

    def __init__(self, images: ImageSet, padding: int, flip: bool) -> None:
        self.images, self.padding, self.flip = images, padding, flip
        self._reached = {"epoch": 0, "given": 0}
        self._resume: dict[str, int] = {}

    @abstractmethod
    def indices(self, start: int) -> Iterable[Tensor]:
        """Indices `(n,)` of every batch of this epoch and process from number `start` on."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # runs at the first `next`, after Lightning has set the epoch
        epoch = self.sampler.epoch
        start = self._resume.get("given", 0) if self._resume.get("epoch") == epoch else 0
        self._resume = {}
        for position, indices in enumerate(self.indices(start), start):
            self._reached = {"epoch": epoch, "given": position + 1}
            pixels, labels = self.images.images.index_select(0, indices), self.images.labels[indices]
            if len(indices):
                generator = seeded_generator(self.sampler.seed, "augment", epoch, self.sampler.rank, position)
                pixels = random_crop(pixels, self.padding, generator)
                pixels = random_flip(pixels, generator) if self.flip else pixels
            yield pixels.to(torch.float32).div_(255), labels

    def state_dict(self) -> dict[str, int]:
        """The last epoch begun and how many of its batches were given out; the same on every process."""
        return dict(self._reached)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume the saved epoch where it stopped."""
        self._resume = dict(state)


class EpochShuffle:
    """The order of one process's training images, a function of seed and epoch alone.

    All processes get equally many images; up to `world_size - 1`, different ones every epoch, are left out.
    """

    def __init__(self, n: int, seed: int, rank: int, world_size: int) -> None:
        if n < world_size:
            raise ConfigError(f"each of {world_size} processes needs a training image; got {n}: start fewer processes")
        self.n, self.seed, self.rank, self.world_size = n, seed, rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n // self.world_size

    def indices(self) -> Tensor:
        """Indices `(n // world_size,)` of this epoch and process."""
        order = torch.randperm(self.n, generator=seeded_generator(self.seed, "shuffle", self.epoch))
        return order[self.rank : len(self) * self.world_size : self.world_size]


class TrainingBatches(AugmentedBatches):
    """Shuffled batches of `batch_size` images per process; the last batch of an epoch may be smaller."""

    sampler: EpochShuffle

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
        super().__init__(images, padding, flip)
        self.batch_size = batch_size
        self.sampler = EpochShuffle(len(images), seed, rank, world_size)

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def indices(self, start: int) -> Iterable[Tensor]:
        return torch.split(self.sampler.indices(), self.batch_size)[start:]


class EvaluationBatches:
    """Each image once, over all processes, as `(images (n, c, h, w) in [0, 1], labels (n,))`.

    All processes get equally many batches, since the forward passes of a distributed model must pair up, but perhaps
    different numbers of images: none is repeated.
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
    """Every client's batch of test images once; the processes take turns by groups of `together` batches.

    Groups are of consecutive batches and the same for any number of processes, unless there were too few for each to
    have one: then they are smaller. `batches` are indices `(B,)` into the images, as from `victim_batches`; there are
    at least as many as processes. Not sized, as `together` may be set after Lightning has asked for the size.
    """

    def __init__(self, images: ImageSet, batches: list[Tensor], rank: int = 0, world_size: int = 1) -> None:
        if len(batches) < world_size:
            raise ConfigError(
                f"each of {world_size} processes needs a batch of victims; got {len(batches)}: start at most "
                f"{len(batches)} processes, or raise victims.n"
            )
        self.images, self.batches = images, batches
        self.rank, self.world_size, self.together = rank, world_size, 1

    def group_by(self, together: int) -> int:
        """Keep so many batches together, or as many as leave each process a group; the number it is."""
        if -(-len(self.batches) // together) < self.world_size:
            together = len(self.batches) // self.world_size
        self.together = together
        return together

    @property
    def positions(self) -> list[int]:
        """Numbers of the batches of this process."""
        every = range(len(self.batches))
        return [index for index in every if index // self.together % self.world_size == self.rank]

    def __iter__(self) -> Iterator[VictimBatch]:
        for index in self.positions:
            ids = self.batches[index]
            yield VictimBatch(index, self.images.pixels(ids), self.images.labels[ids], ids)
