"""Whose images are attacked: a stratified sample, and the batches in which the clients hold them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError


class VictimBatch(NamedTuple):
    """The private batch of one simulated client.

    Attributes:
        index: position among all batches of the run, the same however many processes share the work.
        images: float32 `(n, c, h, w)` in [0, 1].
        labels: int64 `(n,)`.
        ids: int64 `(n,)`, positions of the images in the test split.
    """

    index: int  # type: ignore[assignment]  # the method of the same name that tuples have is not missed
    images: Tensor
    labels: Tensor
    ids: Tensor


def sample_victims(labels: Tensor, n: int = 50, seed: int = 0) -> Tensor:
    """Draw `n` images with as equal a number from every class as the classes allow.

    Classes take turns in random order, so that every prefix of the result is stratified as well: the first five
    victims have five different labels, and fifty victims contain the same forty that a sample of forty has.

    Args:
        labels: int64 `(N,)` of the images to draw from.
        n: number of victims.
        seed: of the draw.

    Returns:
        Indices `(n,)`, int64, without repetition.

    Raises:
        ConfigError: if `n` is below 1 or above the number of images.
    """
    if not 1 <= n <= len(labels):
        raise ConfigError(f"n victims must be 1 to {len(labels)}, the number of images to draw from; got {n}")
    generator = seeded_generator(seed, "victims")
    drawn = torch.randperm(len(labels), generator=generator)
    by_class = torch.argsort(labels[drawn], stable=True)
    _, counts = labels.unique(return_counts=True)
    turn = torch.cat([torch.arange(int(count)) for count in counts])
    # In every turn each class that still has an image gives one; sorting random keys by turn shuffles within it.
    keys = turn + torch.rand(len(labels), generator=generator, dtype=torch.float64)
    return drawn[by_class[keys.argsort()[:n]]]


def victim_batches(
    labels: Tensor, indices: Tensor, batch_size: int, distinct_labels: bool = True, seed: int = 0
) -> list[Tensor]:
    """Group victims into full batches, each victim in at most one.

    With distinct labels the number of batches is the largest possible; victims that fit into no batch are left over
    (`len(indices) - batch_size * len(batches)` of them). Without, the victims are shuffled and cut, labels as drawn.

    Args:
        labels: int64 `(N,)` of the set that `indices` point into.
        indices: victims `(n,)`, as from `sample_victims`.
        batch_size: images per batch `B`.
        distinct_labels: every batch has `B` different labels.
        seed: of the grouping.

    Returns:
        Index tensors `(B,)`, values from `indices`.

    Raises:
        ConfigError: if not even one such batch exists.
    """
    if not 1 <= batch_size <= len(indices):
        raise ConfigError(
            f"batch_size must be 1 to {len(indices)}, the number of victims; got {batch_size}: "
            "lower it, or raise n_victims"
        )
    generator = seeded_generator(seed, "victim batches")
    if not distinct_labels:
        shuffled = indices[torch.randperm(len(indices), generator=generator)]
        return list(shuffled[: len(indices) // batch_size * batch_size].split(batch_size))
    pools = [indices[labels[indices] == label].tolist() for label in labels[indices].unique()]
    if batch_size > len(pools):
        raise ConfigError(
            f"batches of {batch_size} distinct labels need victims of {batch_size} classes; the {len(indices)} victims "
            f"have {len(pools)}: lower batch_size, raise n_victims, or set distinct_labels to false"
        )
    batches = []
    while sum(map(bool, pools)) >= batch_size:
        # Taking from the fullest classes first keeps the most classes alive, which makes the number of batches maximal.
        ties = torch.rand(len(pools), generator=generator).tolist()
        fullest = sorted(range(len(pools)), key=lambda k: (-len(pools[k]), ties[k]))[:batch_size]
        batches.append(torch.tensor([pools[k].pop(0) for k in fullest]))
    return batches
