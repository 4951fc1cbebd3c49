"""The published sets: small files in their original formats, and a server of our own instead of the network."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import socket
import struct
import tarfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lit_recon._torchvision import import_torchvision

import numpy as np
import pytest

from lit_recon.data.sources import CIFAR10, CIFAR100, MNIST, published
from lit_recon.errors import CorruptFileError, MissingDataError, ShapeError

datasets = import_torchvision().datasets
RNG = np.random.default_rng(0)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def cifar10_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A CIFAR-10 of 20 training and 4 test images by file name, with torchvision's checksums to match."""
    content: dict[str, Any] = {}
    for name in CIFAR10.files[:-1]:
        rows = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
        content[name] = {"data": rows, "labels": RNG.integers(0, 10, 4).tolist()}
    content["batches.meta"] = {"label_names": list(CIFAR10.classes)}
    sums = {name: md5(pickle.dumps(value)) for name, value in content.items()}
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [[name, sums[name]] for name in CIFAR10.files[:5]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(datasets.CIFAR10, "meta", datasets.CIFAR10.meta | {"md5": sums["batches.meta"]})
    return content


def write_cifar10(root: Path, content: dict[str, Any]) -> None:
    (root / CIFAR10.folder).mkdir(parents=True)
    for name, value in content.items():
        (root / CIFAR10.folder / name).write_bytes(pickle.dumps(value))


@pytest.fixture
def served(tmp_path: Path, cifar10_files: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a local server offers, with the archive of the small CIFAR-10 in it."""
    folder = tmp_path / "served"
    folder.mkdir()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, value in cifar10_files.items():
            member = tarfile.TarInfo(f"{CIFAR10.folder}/{name}")
            member.size = len(pickle.dumps(value))
            tar.addfile(member, io.BytesIO(pickle.dumps(value)))
    (folder / "cifar.tar.gz").write_bytes(archive.getvalue())

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(datasets.CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/cifar.tar.gz")
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5(archive.getvalue()))
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def check_cifar10(root: Path, content: dict[str, Any]) -> None:
    train, test = CIFAR10(root, download=False).load()
    rows = np.concatenate([content[name]["data"] for name in CIFAR10.files[:5]])
    assert np.array_equal(train.images.flatten(1).numpy(), rows)  # the files hold channels first, as image sets do
    assert test.labels.tolist() == content["test_batch"]["labels"]
    assert train.class_names == list(CIFAR10.classes)
    assert (train.name, test.name) == ("cifar10 train", "cifar10 test")


def test_reads_the_original_cifar10(tmp_path: Path, cifar10_files: dict[str, Any]) -> None:
    write_cifar10(tmp_path, cifar10_files)
    check_cifar10(tmp_path, cifar10_files)


def test_downloads_cifar10(tmp_path: Path, cifar10_files: dict[str, Any], served: Path) -> None:
    CIFAR10(tmp_path / "new" / "folder").load()
    check_cifar10(tmp_path / "new" / "folder", cifar10_files)
    (served / "cifar.tar.gz").unlink()
    CIFAR10(tmp_path / "new" / "folder").load()  # a second time needs no server


def test_unpacks_what_was_fetched_elsewhere(tmp_path: Path, cifar10_files: dict[str, Any], served: Path) -> None:
    (tmp_path / "carried").mkdir()
    (served / "cifar.tar.gz").rename(tmp_path / "carried" / "cifar-10-python.tar.gz")
    CIFAR10(tmp_path / "carried", download=False).load()
    check_cifar10(tmp_path / "carried", cifar10_files)


def test_processes_download_once(
    tmp_path: Path, cifar10_files: dict[str, Any], served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = CIFAR10._dataset

    def counted(self: CIFAR10, train: bool, download: bool) -> Any:
        calls.append(download)
        return original(self, train, download)

    monkeypatch.setattr(CIFAR10, "_dataset", counted)
    threads = [threading.Thread(target=CIFAR10(tmp_path).prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [True]
    check_cifar10(tmp_path, cifar10_files)


def test_a_download_with_another_checksum(tmp_path: Path, served: Path) -> None:
    (served / "cifar.tar.gz").write_bytes(b"<html>please log in</html>")
    with pytest.raises(MissingDataError, match=r"the download failed \(File not found or corrupted"):
        CIFAR10(tmp_path).load()


def test_a_server_without_the_file(tmp_path: Path, served: Path) -> None:
    (served / "cifar.tar.gz").unlink()
    with pytest.raises(MissingDataError, match=r"the download failed \(HTTP Error 404"):
        CIFAR10(tmp_path).load()


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://name.invalid/cifar-10-python.tar.gz")
    root = tmp_path / "typo"
    with pytest.raises(MissingDataError) as caught:
        CIFAR10(root).load()
    message = str(caught.value)
    for part in (
        str(root),
        "cifar10.npz",
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        "name.invalid",
        "set root",
        "Npz",
        "Digits",
    ):
        assert part in message
    assert "\n" not in message
    assert not root.exists()


def test_a_silent_server_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "CONNECT_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr(datasets.MNIST, "mirrors", [address, address])
        start = time.monotonic()
        with pytest.raises(MissingDataError, match=r"MNIST: no mnist\.npz .*the download failed \(timed out\)"):
            MNIST(tmp_path).load()
    assert time.monotonic() - start < 5


def test_a_second_mirror_is_enough(served: Path) -> None:
    published._probe(["http://name.invalid/x", datasets.CIFAR10.url])


def test_a_download_that_stalls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "READ_TIMEOUT", 0.2)
    before = socket.getdefaulttimeout()
    with published._read_timeout(), socket.create_server(("127.0.0.1", 0)) as silent:
        connection = socket.create_connection(silent.getsockname())
        with connection, pytest.raises(TimeoutError):
            connection.recv(1)
    assert socket.getdefaulttimeout() == before


def test_download_can_be_forbidden(tmp_path: Path) -> None:
    with pytest.raises(
        MissingDataError, match=r"and download is false: put one of them or cifar-100-python\.tar\.gz \(from https"
    ):
        CIFAR100(tmp_path, download=False).load()


def test_root_is_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "cifar10.npz"
    path.write_bytes(b"")
    with pytest.raises(MissingDataError, match="root must be a folder; got a file: pass its folder"):
        CIFAR10(path).load()


def test_a_damaged_cifar10(tmp_path: Path, cifar10_files: dict[str, Any]) -> None:
    write_cifar10(tmp_path, cifar10_files)
    path = tmp_path / CIFAR10.folder / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptFileError, match=r"cifar-10-batches-py: the files of CIFAR10 .*delete that folder"):
        CIFAR10(tmp_path).load()


def test_reads_the_original_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / CIFAR100.folder
    folder.mkdir()
    content = {
        "train": {"data": RNG.integers(0, 256, (6, 3072), dtype=np.uint8), "fine_labels": [0, 99, 5, 7, 8, 9]},
        "test": {"data": RNG.integers(0, 256, (2, 3072), dtype=np.uint8), "fine_labels": [3, 4]},
        "meta": {"fine_label_names": list(CIFAR100.classes)},
    }
    for name, value in content.items():
        (folder / name).write_bytes(pickle.dumps(value))
    for attribute, name in (("train_list", "train"), ("test_list", "test")):
        monkeypatch.setattr(datasets.CIFAR100, attribute, [[name, md5(pickle.dumps(content[name]))]])
    meta = datasets.CIFAR100.meta | {"md5": md5(pickle.dumps(content["meta"]))}
    monkeypatch.setattr(datasets.CIFAR100, "meta", meta)
    train, test = CIFAR100(tmp_path).load()
    assert train.labels.tolist() == [0, 99, 5, 7, 8, 9]
    assert np.array_equal(test.images.flatten(1).numpy(), content["test"]["data"])
    assert train.n_classes == 100


def idx(array: np.ndarray) -> bytes:
    """The format of the original MNIST files: magic number, sizes as big-endian words, bytes."""
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(root: Path) -> dict[str, np.ndarray]:
    content = {}
    for part, n in (("train", 12), ("t10k", 5)):
        content[f"{part}-images-idx3-ubyte"] = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        content[f"{part}-labels-idx1-ubyte"] = RNG.integers(0, 10, n).astype(np.uint8)
    (root / MNIST.folder).mkdir(parents=True)
    for name, array in content.items():
        (root / MNIST.folder / name).write_bytes(idx(array))
    return content


def test_reads_the_original_mnist(tmp_path: Path) -> None:
    content = write_mnist(tmp_path)
    train, test = MNIST(tmp_path).load()
    assert np.array_equal(train.images[:, 0].numpy(), content["train-images-idx3-ubyte"])
    assert test.labels.tolist() == content["t10k-labels-idx1-ubyte"].tolist()
    assert test.image_shape == (1, 28, 28)


def test_unpacks_mnist_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write_mnist(tmp_path)
    for name in content:
        path = tmp_path / MNIST.folder / name
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    sums = [(f"{name}.gz", md5((tmp_path / MNIST.folder / f"{name}.gz").read_bytes())) for name in content]
    monkeypatch.setattr(datasets.MNIST, "resources", sums)
    assert np.array_equal(MNIST(tmp_path).load()[1].images[:, 0].numpy(), content["t10k-images-idx3-ubyte"])


@pytest.mark.parametrize("kept", [0, 3, 16, 500])
def test_a_damaged_mnist(tmp_path: Path, kept: int) -> None:
    write_mnist(tmp_path)
    path = tmp_path / MNIST.folder / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptFileError, match=r"MNIST.raw: the files of MNIST are incomplete or damaged"):
        MNIST(tmp_path).load()


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100, MNIST])
def test_an_archive_is_preferred(tmp_path: Path, source: type[CIFAR10 | CIFAR100 | MNIST]) -> None:
    images = RNG.integers(0, 256, (20, 8, 8, 1), dtype=np.uint8)
    name = source.__name__.lower()
    np.savez(tmp_path / f"{name}.npz", train_images=images, train_labels=np.arange(20) % 10)
    train, test = source(tmp_path).load()
    assert train.class_names == list(source.classes)
    assert (train.name, test.name) == (f"{name} train", f"{name} test")
    assert (len(train), len(test)) == (10, 10)


def test_labels_beyond_the_published_classes(tmp_path: Path) -> None:
    images = np.zeros((11, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "cifar10.npz", train_images=images, train_labels=np.arange(11))
    with pytest.raises(ShapeError, match=r"labels must be 0 to 9, .* got 0 to 10"):
        CIFAR10(tmp_path).load()


def test_class_names_are_complete() -> None:
    assert len(set(CIFAR100.classes)) == 100
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)
    assert list(CIFAR10.classes) == sorted(CIFAR10.classes)


def test_a_source_shows_how_to_build_it_again() -> None:
    assert repr(MNIST("x", download=False)) == "MNIST(root='x', download=False)"  # type: ignore[arg-type]  # text is fine
