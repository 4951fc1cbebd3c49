"""One file per backbone: tensors and everything else needed to rebuild it, with nothing to unpickle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_recon.errors import (
    CorruptFileError,
    LitReconError,
    MissingDataError,
    ShapeError,
    UnsupportedModelError,
)
from lit_recon.io.tensors import write_model_file
from lit_recon.models.classifiers.backbone import Backbone, Trunk
from lit_recon.models.classifiers.feature_layer import WideFeatureLayer
from lit_recon.records import Normalization

FORMAT_VERSION = 1
#: Key of the JSON text in the safetensors header.
_HEADER = "lit_recon.backbone"


@dataclass(frozen=True)
class BackboneCheckpoint:
    """A backbone and what an attacker or a reader of the results has to know about its training.

    Attributes:
        model: the backbone.
        class_names: one per output.
        split_hash: of the training split, to prove that victims were not among it.
        epoch: full epochs trained.
        accuracy: on the test split, in [0, 1]; None where it was not measured.
    """

    model: Backbone
    class_names: list[str]
    split_hash: str
    epoch: int
    accuracy: float | None = None

    def __post_init__(self) -> None:
        if len(self.class_names) != self.model.n_classes:
            raise ShapeError(
                f"a backbone needs one class name per output; got {len(self.class_names)} names "
                f"for {self.model.n_classes} outputs"
            )


def save_backbone(path: Path, checkpoint: BackboneCheckpoint) -> None:
    """Write `checkpoint` to `path`, which appears whole or not at all; its folder is made if missing."""
    model = checkpoint.model
    header = {
        "version": FORMAT_VERSION,
        "trunk": type(model.trunk).__name__,
        "trunk_arguments": model.trunk.arguments,
        "feature_layer_arguments": None if model.feature_layer is None else model.feature_layer.arguments,
        "normalization": asdict(model.normalization),
        "n_classes": model.n_classes,
        "class_names": checkpoint.class_names,
        "split_hash": checkpoint.split_hash,
        "epoch": checkpoint.epoch,
        "accuracy": checkpoint.accuracy,
    }
    write_model_file(path, model.state_dict(), {_HEADER: json.dumps(header)})


def load_backbone(path: Path) -> BackboneCheckpoint:
    """Rebuild a backbone, in evaluation mode and on the CPU; the global random state is left alone.

    Raises:
        MissingDataError: no file at `path`.
        CorruptFileError: truncated, or no backbone of this package.
        UnsupportedModelError: its trunk is a class that has not been imported.
    """
    if not path.is_file():
        raise MissingDataError(f"there is no backbone at {path}: train one with `python train.py backbone`")
    header, state = _read(path)
    if not isinstance(header, dict) or header.get("version") != FORMAT_VERSION:
        raise CorruptFileError(
            f"{path} was written by a release with another format than {FORMAT_VERSION}: train the backbone again"
        )
    trunk_class = _trunk_class(header.get("trunk"), path)
    try:
        with torch.random.fork_rng(devices=[]):
            model = _build(trunk_class, header)
        model.to(state["head.weight"].dtype).load_state_dict(state)
        return BackboneCheckpoint(
            model=model.eval(),
            class_names=header["class_names"],
            split_hash=header["split_hash"],
            epoch=header["epoch"],
            accuracy=header["accuracy"],
        )
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, LitReconError) as error:
        raise CorruptFileError(
            f"{path} does not describe a backbone that its own tensors fit ({error}): train it again"
        ) from error


def _read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _HEADER not in metadata:
                raise CorruptFileError(f"{path} is a safetensors file but not a backbone written by this package")
            return json.loads(metadata[_HEADER]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 a file handle, not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFileError(
            f"{path} is truncated or not a safetensors file ({error}): copy it again, or train the backbone again"
        ) from error


def _trunk_class(name: str | None, path: Path) -> type[Trunk]:
    known: dict[str, type[Trunk]] = {}
    found: list[type[Trunk]] = list(Trunk.__subclasses__())
    while found:
        trunk_class = found.pop()
        known[trunk_class.__name__] = trunk_class
        found += trunk_class.__subclasses__()
    if name not in known:
        raise UnsupportedModelError(
            f"{path} holds a trunk of class {name!r}, known are {sorted(known)}: import the module that defines it"
        )
    return known[name]


def _build(trunk_class: type[Trunk], header: dict[str, Any]) -> Backbone:
    layer = header["feature_layer_arguments"]
    return Backbone(
        trunk=trunk_class(**header["trunk_arguments"]),
        n_classes=header["n_classes"],
        normalization=Normalization(**{name: tuple(values) for name, values in header["normalization"].items()}),
        feature_layer=None if layer is None else WideFeatureLayer(**layer),
    )
