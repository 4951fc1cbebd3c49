"""CIFAR-10, CIFAR-100 and MNIST: read from a folder, downloaded into it by torchvision when they are not there."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lit_recon.data.dataset import ImageSet
from lit_recon.data.sources.base import ImageSource
from lit_recon.data.sources.npz import Npz
from lit_recon.errors import CorruptFileError, MissingDataError

#: Seconds to wait for a first answer, per address of a host, and for the next bytes of a download.
CONNECT_TIMEOUT, READ_TIMEOUT = 8.0, 20.0

_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class PublishedSource(ImageSource):
    """A published data set in a folder `root`: an archive `<name>.npz` (arrays as for `Npz`), or the original files.

    torchvision verifies the original files by their checksums, unpacks them, and downloads them if asked.
    """

    root: Path
    download: bool = True

    classes: ClassVar[tuple[str, ...]]
    folder: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    #: What is downloaded and unpacked into `folder`, relative to `root`.
    packed: ClassVar[tuple[str, ...]]

    @property
    def _torchvision(self) -> Any:
        """The data set class of the same name in torchvision."""
        from lit_recon._torchvision import import_torchvision

        return getattr(import_torchvision().datasets, type(self).__name__)

    def _dataset(self, train: bool, download: bool) -> Any:
        return self._torchvision(self._root, train=train, download=download)

    @abstractmethod
    def _urls(self) -> list[str]:
        """Addresses of the same file, in the order in which torchvision tries them."""

    @property
    def _root(self) -> Path:
        return Path(self.root).expanduser()

    @property
    def _archive(self) -> Path:
        return self._root / f"{self.name}.npz"

    def prepare(self) -> None:
        """Unpack or download the original files where needed; of processes that share the folder one does so."""
        if self._archive.is_file() or self._has_files():
            return
        is_packed = all((self._root / file).is_file() for file in self.packed)
        if self._root.is_file():
            raise MissingDataError(
                f"{self._root}: root must be a folder; got a file: pass its folder, or use Npz for it"
            )
        if not self.download and not is_packed:
            raise self._missing("and download is false")
        from filelock import FileLock

        try:
            if not is_packed:
                _probe(self._urls())
            self._root.mkdir(parents=True, exist_ok=True)
            with FileLock(self._root / f".{self.name}.lock"), _read_timeout():
                if not self._has_files():  # another process may have been faster
                    self._dataset(train=True, download=True)
        except (OSError, http.client.HTTPException, RuntimeError) as error:  # RuntimeError: a checksum differs
            raise self._missing(f"and the download failed ({error})") from error

    def read(self) -> tuple[ImageSet, ImageSet]:
        if self._archive.is_file():
            return Npz(self._archive, class_names=list(self.classes)).read()
        try:
            parts = [self._dataset(train=train, download=False) for train in (True, False)]
        except (RuntimeError, ValueError, TypeError, AssertionError, KeyError, EOFError) as error:
            raise CorruptFileError(
                f"{self._root / self.folder}: the files of {type(self).__name__} are incomplete or damaged ({error}): "
                "delete that folder and run again to download them, or copy them again"
            ) from error
        arrays = [(np.asarray(part.data), np.asarray(part.targets), list(self.classes)) for part in parts]
        train, test = (
            ImageSet.from_arrays(*part, f"{self.name} {word}")
            for part, word in zip(arrays, ("train", "test"), strict=True)
        )
        return train, test

    def _has_files(self) -> bool:
        return all((self._root / self.folder / file).is_file() for file in self.files)

    def _missing(self, why: str) -> MissingDataError:
        address = self._urls()[0].rpartition("/")[0]
        return MissingDataError(
            f"{type(self).__name__}: no {self._archive.name} and no complete {self.folder} in {self._root}, {why}: "
            f"put one of them or {', '.join(self.packed)} (from {address}) there, set root to a "
            "folder that has it, or use a source that needs no download, such as Digits, Npz or ImageFolder"
        )


class CIFAR10(PublishedSource):
    """60,000 color images 32x32 of ten classes, 10,000 of them for testing. Uses `cifar10.npz` where root has one.

    Args:
        root: folder with `cifar10.npz` or `cifar-10-batches-py`.
        download: fetch the latter if neither is there (170 MB).

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """

    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    folder = "cifar-10-batches-py"
    files = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
    packed = ("cifar-10-python.tar.gz",)

    def _urls(self) -> list[str]:
        return [self._torchvision.url]


class CIFAR100(PublishedSource):
    """60,000 color images 32x32 of 100 (fine) classes, 10,000 for testing. Uses `cifar100.npz` where root has one.

    Args:
        root: folder with `cifar100.npz` or `cifar-100-python`.
        download: fetch the latter if neither is there (169 MB).

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """

    classes = tuple(_CIFAR100.split())
    folder = "cifar-100-python"
    files = ("train", "test", "meta")
    packed = ("cifar-100-python.tar.gz",)

    def _urls(self) -> list[str]:
        return [self._torchvision.url]


class MNIST(PublishedSource):
    """70,000 gray images 28x28 of handwritten digits, 10,000 of them for testing. Uses `mnist.npz` where root has one.

    Args:
        root: folder with `mnist.npz` or `MNIST/raw`.
        download: fetch the latter if neither is there (12 MB).

    Source: LeCun, Bottou, Bengio, Haffner, Gradient-Based Learning Applied to Document Recognition, 1998.
    """

    classes = tuple("0123456789")
    folder = "MNIST/raw"
    files = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    packed = tuple(f"MNIST/raw/{part}.gz" for part in files)

    def _urls(self) -> list[str]:
        return [mirror + self._torchvision.resources[0][0] for mirror in self._torchvision.mirrors]


def _probe(urls: list[str]) -> None:
    """Request the header of each file until one host answers: torchvision itself has no timeout."""
    for position, url in enumerate(urls, start=1):
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_TIMEOUT).close()
            return
        except urllib.error.HTTPError:
            return  # the host is there; the download finds out whether it has the file
        except (OSError, http.client.HTTPException):
            if position == len(urls):
                raise


@contextmanager
def _read_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(READ_TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
