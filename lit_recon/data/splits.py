"""Disjoint parts of a set of images, hashes that identify them, and the stratified sample of victims."""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_recon.data.dataset import ImageSet, seeded_generator
from lit_recon.errors import ConfigError

#: Which images may be attacked. Settings and methods are chosen on `development`, tables are made on `evaluation`.
Pool = Literal["development", "evaluation", "all"]


def in_pool(images: ImageSet, pool: Pool) -> Tensor:
    """Indices of the images of a pool.

    A hash of its pixels puts an image into one of the two pools, about half of them into each: copies of an image are
    in the same pool, whatever their order, source and split.
    """
    if pool == "all":
        return torch.arange(len(images))
    odd = [hashlib.sha256(image.tobytes()).digest()[0] % 2 for image in images.images.contiguous().numpy()]
    return torch.nonzero(torch.tensor(odd) == (pool == "evaluation")).flatten()


def content_hash(*sets: ImageSet) -> str:
    """16 hexadecimal digits over pixels and labels: equal only if each set holds the same images in the same order."""
    digest = hashlib.sha256()
    for images in sets:
        digest.update(repr(tuple(images.images.shape)).encode())
        digest.update(images.images.contiguous().numpy().data)
        digest.update(images.labels.contiguous().numpy().data)
    return digest.hexdigest()[:16]


def hold_out(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices for training and testing: the fraction of every class, and at least one image where it has two.

    A ConfigError says that the fraction is not above 0 and below 1, or no class has two images.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the fraction held out for testing must be above 0 and below 1; got {fraction}")
    generator = seeded_generator(seed, "hold out")
    train, test = [], []
    for label in labels.unique():
        members = torch.nonzero(labels == label).flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        n_test = min(max(1, round(fraction * len(members))), len(members) - 1)
        test.append(members[:n_test])
        train.append(members[n_test:])
    if not any(map(len, test)):
        raise ConfigError("no image can be held out for testing: every class has one image only; add images")
    return torch.cat(train).sort().values, torch.cat(test).sort().values


class VictimBatch(NamedTuple):
    """The private batch of one simulated client: images `(n, c, h, w)` in [0, 1] and labels `(n,)`.

    `index` is the position among all batches of the run, `ids` `(n,)` those of the images in the test split.
    """

    index: int  # type: ignore[assignment]  # the method of the same name that tuples have is not missed
    images: Tensor
    labels: Tensor
    ids: Tensor


def sample_victims(labels: Tensor, n: int = 50, seed: int = 0) -> Tensor:
    """Indices `(n,)` of different images, with as equal a number from every class of `labels` `(N,)` as they allow.

    Classes take turns in random order: every prefix of the result is the sample of that size. A ConfigError says that
    `n` is below 1 or above the number of images.
    """
    if not 1 <= n <= len(labels):
        raise ConfigError(f"n victims must be 1 to {len(labels)}, the number of images to draw from; got {n}")
    generator = seeded_generator(seed, "victims")
    drawn = torch.randperm(len(labels), generator=generator)
    by_class = torch.argsort(labels[drawn], stable=True)
    _, counts = labels.unique(return_counts=True)
    turn = torch.cat([torch.arange(int(count)) for count in counts])
    # in every turn each class that still has an image gives one, in random order
    keys = turn + torch.rand(len(labels), generator=generator, dtype=torch.float64)
    return drawn[by_class[keys.argsort()[:n]]]


def victim_batches(
    labels: Tensor, indices: Tensor, batch_size: int, distinct_labels: bool = True, seed: int = 0
) -> list[Tensor]:
    """Group victims into full batches, each victim in at most one; the others are left over.

    Args:
        labels: int64 `(N,)` of the set that `indices` point into.
        indices: victims `(n,)`, as from `sample_victims`.
        distinct_labels: every batch has different labels, and the number of batches is the largest possible.
            Otherwise the victims are shuffled and cut.

    Returns:
        Indices `(batch_size,)` of every batch; a ConfigError if there is none.
    """
    if not 1 <= batch_size <= len(indices):
        raise ConfigError(
            f"batch_size must be 1 to {len(indices)}, the number of victims; got {batch_size}: "
            "lower it, or raise victims.n"
        )
    generator = seeded_generator(seed, "victim batches")
    if not distinct_labels:
        shuffled = indices[torch.randperm(len(indices), generator=generator)]
        return list(shuffled[: len(indices) // batch_size * batch_size].split(batch_size))
    pools = [indices[labels[indices] == label].tolist() for label in labels[indices].unique()]
    if batch_size > len(pools):
        raise ConfigError(
            f"batches of {batch_size} distinct labels need victims of {batch_size} classes; the {len(indices)} victims "
            f"have {len(pools)}: lower batch_size, raise victims.n, or set distinct_labels to false"
        )
    batches = []
    while sum(map(bool, pools)) >= batch_size:
        # taking from the fullest classes keeps the most classes for later, which makes the number of batches maximal
        ties = torch.rand(len(pools), generator=generator).tolist()
        fullest = sorted(range(len(pools)), key=lambda k: (-len(pools[k]), ties[k]))[:batch_size]
        batches.append(torch.tensor([pools[k].pop(0) for k in fullest]))
    return batches
