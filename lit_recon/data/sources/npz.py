"""Images in one NumPy archive."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_recon.data.dataset import ImageSet
from lit_recon.data.sources.base import ImageSource
from lit_recon.errors import CorruptFileError, MissingDataError, ShapeError


@dataclass(frozen=True)
class Npz(ImageSource):
    """An `.npz` file with `train_images` and `train_labels`, and with `test_images` and `test_labels` if it has them.

    Images are uint8 `(N, h, w, 3)`, `(N, h, w, 1)` or `(N, h, w)`; labels are integers `(N,)` from 0. Nothing in the
    file is unpickled.

    Args:
        root: the file.
        class_names: one per class; default: the array `class_names` of the file, or else the numbers of the labels,
            which then must be 0 to k - 1 without a gap in the training split.
        holdout: share of every class that is held out when the file has no test split.
        seed: of that draw.
    """

    root: Path
    class_names: list[str] | None = None
    holdout: float = 0.1
    seed: int = 0

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return Path(self.root).stem

    def read(self) -> tuple[ImageSet, ImageSet]:
        path = Path(self.root).expanduser()
        arrays = _read_arrays(path)
        wanted = ["train_images", "train_labels"]
        if "test_images" in arrays or "test_labels" in arrays:
            wanted += ["test_images", "test_labels"]
        missing = [key for key in wanted if key not in arrays]
        if missing:
            raise CorruptFileError(
                f"{path}: expected the arrays train_images and train_labels, and test_images and test_labels if there "
                f"is a test split; {', '.join(missing)} missing, found {', '.join(arrays) or 'none'}: write "
                "all of them with np.savez"
            )
        classes = self.class_names or _class_names(arrays, path)
        train = ImageSet.from_arrays(arrays["train_images"], arrays["train_labels"], classes, f"{self.name} train")
        if "test_images" in arrays:
            test = arrays["test_images"], arrays["test_labels"]
            return train, ImageSet.from_arrays(*test, classes, f"{self.name} test")
        return self._held_out(train, self.holdout, self.seed)


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        around = path if path.is_dir() else path.parent
        found = ", ".join(sorted(file.name for file in around.glob("*.npz"))) or "none"
        raise MissingDataError(
            f"{path}: expected an .npz file; there is none (.npz files in {around}: {found}): set root"
        )
    try:
        with path.open("rb") as file:
            # NumPy takes every other file for a pickle, and its error says how to load one unsafely
            if (start := file.peek(6)[:6]) and not start.startswith((b"PK", b"\x93NUMPY")):
                raise ValueError(f"it begins with {start!r}")
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise CorruptFileError(f"{path}: expected an .npz archive of arrays; got a single array: use np.savez")
            with zipfile.ZipFile(path) as entries:
                _check_entries(entries, path)
            arrays = {key: archive[key] for key in archive.files}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                raise ValueError("an entry is no array")
            return arrays
    except CorruptFileError:
        raise
    except Exception as error:  # damaged bytes raise errors of many kinds
        raise CorruptFileError(
            f"{path}: cannot be read as an .npz file of plain arrays ({error}); it is truncated or of another format: "
            "copy it again, or write it with np.savez"
        ) from error


#: Bytes that any archive may unpack to, and how many times its size above that: images are seldom packed so tightly.
_UNPACKED, _TIMES = 2**26, 200


def _check_entries(archive: zipfile.ZipFile, path: Path) -> None:
    """A CorruptFileError for arrays of one name, bytes that were changed, and far more content than an archive holds.

    NumPy keeps the last of two arrays of one name, and compares no checksum where an array is shorter than its entry.
    """
    names = [entry.filename.removesuffix(".npy") for entry in archive.infolist()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CorruptFileError(f"{path}: holds several arrays {', '.join(twice)}: write it again with np.savez")
    size = sum(entry.file_size for entry in archive.infolist())
    if size > max(_UNPACKED, _TIMES * path.stat().st_size):
        raise CorruptFileError(
            f"{path}: its {path.stat().st_size} bytes unpack to {size}, more than {_TIMES} times as much: if it holds "
            "images, write it with np.savez, which does not compress them"
        )
    if (damaged := archive.testzip()) is not None:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {damaged!r}")


def _class_names(arrays: dict[str, NDArray[Any]], path: Path) -> list[str]:
    if "class_names" in arrays:
        return [str(name) for name in arrays["class_names"].ravel()]
    present = np.unique(arrays["train_labels"])
    n_classes = len(present)
    if not np.array_equal(present, np.arange(n_classes)):
        raise ShapeError(
            f"{path}: training labels must be 0 to k - 1 with images of every class; got {n_classes} different labels "
            f"from {present[:1]} to {present[-1:]}: renumber them, or pass class_names"
        )
    return [str(label) for label in range(n_classes)]
