"""Disjoint parts of a set of images, hashes that identify them, and the stratified sample of victims."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_recon.data.dataset import ImageSet, seeded_generator
from lit_recon.errors import ConfigError


def split_hash(*indices: Tensor | NDArray[np.integer]) -> str:
    """16 hexadecimal digits that identify which images are in which part; the order within a part does not count."""
    digest = hashlib.sha256()
    for part in indices:
        members = np.sort(np.asarray(part, dtype="<i8"))
        digest.update(len(members).to_bytes(8, "little"))
        digest.update(members.tobytes())
    return digest.hexdigest()[:16]


def content_hash(*sets: ImageSet) -> str:
    """16 hexadecimal digits over pixels and labels: equal only if each set holds the same images in the same order."""
    digest = hashlib.sha256()
    for images in sets:
        digest.update(repr(tuple(images.images.shape)).encode())
        digest.update(images.images.contiguous().numpy().data)
        digest.update(images.labels.contiguous().numpy().data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Split:
    """Named parts of `range(n)`, int64 indices `(size,)` each; a ConfigError where an index is there twice."""

    parts: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        members = torch.cat(list(self.parts.values())) if self.parts else torch.empty(0, dtype=torch.int64)
        if len(members.unique()) != len(members):
            raise ConfigError(
                f"the parts {list(self.parts)} of a split must share no image; at least one is used twice"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    @property
    def hash(self) -> str:
        """`split_hash` of the parts in their order."""
        return split_hash(*self.parts.values())


def disjoint_split(n: int, sizes: dict[str, int], seed: int) -> Split:
    """Parts of the given sizes, at random; a ConfigError for a negative size or sizes that exceed `n`.

    >>> len(disjoint_split(10, {"fixed": 6, "shadow": 3}, seed=0)["shadow"])
    3
    """
    if min(sizes.values(), default=0) < 0 or sum(sizes.values()) > n:
        raise ConfigError(f"the parts of a split must be at least 0 and at most {n} in sum; got {sizes}")
    order = torch.randperm(n, generator=seeded_generator(seed, "split"))
    parts = order[: sum(sizes.values())].split(list(sizes.values()))
    return Split({name: part.sort().values for name, part in zip(sizes, parts, strict=True)})


def hold_out(labels: Tensor, fraction: float, seed: int) -> Split:
    """Parts `train` and `test`; `test` takes the fraction of every class, and at least one image where it has two.

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
    split = Split({"train": torch.cat(train).sort().values, "test": torch.cat(test).sort().values})
    if not len(split["test"]):
        raise ConfigError("no image can be held out for testing: every class has one image only; add images")
    return split


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
        batch_size: images per batch `B`.
        distinct_labels: every batch has `B` different labels, and the number of batches is the largest possible.
            Otherwise the victims are shuffled and cut.
        seed: of the grouping.

    Returns:
        Indices `(B,)` of every batch; a ConfigError if there is none.
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
        # taking from the fullest classes keeps the most classes for later, which makes the number of batches maximal
        ties = torch.rand(len(pools), generator=generator).tolist()
        fullest = sorted(range(len(pools)), key=lambda k: (-len(pools[k]), ties[k]))[:batch_size]
        batches.append(torch.tensor([pools[k].pop(0) for k in fullest]))
    return batches
