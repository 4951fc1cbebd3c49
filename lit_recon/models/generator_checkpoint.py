"""One file per generator: its tensors, how to rebuild it, and which images it has seen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_recon.errors import CorruptFileError, LitReconError, MissingDataError
from lit_recon.models.generator import ConvGenerator
from lit_recon.models.model_file import write_model_file

FORMAT_VERSION = 1
#: Key of the JSON text in the safetensors header.
_HEADER = "lit_recon.generator"
#: Names of tensors in the file: the generator's have this prefix, and one tensor tells what it was trained on.
_PREFIX, _SEEN = "generator.", "seen"


@dataclass(frozen=True)
class GeneratorCheckpoint:
    """A generator and what tells whether an attack with it is fair.

    Attributes:
        generator: the network.
        data: name of the images it was trained on.
        split_hash: of the training and test split of these images.
        seen: fingerprints `(N,)`, int64, of the images it was trained on, see `lit_recon.data.fingerprints`.
        epoch: full epochs trained.
    """

    generator: ConvGenerator
    data: str
    split_hash: str
    seen: Tensor
    epoch: int


def save_generator(path: Path, checkpoint: GeneratorCheckpoint) -> None:
    """Write `checkpoint` to `path`, which appears whole or not at all; its folder is made if missing."""
    header = {
        "version": FORMAT_VERSION,
        "arguments": checkpoint.generator.arguments,
        "data": checkpoint.data,
        "split_hash": checkpoint.split_hash,
        "epoch": checkpoint.epoch,
    }
    state = {_PREFIX + name: value for name, value in checkpoint.generator.state_dict().items()}
    write_model_file(path, {**state, _SEEN: checkpoint.seen}, {_HEADER: json.dumps(header)})


def load_generator(path: Path) -> GeneratorCheckpoint:
    """Rebuild a generator, in evaluation mode and on the CPU; the global random state is left alone.

    Raises:
        MissingDataError: no file at `path`.
        CorruptFileError: truncated, of another release, or no generator of this package.
    """
    metadata, tensors = read_tensors(path)
    if _HEADER not in metadata:
        raise CorruptFileError(
            f"{path} holds no generator written by this package: give the class that it belongs to as `network`, or "
            "train one with `python train.py generator`"
        )
    header = json.loads(metadata[_HEADER])
    if not isinstance(header, dict) or header.get("version") != FORMAT_VERSION:
        raise CorruptFileError(
            f"{path} was written by a release with another format than {FORMAT_VERSION}: train the generator again"
        )
    try:
        with torch.random.fork_rng(devices=[]):
            generator = ConvGenerator(**header["arguments"])
        seen = tensors.pop(_SEEN)
        generator.load_state_dict({name.removeprefix(_PREFIX): value for name, value in tensors.items()})
        return GeneratorCheckpoint(generator.eval(), header["data"], header["split_hash"], seen, header["epoch"])
    except (KeyError, TypeError, ValueError, RuntimeError, LitReconError) as error:
        raise CorruptFileError(
            f"{path} does not describe a generator that its own tensors fit ({error}): train it again"
        ) from error


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The text entries and the tensors of a safetensors file.

    Raises:
        MissingDataError: no file at `path`.
        CorruptFileError: truncated, or no safetensors file.
    """
    if not path.is_file():
        raise MissingDataError(
            f"there is no generator at {path}: train one with `python train.py generator`, for example by "
            "--config configs/train/generator_digits.yaml"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 a file handle, not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFileError(f"{path} is truncated or not a safetensors file ({error}): copy it again") from error
