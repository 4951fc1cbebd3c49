"""Images in one NumPy archive."""

from __future__ import annotations

import zipfile
import zlib
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
                f"is a test split; {', '.join(missing)} missing, found {', '.join(arrays) or 'none'}"
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
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise CorruptFileError(f"{path}: expected an .npz archive of arrays; got a single array: use np.savez")
            return {key: archive[key] for key in archive.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise CorruptFileError(
            f"{path}: cannot be read as an .npz file of plain arrays ({error}); it is truncated or of another format: "
            "copy it again, or write it with np.savez"
        ) from error


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
