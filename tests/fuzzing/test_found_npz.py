"""Archives of images that were read, or ended in another error, before they were fuzzed."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks.record import status_mib
from lit_recon.data.sources import Npz
from lit_recon.errors import LitReconError
from tests.fuzzing.archives import npy, npy_with, zipped
from tests.fuzzing.data_files import ARCHIVE, ARRAYS, bomb
from tests.fuzzing.payloads import CANARY, harmful_pickle

ENTRIES = [(f"{name}.npy", npy(array)) for name, array in ARRAYS.items()]


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(LitReconError) as error:
        Npz(path).load()
    assert str(path) in str(error.value)
    return str(error.value)


def without(name: str) -> list[tuple[str, bytes]]:
    return [entry for entry in ENTRIES if entry[0] != f"{name}.npy"]


def test_the_intact_archive_is_read(tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(ARCHIVE)
    train, test = Npz(tmp_path / "data.npz").load()
    assert len(train) == 20
    assert len(test) == 10


def test_two_arrays_of_one_name(tmp_path: Path) -> None:
    for name in ("train_labels.npy", "train_labels"):
        assert "several arrays train_labels" in refused(
            tmp_path / "data.npz", zipped([*ENTRIES, (name, npy(np.zeros(20, np.int64)))])
        )


def test_a_shape_that_was_damaged_hides_no_damage(tmp_path: Path) -> None:
    """NumPy stops reading where the array ends, and so before the checksum."""
    place = ARCHIVE.index(b"(20, 8, 8, 3)")
    assert "Bad CRC-32" in refused(tmp_path / "data.npz", ARCHIVE[: place + 1] + b"1" + ARCHIVE[place + 2 :])


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    content = bomb(2**28)
    assert len(content) < 2**19
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    assert "unpack to" in refused(tmp_path / "data.npz", content)
    assert status_mib("VmHWM") - before < 64


def test_an_archive_that_is_packed_well_is_read(tmp_path: Path) -> None:
    np.savez_compressed(
        tmp_path / "data.npz", train_images=np.zeros((500, 32, 32), np.uint8) + 7, train_labels=np.arange(500) % 2
    )
    assert len(Npz(tmp_path / "data.npz").load()[0]) == 450


@pytest.mark.parametrize(
    "entry",
    [
        b"no array",
        npy_with("(" * 3000, b""),
        npy_with({"descr": "|u1", "fortran_order": False, "shape": (2**62, 2**62)}, b""),
        npy_with({"descr": "<U999999999", "fortran_order": False, "shape": (20,)}, b""),
        npy_with("{'descr': '|u1', 'fortran_order': False, 'shape': (2", b""),
    ],
    ids=["bytes", "nested", "huge", "wide", "cut"],
)
def test_entries_that_are_no_arrays(tmp_path: Path, entry: bytes) -> None:
    refused(tmp_path / "data.npz", zipped([*without("train_images"), ("train_images.npy", entry)]))


@pytest.mark.parametrize("field", [8, 10], ids=["encrypted", "another method"])
def test_entries_that_zip_cannot_read(tmp_path: Path, field: int) -> None:
    place = ARCHIVE.index(b"PK\x01\x02") + field
    refused(tmp_path / "data.npz", ARCHIVE[:place] + struct.pack("<H", 99) + ARCHIVE[place + 2 :])


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    CANARY.unlink(missing_ok=True)
    header = npy_with({"descr": "|O", "fortran_order": False, "shape": (20,)}, b"")
    for name in ("train_labels", "class_names", "train_images"):
        refused(tmp_path / "data.npz", zipped([*without(name), (f"{name}.npy", header + harmful_pickle())]))
        refused(tmp_path / "data.npz", zipped([*without(name), (f"{name}.npy", harmful_pickle())]))
    refused(tmp_path / "data.npz", harmful_pickle())
    assert not CANARY.exists()


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mcat", "\ud800"])
def test_names_of_classes_that_cannot_be_printed(tmp_path: Path, name: str) -> None:
    names = npy(np.array([name, "dog", "fox"]))
    content = zipped([*without("class_names"), ("class_names.npy", names)])
    assert "rename them" in refused(tmp_path / "data.npz", content)
