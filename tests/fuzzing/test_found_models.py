"""Checkpoints, state dicts and exported models that were read, or ended in another error, before they were fuzzed."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.record import status_mib
from lit_recon.errors import ConfigError, CorruptFileError, LitReconError, ShapeError, UnsupportedModelError
from lit_recon.io.tensors import read_state
from lit_recon.models.checkpoint import load_backbone
from lit_recon.models.classifiers.foreign import build_module, load_weights, public_model
from lit_recon.models.exported import read_exported
from lit_recon.models.generative.generator import load_generator
from lit_recon.training.module import state_to_resume
from tests.fuzzing.archives import entries_of, zipped
from tests.fuzzing.harness import examine
from tests.fuzzing.payloads import CANARY, harmful_pickle
from tests.fuzzing.tensor_files import backbone_file, generator_file, joined, network, split
from tests.fuzzing.torch_files import (
    EXPORTED,
    exported_file,
    file_arguments,
    saved,
    state_file,
    training_file,
    with_target,
)


def changed(content: bytes, key: str, own: Mapping[str, Any] | str) -> bytes:
    """A file whose header of the package has other entries, or is a text."""
    header, body = split(content)
    known = json.loads(header["__metadata__"][key])
    header["__metadata__"][key] = own if isinstance(own, str) else json.dumps({**known, **own})
    return joined(json.dumps(header).encode(), body)


@pytest.mark.parametrize("class_path", ["../../x", ".a.b", "", "..", "torch.nn.", "a..b"])
def test_models_at_paths_that_are_none(class_path: str) -> None:
    with pytest.raises(ConfigError, match="class_path"):
        build_module(class_path, {}, 0)


BACKBONE, GENERATOR = "lit_recon.backbone", "lit_recon.generator"
LAYER = {"in_features": 4, "n_neurons": 8, "n_trained": 4, "activation": "relu", "seed": 0}


def refused_in_little_memory(load: Callable[[Path], object], path: Path) -> None:
    """Assert that a damaged file is refused before it takes memory."""
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with pytest.raises(CorruptFileError, match=path.name):
        load(path)
    assert status_mib("VmHWM") - before < 96


@pytest.mark.parametrize(
    "own",
    [
        "[" * 100_000,
        '{"version": 1, "trunk": "a.b", "trunk": "c.d"}',
        {"trunk": ["lit_recon.models.ConvNet"]},
        {"trunk_arguments": {"image_shape": [1, 8, 8], "widths": [10**9], "norm": "batch", "activation": "relu"}},
        {"trunk_arguments": {"image_shape": [1, 8, 8], "widths": [4000, 4000], "norm": "batch", "activation": "relu"}},
        {"feature_layer_arguments": {**LAYER, "n_neurons": 10**8}},
        {"feature_layer_arguments": {**LAYER, "n_trained": 0, "in_features": 4000, "n_neurons": 4000}},
        {"n_classes": 10**9},
        {"class_names": ["cat", None, "fox"]},
        {"class_names": ["cat", "a\x1b[31m", "fox"]},
        {"class_names": "cat"},
        {"accuracy": "high"},
        {"accuracy": 7.5},
        {"accuracy": float("nan")},
        {"epoch": 1.5},
        {"epoch": True},
        {"split_hash": None},
        {"normalization": {"mean": ["a"], "std": [1]}},
    ],
    ids=str,
)
def test_backbones(tmp_path: Path, own: Any) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(changed(backbone_file(), BACKBONE, own))
    refused_in_little_memory(load_backbone, path)


@pytest.mark.parametrize(
    "trunk", ["nowhere.Trunk", "../../../etc/passwd", ".a.b", "..", "", "a..b", "os.path.join", "\ud800.a"]
)
def test_a_trunk_that_is_nowhere_names_the_file(tmp_path: Path, trunk: str) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(changed(backbone_file(), BACKBONE, {"trunk": trunk}))
    with pytest.raises(UnsupportedModelError, match="file.safetensors"):
        load_backbone(path)


@pytest.mark.parametrize(
    "own",
    [
        "[" * 100_000,
        {"arguments": {"image_shape": [1, 8, 8], "latent_size": 10**10, "width": 2}},
        {"arguments": {"image_shape": [1, 4000, 4000], "latent_size": 4000, "width": 4000}},
        {"epoch": "1"},
        {"data": None},
        {"split_hash": 5},
    ],
    ids=str,
)
def test_generators(tmp_path: Path, own: Any) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(changed(generator_file(), GENERATOR, own))
    refused_in_little_memory(load_generator, path)


def test_a_weight_that_was_damaged_is_noticed(tmp_path: Path) -> None:
    """PyTorch itself compares no checksum: it returns the other number."""
    path, content = tmp_path / "weights.pt", bytearray(state_file())
    place = content.index(network().state_dict()["4.weight"].numpy().tobytes())
    content[place + 2] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["4.weight"].isfinite().all()
    with pytest.raises(CorruptFileError, match=r"weights\.pt is truncated, damaged"):
        load_weights(network(), path)


def test_two_entries_of_one_name(tmp_path: Path) -> None:
    path, entries = tmp_path / "weights.pt", entries_of(state_file())
    path.write_bytes(zipped([*entries, entries[-1]]))
    with pytest.raises(CorruptFileError, match=r"weights\.pt"):
        load_weights(network(), path)


def test_entries_marked_as_folders(tmp_path: Path) -> None:
    """PyTorch takes memory that nobody has set for their content."""
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.arange(1000.0)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.getinfo("weights/data/0").external_attr = 0x10
        archive._didModify = True
    with pytest.raises(CorruptFileError, match="truncated, damaged"):
        read_state(path, "weights", "save them again")


def test_packed_entries(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(zipped([*entries_of(state_file()), ("archive/more", bytes(2**24))], zipfile.ZIP_DEFLATED))
    with pytest.raises(CorruptFileError, match=r"weights\.pt"):
        load_weights(network(), path)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.to_sparse(),
        lambda value: torch.empty(value.shape, device="meta"),
        lambda value: value[:1, :1].clone().expand(value.shape),
    ],
    ids=["sparse", "meta", "expanded"],
)
def test_tensors_that_are_not_stored_in_full(tmp_path: Path, change: Any) -> None:
    path, state = tmp_path / "weights.pt", network().state_dict()
    path.write_bytes(saved({**state, "4.weight": change(state["4.weight"])}))
    with pytest.raises(CorruptFileError, match=r"weights\.pt: 4\.weight"):
        read_state(path, "weights", "save them again")


def test_four_bytes_that_claim_a_billion_numbers(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(saved({"weight": torch.zeros(1).expand(10**9)}))
    with pytest.raises(CorruptFileError, match="larger than its content"):
        read_state(path, "weights", "save them again")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64, torch.bool])
def test_weights_of_another_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """Imaginary parts were lost with a warning, and quantized numbers taken as they are."""
    path, state = tmp_path / "weights.pt", network().state_dict()
    path.write_bytes(saved({**state, "4.weight": torch.ones(state["4.weight"].shape, dtype=dtype)}))
    with pytest.raises(ShapeError, match=r"1 of another type: 4\.weight"):
        load_weights(network(), path)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(saved({5: torch.zeros(1)}))
    with pytest.raises(CorruptFileError, match=r"weights\.pt"):
        load_weights(network(), path)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("wrapped", [True, False])
def test_nothing_is_unpickled(tmp_path: Path, protocol: int, wrapped: bool) -> None:
    CANARY.unlink(missing_ok=True)
    own = harmful_pickle(protocol)
    for content in (state_file(), training_file(), exported_file()):
        if wrapped:
            entries = [(name, own if "pkl" in name or "sample" in name else old) for name, old in entries_of(content)]
            own = zipped(entries)
        for name in ("a.pt", "last.ckpt", "a.pt2"):
            (tmp_path / name).write_bytes(own)
        with pytest.raises(LitReconError):
            load_weights(network(), tmp_path / "a.pt")
        with pytest.raises(LitReconError):
            state_to_resume(tmp_path / "last.ckpt")
        with pytest.raises(LitReconError):
            read_exported(tmp_path / "a.pt2")
    assert not CANARY.exists()


def test_a_state_of_training_that_was_damaged(tmp_path: Path) -> None:
    path, content = tmp_path / "last.ckpt", bytearray(training_file())
    place = content.index(network().state_dict()["4.weight"].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="delete it to start over"):
        state_to_resume(path)
    path.write_bytes(training_file())
    assert state_to_resume(path) == path


def exported(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    model = public_model(read_exported(path), (1, 5, 5)).model
    return model(torch.zeros(2, 1, 5, 5))


def test_an_operation_that_makes_a_file(tmp_path: Path) -> None:
    """`from_file` maps a file, and makes it where it is not there."""
    target = tmp_path / "made"
    content = with_target(exported_file(), "torch.ops.aten.from_file.default", file_arguments(str(target)))
    with pytest.raises(CorruptFileError, match="the operation 'torch.ops.aten.from_file.default'"):
        exported(tmp_path / "model.pt2", content)
    assert not target.exists()


@pytest.mark.parametrize(
    "target", ["torch.os.system", "torch.load", "torch.hub.load", "torch.ops.aten._unsafe_index.Tensor"]
)
def test_operations_that_are_none(tmp_path: Path, target: str) -> None:
    with pytest.raises(CorruptFileError, match="the operation"):
        exported(tmp_path / "model.pt2", with_target(exported_file(), target))


def test_a_weight_of_an_exported_model_that_was_damaged(tmp_path: Path) -> None:
    content = bytearray(exported_file())
    assert exported(tmp_path / "model.pt2", bytes(content)).shape == (2, 3)
    with zipfile.ZipFile(BytesIO(content)) as archive:
        name = next(one for one in archive.namelist() if one.endswith("weight_0"))
        place = content.index(archive.read(name))
    content[place] ^= 1
    with pytest.raises(CorruptFileError, match="checksum"):
        exported(tmp_path / "model.pt2", bytes(content))


def test_graphs_that_are_no_classifiers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Errors after the loading, and the traceback that PyTorch logs."""
    logging.disable(logging.NOTSET)
    entries = entries_of(exported_file())
    for change in ({"graph_module": None}, {"schema_version": {}}):
        made = [
            (name, json.dumps({**json.loads(own), **change}).encode() if "/models/" in name else own)
            for name, own in entries
        ]
        with pytest.raises(CorruptFileError, match=r"model\.pt2"):
            exported(tmp_path / "model.pt2", zipped(made))
    assert capfd.readouterr().err == ""


def test_a_graph_that_returns_no_logits(tmp_path: Path) -> None:
    """The message did not say what to do with the file."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(25, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.layer(images.flatten(1)).sum(1)

    images, sizes = torch.zeros(2, 1, 5, 5), ({0: torch.export.Dim.DYNAMIC},)
    torch.export.save(torch.export.export(Sums(), (images,), dynamic_shapes=sizes), tmp_path / "model.pt2")
    verdict = examine(EXPORTED, {"model.pt2": (tmp_path / "model.pt2").read_bytes()}, tmp_path / "folder")
    assert verdict.kind == "refused", verdict.told
    assert r"it returns a tensor (2,): give a module" in verdict.told
