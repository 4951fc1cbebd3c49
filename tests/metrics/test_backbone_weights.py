from __future__ import annotations

import hashlib
import io
import pickle
import random
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.metrics import perceptual as backbone_weights
from lit_recon.metrics.perceptual import Unavailable, cached_weights, download_weights, read_weights

STATE = {"features.0.weight": torch.arange(6.0).reshape(2, 3), "classifier.1.bias": torch.zeros(2)}


def torch_bytes(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def write(path: Path, state: dict[str, Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_the_convolutions_are_read_from_either_format(tmp_path: Path, name: str) -> None:
    weights = read_weights(write(tmp_path / name, STATE))
    assert list(weights) == ["features.0.weight"]
    assert torch.equal(weights["features.0.weight"], STATE["features.0.weight"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"no file .*absent\.pth"):
        read_weights(tmp_path / "absent.pth")


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
@pytest.mark.parametrize("kept", [0, 3, 0.5, 0.95])
def test_a_truncated_file_is_corrupt(tmp_path: Path, name: str, kept: float) -> None:
    path = write(tmp_path / name, STATE)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept >= 1 else kept * len(content))])
    with pytest.raises(CorruptFileError, match="fetch it again"):
        read_weights(path)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
@pytest.mark.parametrize("content", [b"<html>404</html>", bytes(range(256)) * 8])
def test_a_foreign_file_is_corrupt(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=name):
        read_weights(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # a damaged byte may claim any
@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_bytes_never_end_in_another_error(tmp_path: Path, zipped: bool) -> None:
    path, draw = tmp_path / "weights.pth", random.Random(0)
    torch.save(STATE, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged[: draw.randint(1, len(damaged))])
        try:
            read_weights(path)
        except CorruptFileError:
            refused += 1
    assert refused > 200


class Payload:
    """Runs code when unpickled; must never be."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize(
    "content", [pickle.dumps(Payload(), protocol=2), torch_bytes({"features.0.weight": Payload()})]
)
def test_nothing_is_unpickled(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError):
        read_weights(path)


@pytest.mark.parametrize("state", [[torch.zeros(1)], {"features.0.weight": 1.0}])
def test_a_file_of_something_else_is_corrupt(tmp_path: Path, state: object) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(torch_bytes(state))
    with pytest.raises(CorruptFileError, match="dict of tensors"):
        read_weights(path)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of torchvision's server, offering a file whose name begins with its true digest."""
    folder, content = tmp_path / "server", torch_bytes(STATE)
    folder.mkdir()
    name = f"squeezenet1_1-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    (folder / name).write_bytes(content)
    monkeypatch.setattr(backbone_weights, "_SERVER", f"{folder.as_uri()}/")
    monkeypatch.setitem(backbone_weights._FILES, "squeeze", name)
    return folder / name


def test_a_download_lands_in_the_cache_of_torch_hub(hub: Path, server: Path) -> None:
    path = download_weights("squeeze")
    assert path == cached_weights("squeeze") == hub / server.name
    assert path.read_bytes() == server.read_bytes()
    assert list(hub.iterdir()) == [path]


def test_a_damaged_download_is_not_kept(hub: Path, server: Path) -> None:
    server.write_bytes(server.read_bytes()[:-1])
    answer = download_weights("squeeze")
    assert isinstance(answer, Unavailable)
    assert "arrived damaged" in answer.reason
    assert not list(hub.iterdir())


def test_a_failed_download_says_what_to_do_and_is_not_repeated(hub: Path, server: Path) -> None:
    content = server.read_bytes()
    server.unlink()
    answer = download_weights("squeeze")
    assert isinstance(answer, Unavailable)
    assert f"place {server.as_uri()} at {hub / server.name}" in answer.reason
    server.write_bytes(content)
    assert download_weights("squeeze") is answer


def test_a_silent_server_is_given_up(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(backbone_weights, "_SERVER", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        monkeypatch.setattr(backbone_weights, "_TIMEOUT", 0.2)
        answer = download_weights("squeeze")
    assert isinstance(answer, Unavailable)
    assert "timed out" in answer.reason
    assert not list(hub.iterdir())


def test_a_connection_that_breaks_off_is_given_up(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(backbone_weights, "_SERVER", f"http://127.0.0.1:{port}/")
    assert isinstance(download_weights("squeeze"), Unavailable)
