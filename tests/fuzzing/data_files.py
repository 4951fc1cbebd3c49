"""Readers of image data: `.npz` archives, folders of images, and the files of MNIST and CIFAR."""

from __future__ import annotations

import functools
import gzip
import io
import struct
import zipfile
import zlib
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from lit_recon.data.sources import CIFAR10, MNIST, ImageFolder, Npz
from tests.fuzzing.archives import changed_npy, misfiled, npy, npy_with, rezipped, zipped
from tests.fuzzing.harness import Files, Link, Reader
from tests.fuzzing.mutations import damaged, intact_or, pick
from tests.fuzzing.payloads import SCRIPTS, harmful_pickle

_RANDOM = np.random.default_rng(0)
_IMAGES = _RANDOM.integers(256, size=(20, 8, 8, 3), dtype=np.uint8)
_LABELS = np.arange(20) % 3
ARRAYS = {
    "train_images": _IMAGES,
    "train_labels": _LABELS,
    "test_images": _IMAGES[:10, ..., 0][..., None].repeat(3, 3),
    "test_labels": _LABELS[:10],
    "class_names": np.array(["cat", "dog", "fox"]),
}
_ENTRIES = [(f"{name}.npy", npy(array)) for name, array in ARRAYS.items()]
ARCHIVE = zipped(_ENTRIES)
#: The archive compressed and without a test split.
_SMALL = zipped(_ENTRIES[:2], zipfile.ZIP_DEFLATED)


def _change(name: str, content: bytes) -> st.SearchStrategy[bytes]:
    pickled = npy_with({"descr": "|O", "fortran_order": False, "shape": (20,)}, b"") + harmful_pickle()
    return changed_npy(content) | st.sampled_from((b"", harmful_pickle(), pickled, npy(np.array([3]))))


def bomb(size: int) -> bytes:
    """An archive whose images unpack to `size` bytes of zeros."""
    header = npy(np.zeros((0, 8, 8), np.uint8)).replace(b"(0, 8, 8)", f"({size // 64}, 8, 8)".encode())
    length = struct.unpack("<H", header[8:10])[0]
    header = header[:8] + struct.pack("<H", length + len(header) - 10 - length) + header[10:]
    return zipped([("train_images.npy", header + bytes(size)), *_ENTRIES[1:2]], zipfile.ZIP_DEFLATED)


def _check_images(found: Any, files: Files) -> None:
    for images in found:
        assert images.images.shape[0] == len(images.labels) > 0
        assert 0 <= int(images.labels.min()) <= int(images.labels.max()) < len(images.class_names)
        assert all(name.isprintable() for name in images.class_names), images.class_names


def _check_archive(found: Any, files: Files) -> None:
    """An archive has checksums: what was damaged blindly is refused, or reads as before."""
    _check_images(found, files)
    content = files["data.npz"]
    assert isinstance(content, bytes)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        assert len(names) == len(set(names)), "two arrays of one name"
        assert archive.testzip() is None, "damaged content was read"
    train = found[0]
    if len(train) == len(_LABELS) and train.class_names == ["cat", "dog", "fox"]:
        assert train.images.shape[2:] == (8, 8)


NPZ = Reader(
    "Npz",
    ".npz archives",
    intact_or(
        ARCHIVE,
        rezipped(_ENTRIES, _change),
        rezipped(_ENTRIES, _change),
        damaged(ARCHIVE),
        damaged(_SMALL),
        misfiled(ARCHIVE),
    ).map(lambda content: {"data.npz": content}),
    lambda folder: Npz(folder / "data.npz").load(),
    _check_archive,
    short=150,
)


@functools.cache
def picture(kind: str, mode: str = "RGB", size: int = 12) -> bytes:
    """A small image file of random pixels."""
    bands = {"RGB": 3, "RGBA": 4, "LA": 2}.get(mode, 0)
    pixels = np.random.default_rng(1).integers(256, size=(size, size, bands) if bands else (size, size), dtype=np.uint8)
    image = Image.fromarray(pixels) if mode not in ("P", "1") else Image.fromarray(pixels).convert(mode)
    buffer = io.BytesIO()
    options: dict[str, Any] = {"transparency": 0} if mode == "P" and kind in ("PNG", "GIF") else {}
    if kind == "JPEG":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6  # turned by a quarter
    image.save(buffer, kind, **options)
    return buffer.getvalue()


PICTURES = {
    ("png", "RGB"): "PNG",
    ("png", "RGBA"): "PNG",
    ("png", "P"): "PNG",
    ("png", "1"): "PNG",
    ("png", "LA"): "PNG",
    ("jpg", "RGB"): "JPEG",
    ("jpeg", "L"): "JPEG",
    ("bmp", "RGB"): "BMP",
    ("gif", "P"): "GIF",
    ("webp", "RGB"): "WEBP",
    ("tif", "RGB"): "TIFF",
    ("ppm", "RGB"): "PPM",
    ("pgm", "L"): "PPM",
}
#: Files of other kinds, some of which a library might run as programs.
POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 12\n%%EndComments\n"
    b"(fuzzed-ran) (w) file closefile\nshowpage\n%%EOF\n"
)
_OTHER = (
    b"",
    POSTSCRIPT,
    b"P6 99999999 99999999 255\n",
    b"P5\n40000 40000\n255\n" + bytes(100),
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"\x89PNG\r\n\x1a\n",
    b"GIF89a\xff\xff\xff\xff\xf7\0\0",
    harmful_pickle(),
)


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def chunks_of(content: bytes) -> list[tuple[bytes, bytes]]:
    """Kinds and contents of the chunks of a PNG file."""
    found, place = [], 8
    while place < len(content):
        length = struct.unpack(">I", content[place : place + 4])[0]
        found.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + length]))
        place += 12 + length
    return found


@st.composite
def _rebuilt_png(draw: st.DrawFn, content: bytes) -> bytes:
    """A PNG with right checksums around a wrong header, wrong pixels, or strange chunks."""
    chunks = chunks_of(content)
    number = draw(st.integers(0, 99)) % len(chunks)
    kind, own = chunks[number]
    change = draw(st.sampled_from(("header", "damage", "repeat", "drop", "text", "pixels")))
    if change == "header":
        sizes = st.sampled_from((0, 1, 12, 13, 65_535, 20_000, 2**31 - 1, 2**32 - 1))
        fields = struct.pack(">II", draw(sizes), draw(sizes))
        rest = bytes(draw(st.sampled_from((value, 0, 1, 3, 16, 200))) for value in chunks[0][1][8:])
        chunks[0] = b"IHDR", fields + rest
    elif change == "damage":
        chunks[number] = kind, draw(damaged(own))
    elif change == "repeat":
        chunks.insert(number, (kind, own))
    elif change == "drop":
        del chunks[number]
    elif change == "text":
        text = zlib.compress(bytes(draw(st.sampled_from((10, 2_000_000)))))
        made = ((b"zTXt", b"Comment\0\0" + text), (b"iCCP", b"profile\0\0" + text), (b"eXIf", b"MM\0*" + own))
        chunks.insert(1, draw(st.sampled_from(made)))
    else:
        chunks = [(one, zlib.compress(draw(st.binary(max_size=600))) if one == b"IDAT" else had) for one, had in chunks]
    return content[:8] + b"".join(chunk(*one) for one in chunks)


@st.composite
def _file(draw: st.DrawFn) -> tuple[str, bytes]:
    """Ending and content of one image file."""
    (ending, mode), kind = draw(st.sampled_from(sorted(PICTURES.items())))
    content = picture(kind, mode)
    changed = damaged(content) | _rebuilt_png(content) if ending == "png" else damaged(content)
    content = draw(pick([(2, st.just(content)), (7, changed), (1, st.sampled_from(_OTHER) | st.binary(max_size=100))]))
    return draw(pick([(9, st.just(ending)), (1, st.sampled_from(("png", "txt", "PNG", "gif", "")))])), content


#: Names of folders, which become names of classes.
_NAMES = (
    "cat",
    "cat",
    "dog",
    ".hidden",
    "ä",
    "a b",
    "\udcff",
    "\x1b[31m",
    "a\nb",
    "-",
    *(s.replace("/", "") for s in SCRIPTS[:3]),
)


@st.composite
def image_folders(draw: st.DrawFn) -> dict[str, Any]:
    """A folder with classes of intact files, of which one or two are changed, and with odd folders and links."""
    intact = picture("PNG")
    files: dict[str, Any] = {f"root/{name}/{number}.png": intact for name in ("cat", "dog") for number in range(2)}
    for number in range(draw(st.integers(1, 2))):
        ending, content = draw(_file())
        name = draw(st.sampled_from(_NAMES))
        files[f"root/{name}/x{number}.{ending}"] = content
    odd = draw(st.integers(0, 19))
    if odd == 0:
        files["root/empty"] = None
    elif odd == 1:
        files["root/loop"] = Link(".")
        files["root/cat/loop"] = Link("..")
    elif odd == 2:
        files["root/cat/gone.png"] = Link("nowhere.png")
    elif odd == 3:
        files["root/cat/zero.png"] = Link("/dev/zero")
    elif odd == 4:
        files["root/cat/folder.png"] = None
    elif odd == 5:
        files |= {f"root/{part}/{name}/0.png": intact for part in ("train", "test") for name in ("a", "b")}
    elif odd == 6:
        files = {"root": draw(st.sampled_from((b"", None, Link("root"))))}
    return files


def _check_folder(found: Any, files: Files) -> None:
    _check_images(found, files)


IMAGE_FOLDER = Reader(
    "ImageFolder",
    "image files, folders",
    image_folders(),
    lambda folder: [*ImageFolder(folder / "root", size=8).load()],
    _check_folder,
    short=120,
)


def _idx(images: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, images.ndim]) + struct.pack(f">{images.ndim}I", *images.shape)
    return head + images.tobytes()


_DIGITS = {
    f"MNIST/raw/{part}-{kind}-ubyte": _idx(_IMAGES[..., 0] if kind.startswith("images") else _LABELS.astype(np.uint8))
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
}


@st.composite
def _mnist(draw: st.DrawFn) -> dict[str, bytes]:
    """The unpacked files of MNIST with one of them damaged."""
    name = draw(st.sampled_from(sorted(_DIGITS)))
    content = _DIGITS[name]
    head = bytes(draw(st.sampled_from((0, 1, 8, 9, 11, 13, 14, 255))) for _ in range(4))
    sizes = draw(st.lists(st.sampled_from((0, 1, 8, 20, 2**31, 2**32 - 1)), max_size=4))
    headed = head[:2] + head[2:] + struct.pack(f">{len(sizes)}I", *sizes) + content[16:]
    options = st.sampled_from((content, b"", headed, harmful_pickle(), gzip.compress(content)))
    return {**_DIGITS, name: draw(damaged(content) | options)}


MNIST_FILES = Reader(
    "MNIST",
    "idx files",
    _mnist(),
    lambda folder: MNIST(folder, download=False).load(),
    _check_images,
    short=40,
    names=("MNIST/raw",),
)
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
CIFAR_FILES = Reader(
    "CIFAR10",
    "pickled batches",
    st.tuples(st.sampled_from(_BATCHES), st.binary(max_size=30) | st.just(harmful_pickle())).map(
        lambda one: (
            {f"cifar-10-batches-py/{name}": harmful_pickle() for name in _BATCHES}
            | {f"cifar-10-batches-py/{one[0]}": one[1]}
        )
    ),
    lambda folder: CIFAR10(folder, download=False).load(),
    short=15,
    names=("cifar-10-batches-py",),
)
