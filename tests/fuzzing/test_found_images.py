"""Folders of images that were read, or ended in another error, before they were fuzzed."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_recon.data.sources import ImageFolder
from lit_recon.errors import CorruptFileError, LitReconError, ShapeError
from tests.fuzzing.data_files import POSTSCRIPT, chunk, chunks_of, picture


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes of two images."""
    for name in ("cat", "dog"):
        (tmp_path / "root" / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "root" / name / f"{number}.png").write_bytes(picture("PNG"))
    return tmp_path / "root"


def refused(root: Path, content: bytes, name: str = "odd.png") -> str:
    (root / "cat" / name).write_bytes(content)
    with pytest.raises(LitReconError) as error:
        ImageFolder(root, size=8).load()
    assert name in str(error.value)
    return str(error.value)


def test_pixels_whose_checksum_differs(root: Path) -> None:
    """Pillow decodes them: the checksum of pixels is compared only if asked for."""
    content = bytearray(picture("PNG"))
    place = content.index(b"IDAT") + 4
    length = int.from_bytes(content[place - 8 : place - 4], "big")
    pixels = bytearray(zlib.decompress(content[place : place + length]))
    pixels[5] ^= 1
    other = zlib.compress(bytes(pixels))
    stored = content[place + length : place + length + 4]
    damaged = (
        content[: place - 8] + len(other).to_bytes(4, "big") + b"IDAT" + other + stored + content[place + length + 4 :]
    )
    with Image.open(io.BytesIO(damaged)) as image:
        assert np.asarray(image).any()
    assert "cannot be decoded" in refused(root, bytes(damaged))


def test_programs_are_not_started(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pillow gives PostScript to Ghostscript, whatever the file is called."""
    started = tmp_path / "started"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {started}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    refused(root, POSTSCRIPT)
    assert not started.exists()


@pytest.mark.parametrize("size", [12_000, 60_000])
def test_images_that_claim_too_many_pixels(root: Path, size: int) -> None:
    chunks = chunks_of(picture("PNG"))
    header = size.to_bytes(4, "big") * 2 + chunks[0][1][8:]
    content = picture("PNG")[:8] + b"".join(chunk(*one) for one in [(b"IHDR", header), *chunks[1:]])
    refused(root, content)


def test_damaged_metadata_warns_of_nothing(root: Path) -> None:
    """Pillow warns of tags that it leaves out; warnings are errors here."""
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(buffer, "TIFF", description="a" * 100)
    content, ends = buffer.getvalue(), set()
    for place in range(8, len(content), 3):
        (root / "cat" / "x.tif").write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        with contextlib.suppress(CorruptFileError, ShapeError):
            ImageFolder(root, size=8).load()
            ends.add("read")
    assert ends == {"read"}


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "\udcff"])
def test_folders_whose_names_cannot_be_printed(root: Path, name: str) -> None:
    (root / name).mkdir()
    (root / name / "0.png").write_bytes(picture("PNG"))
    with pytest.raises(ShapeError, match="rename them") as error:
        ImageFolder(root, size=8).load()
    assert str(root) in str(error.value)


def test_links_in_circles_and_to_nowhere(root: Path) -> None:
    (root / "cat" / "loop").symlink_to("..")
    (root / "cat" / "gone.png").symlink_to("nowhere.png")
    assert ImageFolder(root, size=8, holdout=0.5).load()[0].class_names == ["cat", "dog"]
    (root / "cat" / "zero.png").symlink_to("/dev/zero")
    assert ImageFolder(root, size=8, holdout=0.5).load()[0].class_names == ["cat", "dog"]


def test_a_folder_in_place_of_a_file_is_no_image(root: Path) -> None:
    (root / "cat" / "folder.png").mkdir()
    assert len(ImageFolder(root, size=8, holdout=0.5).load()[0]) == 2
