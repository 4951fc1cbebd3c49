"""Images in one sub-folder per class."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_recon.data.dataset import ImageSet
from lit_recon.data.sources.base import ImageSource
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, ShapeError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
#: What the files may be, whatever their endings: other decoders of Pillow start programs, as for PostScript.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
#: Names of the folder of test images beside `train`; the first one that is there is read.
_TEST = ("test", "val", "valid", "validation")
#: Names of folders that are hardly classes when they hold folders, in lower case.
_SPLITS = {"train", "training", "testing", *_TEST}


@dataclass(frozen=True)
class ImageFolder(ImageSource):
    """A folder with one sub-folder of image files per class; or two such folders, named `train` and `test`.

    Without `test`, the test images are those of `val`, `valid` or `validation`. The sorted names of the sub-folders are
    the classes; hidden files and folders, whose names begin with a dot, are passed over. Transparent pixels are blended
    with white; EXIF rotation is applied.

    Args:
        root: the folder.
        size: crop every image centrally to a square and resize it to this side; needed if the images differ in size.
        grayscale: one channel instead of three (RGB).
        holdout: share of every class that is held out when there are no such two folders.
        seed: of that draw.
    """

    root: Path
    size: int | None = None
    grayscale: bool = False
    holdout: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ConfigError(f"ImageFolder: size must be at least 1 pixel; got {self.size}")

    @property
    def name(self) -> str:
        """The folder's name."""
        return Path(self.root).expanduser().resolve().name

    def read(self) -> tuple[ImageSet, ImageSet]:
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise MissingDataError(
                f"{root}: expected a folder with one sub-folder of images per class; there is none: set root"
            )
        test = next((name for name in _TEST if (root / name).is_dir()), None)
        if (root / "train").is_dir() and test is not None:
            train = self._read_tree(root / "train", f"{self.name} train")
            return train, self._read_tree(root / test, f"{self.name} {test}", train.class_names)
        _refuse_splits(root)
        return self._held_out(self._read_tree(root, self.name), self.holdout, self.seed)

    def _read_tree(self, root: Path, name: str, classes: list[str] | None = None) -> ImageSet:
        folders = _class_folders(root)
        classes = classes or [folder.name for folder in folders]
        arrays: list[NDArray[np.uint8]] = []
        labels: list[int] = []
        files: list[Path] = []
        for folder in folders:
            if folder.name not in classes:
                raise ShapeError(f"{folder}: expected one of the training classes {classes}; got {folder.name!r}")
            for file in _image_files(folder):
                files.append(file)
                arrays.append(_read_image(file, self.size, self.grayscale))
                labels.append(classes.index(folder.name))
                if arrays[-1].shape != arrays[0].shape:
                    raise ShapeError(
                        f"images must have one size; {files[0]} is {arrays[0].shape[1]}x{arrays[0].shape[0]} and "
                        f"{file} is {arrays[-1].shape[1]}x{arrays[-1].shape[0]}: pass size= to crop and resize all"
                    )
        return ImageSet.from_arrays(np.stack(arrays), np.array(labels), classes, name)


def _class_folders(root: Path) -> list[Path]:
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and not _hidden(folder))
    if not folders:
        raise MissingDataError(
            f"{root}: expected one sub-folder of images per class; there are no sub-folders: set root"
        )
    return folders


def _refuse_splits(root: Path) -> None:
    """Refuse folders of splits that no rule pairs: their names would become the classes."""
    for folder in _class_folders(root):
        if folder.name.lower() in _SPLITS and any(inner.is_dir() and not _hidden(inner) for inner in folder.iterdir()):
            raise MissingDataError(
                f"{folder}: expected the images of a class; there are folders in a folder that is named like a split: "
                f"name the splits train and test (or {', '.join(_TEST[1:])}), or the class otherwise"
            )


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _image_files(folder: Path) -> list[Path]:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in _SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise MissingDataError(
            f"{folder}: expected image files ({', '.join(sorted(_SUFFIXES))}); there are none: remove the folder"
        )
    return files


def _read_image(file: Path, size: int | None, grayscale: bool) -> NDArray[np.uint8]:
    """Pixels `(h, w, 3)`, or `(h, w)` in grayscale."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=_FORMATS) as opened:
                if opened.format == "PNG":
                    opened.verify()  # checksums of the pixels, which decoding does not compare
            with Image.open(file, formats=_FORMATS) as opened:
                image = ImageOps.exif_transpose(opened)
                image.load()
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        raise CorruptFileError(f"{file}: cannot be decoded as an image ({error}): replace or remove it") from error
    if image.mode.startswith(("I", "F")):
        raise ShapeError(f"{file}: expected 8 bits per channel; got mode {image.mode!r}: convert it to 8 bits first")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if grayscale else "RGB")
    if size is not None:
        image = ImageOps.fit(image, (size, size), method=Image.Resampling.BICUBIC)
    return np.asarray(image)
