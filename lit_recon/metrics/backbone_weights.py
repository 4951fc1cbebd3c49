"""Where LPIPS finds the ImageNet weights of its backbone: a given file, the cache of torch.hub, or one download."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import struct
import tempfile
import urllib.request
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lit_recon.errors import CorruptFileError, MissingDataError

#: Backbones that LPIPS has calibrated weights for.
LpipsNetwork = Literal["alex", "squeeze", "vgg"]

#: torchvision's files; the digits after the dash begin the file's SHA-256.
_FILES: dict[LpipsNetwork, str] = {
    "alex": "alexnet-owt-7be5be79.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
    "vgg": "vgg16-397923af.pth",
}
_SERVER = "https://download.pytorch.org/models/"
#: Seconds without a single byte after which a download is given up.
_TIMEOUT = 10.0
_BLOCK = 1 << 20
#: What the restricted reader of `torch.load` raises on damaged bytes, found by damaging some.
_DECODING_ERRORS = (
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unavailable:
    """A score that cannot be had here, and why; reports show the reason in its place."""

    reason: str


def cached_weights(network: LpipsNetwork) -> Path:
    """Where torch.hub, and so every torchvision program on this machine, keeps the weights of this backbone."""
    return Path(torch.hub.get_dir()) / "checkpoints" / _FILES[network]


@cache
def download_weights(network: LpipsNetwork) -> Path | Unavailable:
    """Fetch the backbone's weights into the cache of torch.hub, atomically and checked; tried once per process.

    Gives up after ten seconds without a byte, so a machine without a network waits that long at most once (and as
    long as its resolver takes to say that the name is unknown).
    """
    path, url = cached_weights(network), _SERVER + _FILES[network]
    _log.warning("downloading the ImageNet weights of LPIPS from %s to %s", url, path)
    digest = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder) / path.name
            with urllib.request.urlopen(url, timeout=_TIMEOUT) as response, partial.open("wb") as file:
                while block := response.read(_BLOCK):
                    digest.update(block)
                    file.write(block)
            if not digest.hexdigest().startswith(path.stem.rpartition("-")[2]):
                return Unavailable(f"{url} arrived damaged (its SHA-256 begins {digest.hexdigest()[:8]}): try again")
            os.replace(partial, path)
    except (OSError, HTTPException) as error:
        return Unavailable(
            f"the ImageNet weights of the LPIPS backbone '{network}' could not be downloaded ({error}): place {url} "
            f"at {path}, or give a file by weights="
        )
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """The convolutions of a torchvision classifier by their names there: `features.0.weight` and so on.

    Args:
        path: a .safetensors file, or a state dict saved by torch. Nothing is unpickled.

    Raises:
        MissingDataError: if there is no such file.
        CorruptFileError: if it is truncated, or not a dict of tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise MissingDataError(f"LPIPS weights: there is no file {path}: check the path, or leave weights out")
    try:
        if path.suffix == ".safetensors":
            state: object = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, *_DECODING_ERRORS) as error:
        raise CorruptFileError(
            f"LPIPS weights: {path} is truncated, unreadable or not a file of tensors ({type(error).__name__}): "
            "fetch it again"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CorruptFileError(f"LPIPS weights: {path} must hold a dict of tensors by name; got {type(state).__name__}")
    return {str(name): value for name, value in state.items() if str(name).startswith("features.")}
