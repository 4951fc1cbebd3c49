from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_recon.io import files as atomic
from lit_recon.io.files import is_leftover, with_contents, write_bytes, write_text

ENDLESS_WRITER = """
import sys
from pathlib import Path
from lit_recon.io.files import write_bytes
path, size = Path(sys.argv[1]), 2_000_000
write_bytes(path, b"a" * size)
print("started", flush=True)
while True:
    write_bytes(path, b"b" * size)
    write_bytes(path, b"a" * size)
"""


def test_content_and_folder_appear(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.txt"
    write_text(path, "größer\r\nals\n")
    assert path.read_bytes() == "größer\r\nals\n".encode()
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_a_file_gets_the_rights_that_other_new_files_get(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_bytes(tmp_path / "ours", b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_an_error_of_the_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(atomic.os, name, read_only)
    with pytest.raises(OSError, match="Read-only") as caught:
        write_bytes(tmp_path / "file", b"new")
    assert (caught.value.errno, caught.value.filename) == (30, str(tmp_path / "file"))


def test_who_reads_meanwhile_goes_on_seeing_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with path.open("rb") as reader:
        write_bytes(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.11])
def test_a_killed_writer_never_leaves_half_a_file(tmp_path: Path, delay: float) -> None:
    path = tmp_path / "file"
    command = [sys.executable, "-c", ENDLESS_WRITER, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    content = path.read_bytes()
    assert content in (b"a" * 2_000_000, b"b" * 2_000_000)
    assert all(is_leftover(entry) for entry in tmp_path.iterdir() if entry != path)


def test_settings_with_contents_change_with_a_file_that_they_name(tmp_path: Path) -> None:
    path, others = tmp_path / "data.npz", ["digits", "", "~nobody/x", "a\0b", "x" * 5000, 1, None, str(tmp_path)]
    settings = {"data": {"init_args": {"root": str(path)}}, "several": [str(path), *others], "others": others}
    assert with_contents(settings) == settings
    path.write_bytes(b"one")
    first = with_contents(settings)
    assert first["data"]["init_args"]["root"][0] == first["several"][0][0] == str(path)
    assert first["others"] == first["several"][1:] == others
    path.write_bytes(b"others")
    second = with_contents(settings)
    assert second["data"] != first["data"]
    assert second["several"] != first["several"]
    write_bytes(path, b"one")
    assert with_contents(settings) == first


def test_a_file_is_read_once_for_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"weights")
    read: list[Path] = []
    monkeypatch.setattr(atomic, "file_hash", lambda path: read.append(path) or "digest")
    for _ in range(3):
        assert with_contents({"weights": str(path)}) == {"weights": [str(path), "digest"]}
    assert read == [path]
