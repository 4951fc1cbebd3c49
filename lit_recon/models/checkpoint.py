"""Checkpoint files of backbones: tensors and all that is needed to rebuild the network, without pickle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lit_recon.errors import CorruptFileError, ShapeError, UnsupportedModelError
from lit_recon.io.tensors import NoLarger, TensorFormat
from lit_recon.models.classifiers.backbone import Backbone, Trunk, find_trunk, trunk_path
from lit_recon.models.classifiers.feature_layer import WideFeatureLayer
from lit_recon.records import Normalization

FORMAT = TensorFormat("lit_recon.backbone", "backbone", "train one with `python train.py backbone`")


@dataclass(frozen=True)
class BackboneCheckpoint:
    """A backbone and the facts about its training.

    Attributes:
        class_names: one per output.
        split_hash: of the training split, to check that victims were not in it.
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


def save_backbone(path: str | Path, checkpoint: BackboneCheckpoint) -> None:
    """Write `checkpoint` to `path` atomically; a missing folder is created."""
    model = checkpoint.model
    header = {
        "trunk": trunk_path(type(model.trunk)),
        "trunk_arguments": model.trunk.arguments,
        "feature_layer_arguments": None if model.feature_layer is None else model.feature_layer.arguments,
        "normalization": asdict(model.normalization),
        "n_classes": model.n_classes,
        "head_bias": model.head.bias is not None,
        "class_names": checkpoint.class_names,
        "split_hash": checkpoint.split_hash,
        "epoch": checkpoint.epoch,
        "accuracy": checkpoint.accuracy,
    }
    FORMAT.write(Path(path), model.state_dict(), header)


def load_backbone(path: str | Path) -> BackboneCheckpoint:
    """Rebuild a backbone, in evaluation mode and on the CPU; the global random state does not change.

    Raises:
        MissingDataError: no file at `path`.
        CorruptFileError: truncated, or no backbone of this package.
        UnsupportedModelError: the class of its trunk cannot be imported.
    """
    path = Path(path)
    header, state = FORMAT.read(path)
    if not isinstance(header.get("trunk"), str):
        raise CorruptFileError(f"{path} does not name the class of its trunk: train it again")
    try:
        trunk_class = find_trunk(header["trunk"])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    try:
        arguments = [header[name] for name in ("trunk_arguments", "feature_layer_arguments", "n_classes")]
        with torch.random.fork_rng(devices=[]), NoLarger(arguments, state.values()):
            model = _built(header, trunk_class)
        model.to(state["head.weight"].dtype).load_state_dict(state)
        return BackboneCheckpoint(model.eval(), **_facts(header))
    except Exception as error:  # constructors raise errors of many kinds
        raise CorruptFileError(
            f"{path} does not describe a backbone that its own tensors fit ({error}): train it again"
        ) from error


def _built(header: dict[str, Any], trunk_class: type[Trunk]) -> Backbone:
    """The network that a header describes, with random weights."""
    layer, measured = header["feature_layer_arguments"], header["normalization"]
    return Backbone(
        trunk=trunk_class(**header["trunk_arguments"]),
        n_classes=header["n_classes"],
        normalization=Normalization(**{name: tuple(map(float, values)) for name, values in measured.items()}),
        feature_layer=None if layer is None else WideFeatureLayer(**layer),
        head_bias=header.get("head_bias", True),  # older files lack it
    )


def _facts(header: dict[str, Any]) -> dict[str, Any]:
    """The facts in a header; a ValueError where they cannot be true."""
    facts = {name: header[name] for name in ("class_names", "split_hash", "epoch", "accuracy")}
    names, accuracy = facts["class_names"], facts["accuracy"]
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isprintable() for name in names):
        raise ValueError("class_names must be a list of printable text")
    if not isinstance(facts["split_hash"], str) or type(facts["epoch"]) is not int or facts["epoch"] < 0:
        raise ValueError("split_hash must be text and epoch a whole number")
    if accuracy is not None and not (type(accuracy) in (int, float) and 0 <= accuracy <= 1):
        raise ValueError("accuracy must be in [0, 1]")
    return facts
