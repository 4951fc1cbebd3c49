"""A set of labeled images held in memory as bytes, and its channel statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.records import Normalization


def seeded_generator(seed: int, *purpose: int | str) -> torch.Generator:
    """A CPU generator for one purpose, such as `seeded_generator(seed, "shuffle", epoch)`, seeded by a hash of both."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labeled images of one shape.

    Attributes:
        images: uint8 `(N, c, h, w)` with one or three channels.
        labels: int64 `(N,)`, each below `n_classes`.
        class_names: one per class.
        name: for messages and reports, such as `cifar10 train`.

    A `ShapeError` says that dtype, shape or value range differ from the above, or that the set is empty.
    """

    images: Tensor
    labels: Tensor
    class_names: list[str]
    name: str

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4 or self.images.shape[1] not in (1, 3):
            raise ShapeError(
                f"{self.name}: images must be uint8 (N, c, h, w) with 1 or 3 channels; "
                f"got {self.images.dtype} {tuple(self.images.shape)}: convert them"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ShapeError(
                f"{self.name}: labels must be int64 ({len(self.images)},), one per image; "
                f"got {self.labels.dtype} {tuple(self.labels.shape)}: give a label for every image"
            )
        if not self.images.numel():
            raise ShapeError(
                f"{self.name}: an image set needs at least one image; got {tuple(self.images.shape)}: add some"
            )
        unprintable = [name for name in self.class_names if not name.isprintable()]
        if unprintable:
            raise ShapeError(
                f"{self.name}: names of classes must be text without control characters; got "
                f"{', '.join(map(ascii, unprintable[:4]))}: rename them"
            )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.n_classes:
            raise ShapeError(
                f"{self.name}: labels must be 0 to {self.n_classes - 1}, the indices of the {self.n_classes} classes; "
                f"got {low} to {high}: renumber the labels, or name every class"
            )

    @classmethod
    def from_arrays(
        cls, images: NDArray[np.uint8], labels: NDArray[np.integer], classes: list[str], name: str
    ) -> ImageSet:
        """Copy images `(N, h, w, c)` or, for one channel, `(N, h, w)`, and integer labels `(N,)` into a set."""
        if images.dtype != np.uint8:
            kinds = {"f": "floats in [0, 1] as np.round(images * 255)", "b": "black and white as (images * 255)"}
            remedy = kinds.get(images.dtype.kind, "numbers of 0 to 255 as images")
            raise ShapeError(
                f"{name}: images must be uint8, 0 to 255; got {images.dtype}: save {remedy}.astype(np.uint8)"
            )
        if images.ndim == 3:
            images = images[..., np.newaxis]
        if images.ndim != 4 or images.shape[3] not in (1, 3):
            channels_first = images.ndim == 4 and images.shape[1] in (1, 3)
            last = "save images.transpose(0, 2, 3, 1)" if channels_first else "save them so"
            if images.ndim == 4 and images.shape[3] == 4 and not channels_first:
                last = "save images[..., :3], without transparency"
            remedy = f"; channels come last here: {last}"
            raise ShapeError(
                f"{name}: images must be (N, h, w, 1), (N, h, w, 3) or (N, h, w); got {images.shape}{remedy}"
            )
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ShapeError(
                f"{name}: labels must be integers (N,); got {labels.dtype} {labels.shape}: "
                "save a column as labels.ravel(), one-hot rows as labels.argmax(1)"
            )
        channels_last = torch.from_numpy(np.require(images, requirements=["C", "W"]))
        copied = channels_last.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        return cls(copied, torch.from_numpy(labels.astype(np.int64)), classes, name)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(c, h, w)`."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def n_classes(self) -> int:
        """Number of classes, with or without an image in this set."""
        return len(self.class_names)

    def pixels(self, indices: Tensor | None = None) -> Tensor:
        """Images at `indices` `(n,)`, or all of them, as float32 `(n, c, h, w)` in [0, 1]."""
        chosen = self.images if indices is None else self.images.index_select(0, indices)
        return chosen.to(torch.float32).div_(255)

    def subset(self, indices: Tensor, name: str | None = None) -> ImageSet:
        """The images at `indices` `(n,)`, in that order, with the same classes and, unless given, the same name."""
        return ImageSet(self.images.index_select(0, indices), self.labels[indices], self.class_names, name or self.name)

    def __repr__(self) -> str:
        return f"ImageSet({self.name!r}, {len(self)} images {self.image_shape}, {self.n_classes} classes)"


def fingerprints(images: ImageSet | Tensor) -> Tensor:
    """Hashes `(N,)`, int64, of the shape and bytes `(N, c, h, w)` of every image; labels do not count."""
    pixels = images.images if isinstance(images, ImageSet) else images
    shape = repr(tuple(pixels.shape[1:])).encode()
    rows = pixels.flatten(1).contiguous().numpy()
    digests = (hashlib.blake2b(row.tobytes(), digest_size=8, key=shape).digest() for row in rows)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=torch.int64)


def of_classes(images: ImageSet, classes: Mapping[int, int] | None) -> Tensor:
    """Positions of the images that `relabelled` keeps."""
    if classes is None:
        return torch.arange(len(images))
    return torch.nonzero(torch.isin(images.labels, torch.tensor([*classes]))).flatten()


def relabelled(images: ImageSet, classes: Mapping[int, int] | None) -> ImageSet:
    """The images of some classes, with other numbers; classes of one number become one. A ConfigError for no class."""
    if classes is None:
        return images
    unknown = [number for number in classes if not 0 <= number < images.n_classes]
    if unknown:
        raise ConfigError(f"examples.classes names classes {unknown}; {images.name} has 0 to {images.n_classes - 1}")
    table = torch.full((images.n_classes,), -1).index_copy(
        0, torch.tensor([*classes]), torch.tensor([*classes.values()])
    )
    kept = of_classes(images, classes)
    names = [
        " ".join(images.class_names[number] for number, own in classes.items() if own == label)
        for label in range(max(classes.values()) + 1)
    ]
    return ImageSet(images.images[kept], table[images.labels[kept]], names, images.name)


def without(images: ImageSet, others: Tensor) -> ImageSet:
    """The images that are none of `others`, `(n, c, h, w)` in [0, 1]; a ConfigError if none is left."""
    pixels = (255 * others).round().to(torch.uint8).cpu()
    kept = (~torch.isin(fingerprints(images), fingerprints(pixels))).nonzero().flatten()
    if not len(kept):
        raise ConfigError(f"no image of {images.name} is left without {len(pixels)} given ones: give other data")
    return images.subset(kept)


def measure_normalization(images: ImageSet) -> Normalization:
    """Mean and (biased) standard deviation of each channel over all pixels, in units of [0, 1].

    Computed from the histogram of the 256 levels, so that the result does not depend on the order of summation. A
    ShapeError says that a channel is constant.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(images.image_shape[0]):
        chunks = images.images[:, channel].split(1024)
        counts = torch.stack([torch.bincount(chunk.flatten(), minlength=256) for chunk in chunks]).sum(dim=0)
        weights = counts.double() / counts.sum()
        mean = (weights * levels).sum()
        variance = (weights * (levels - mean).square()).sum()
        means.append(mean.item())
        stds.append(variance.sqrt().item())
    if min(stds) == 0:
        raise ShapeError(
            f"{images.name}: every pixel of a channel has the same value (means {means}); use other images"
        )
    return Normalization(tuple(means), tuple(stds))
