"""Strategies of safetensors files, and readers of what the package keeps in them."""

from __future__ import annotations

import functools
import json
import struct
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from lit_recon.attacks.base import Curve
from lit_recon.attacks.shadow.plan import load_released
from lit_recon.clients.record import Circumstances, RecordedUpdate
from lit_recon.experiments.audit.attacks import Outcome, read_outcome
from lit_recon.io.tensors import read_tensors
from lit_recon.models.checkpoint import BackboneCheckpoint, load_backbone, save_backbone
from lit_recon.models.classifiers.backbone import Backbone
from lit_recon.models.classifiers.feature_layer import WideFeatureLayer
from lit_recon.models.classifiers.networks import ConvNet
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, load_generator, save_generator
from lit_recon.models.released import ReleasedMLP
from lit_recon.modules.attack_state import FinishedBatch, load_finished, save_finished
from lit_recon.records import Normalization, Reconstruction
from tests.fuzzing.harness import Files, Reader
from tests.fuzzing.mutations import damaged, intact_or, json_text

#: Values for the fields of a header.
_SHAPES = ([], [0], [2**62, 4], [2**64], [-1], [10**30], [0, 10**18], [1] * 3000, [1.5], "3")
_SIZES = (1000, 4000, 20_000, 10**6, 10**9, [4000, 4000], [1, 4000, 4000])
_DTYPES = ("F64", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "U64", "x", None)
_OFFSETS = ([0, 0], [4, 0], [0, 2**63], [0, 10**30], [-4, 0], [0])


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a safetensors file."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: bytes, body: bytes, length: int | None = None) -> bytes:
    """A safetensors file of any header and body."""
    return struct.pack("<Q", len(header) if length is None else length) + header + body


@st.composite
def reheaded(draw: st.DrawFn, content: bytes) -> bytes:
    """A file whose header has other shapes, dtypes, offsets, names or lengths."""
    header, body = split(content)
    text = draw(json_text(header, values=(*_SHAPES, *_DTYPES, *_OFFSETS)))
    length = draw(st.sampled_from((None, None, None, None, 0, len(text) + 8, 2**40, 2**64 - 1)))
    return joined(text, draw(st.just(body) | damaged(body)), length)


@st.composite
def reinformed(draw: st.DrawFn, content: bytes, key: str) -> bytes:
    """A file whose own JSON, in the entry `key`, differs."""
    header, body = split(content)
    own = json.loads(header["__metadata__"][key])
    header["__metadata__"][key] = draw(json_text(own, values=_SIZES * 4)).decode("utf-8", "replace")
    return joined(json.dumps(header).encode(), body)


@st.composite
def revalued(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with other values: NaN, infinity, huge numbers, another tensor's bytes."""
    header, body = split(content)
    data = bytearray(body)
    for _ in range(draw(st.integers(1, 3))):
        chunk = draw(st.sampled_from((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\0\0\0\0", b"\xff" * 8)))
        place = draw(st.integers(0, max(0, len(data) // 4 - 1))) * 4
        data[place : place + len(chunk)] = chunk[: len(data) - place]
    return joined(json.dumps(header).encode(), bytes(data))


@st.composite
def retensored(draw: st.DrawFn, content: bytes) -> bytes:
    """A sound file with tensors left out, renamed, of other shapes or types."""
    from safetensors.torch import load

    header, _ = split(content)
    tensors: dict[str, Any] = dict(load(content))
    for _ in range(draw(st.integers(1, 2))):
        if not tensors:
            break
        name = sorted(tensors)[draw(st.integers(0, 10**4)) % len(tensors)]
        kind = draw(st.sampled_from(("drop", "rename", "add", "shape", "type", "empty")))
        if kind == "drop":
            del tensors[name]
        elif kind == "rename":
            tensors[draw(st.sampled_from(("", "x", "../x", "<script>", name + ".0", name.upper())))] = tensors.pop(name)
        elif kind == "add":
            tensors[draw(st.sampled_from(("", "x", "before/", "sent/x", "0.images")))] = torch.zeros(2)
        elif kind == "shape":
            shape = draw(st.sampled_from(((-1,), (1, -1), (-1, 1), (1, 1, 1, -1))))
            tensors[name] = tensors[name].reshape(shape) if tensors[name].numel() else tensors[name]
        elif kind == "type":
            types = (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # imaginary parts are lost
                tensors[name] = tensors[name].to(draw(st.sampled_from(types)))
        else:
            tensors[name] = tensors[name].new_zeros(draw(st.sampled_from(((0,), (), (0, 3), (0, 1, 4, 4)))))
    return save({name: value.contiguous() for name, value in tensors.items()}, header.get("__metadata__"))


def variants(content: bytes, key: str = "") -> st.SearchStrategy[bytes]:
    """All of the above."""
    informed = [reinformed(content, key)] * 2 if key else []
    others = [reheaded(content), revalued(content), retensored(content), damaged(content), *informed]
    return intact_or(content, *others)


def written(write: Callable[[Path], object], name: str = "file.safetensors") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def one(strategy: st.SearchStrategy[bytes], name: str = "file.safetensors") -> st.SearchStrategy[Files]:
    return strategy.map(lambda content: {name: content})


def pixels(n: int, side: int) -> torch.Tensor:
    return torch.rand(n, 1, side, side, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    """A small classifier of gray images 8x8."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3))


@functools.cache
def plain_file() -> bytes:
    """Its state, as a file of no particular format."""
    return save(network().state_dict())


def _finite_or_any(found: Any, files: Files) -> None:
    assert all(isinstance(name, str) for name in found)


TENSORS = Reader(
    "read_tensors",
    "safetensors headers and bodies",
    one(variants(plain_file())),
    lambda folder: read_tensors(folder / "file.safetensors"),
    _finite_or_any,
    short=150,
)


@functools.cache
def backbone_file() -> bytes:
    """A trained backbone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = ConvNet((1, 8, 8), (4,))
        layer = WideFeatureLayer(trunk.out_features, 8, 4)
        model = Backbone(trunk, 3, Normalization((0.5,), (0.25,)), layer)
    checkpoint = BackboneCheckpoint(model, ["cat", "dog", "fox"], "0123456789abcdef", 2, 0.5)
    return written(lambda path: save_backbone(path, checkpoint))


def _check_backbone(found: Any, files: Files) -> None:
    assert len(found.class_names) == found.model.n_classes
    assert all(isinstance(name, str) for name in found.class_names), found.class_names
    assert isinstance(found.epoch, int)
    assert isinstance(found.split_hash, str)
    assert found.accuracy is None or 0 <= found.accuracy <= 1, found.accuracy
    logits = found.model(torch.zeros(1, *found.model.image_shape, dtype=found.model.head.weight.dtype))
    assert logits.shape == (1, len(found.class_names))


BACKBONE = Reader(
    "load_backbone",
    "checkpoints of backbones",
    one(variants(backbone_file(), "lit_recon.backbone")),
    lambda folder: load_backbone(folder / "file.safetensors"),
    _check_backbone,
    short=150,
)


@functools.cache
def generator_file() -> bytes:
    """A trained generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ConvGenerator((1, 8, 8), latent_size=3, width=2)
    checkpoint = GeneratorCheckpoint(model, "digits", "0123", torch.arange(5), 3)
    return written(lambda path: save_generator(path, checkpoint))


def _check_generator(found: Any, files: Files) -> None:
    assert isinstance(found.epoch, int)
    assert found.seen.dtype == torch.int64
    assert found.seen.dim() == 1
    assert isinstance(found.split_hash, str)
    assert isinstance(found.data, str)
    weight = next(found.generator.parameters())
    assert found.generator(torch.zeros(1, found.generator.latent_size, dtype=weight.dtype)).dim() == 4


GENERATOR = Reader(
    "load_generator",
    "checkpoints of generators",
    one(variants(generator_file(), "lit_recon.generator")),
    lambda folder: load_generator(folder / "file.safetensors"),
    _check_generator,
    short=100,
)


@functools.cache
def update_file() -> bytes:
    """A recorded update."""
    before = network().state_dict()
    sent = {name: value + 1 for name, value in before.items()}
    known = Circumstances(4, 2, 2, 0.1, 0.9, 1e-4, "train")
    return written(lambda path: RecordedUpdate(before, sent, "weights", known).save(path))


@functools.cache
def truth_file() -> bytes:
    """Images of the client, kept beside it."""
    tensors = {"truth/images": pixels(4, 8), "truth/labels": torch.arange(4)}
    return save(tensors, {"lit_recon_update": json.dumps({"version": 1})})


def _check_update(found: Any, files: Files) -> None:
    known = found.known
    for name in ("batch_size", "steps", "batches"):
        value = getattr(known, name)
        assert (value is None and name == "batch_size") or type(value) is int, f"{name}={value!r}"
    for name in ("lr", "momentum", "weight_decay"):
        assert isinstance(getattr(known, name), float | int | None), name
    assert not isinstance(known.lr, bool)


@st.composite
def _updates(draw: st.DrawFn) -> dict[str, bytes]:
    """A recorded update of which either file, or both, are changed."""
    which = draw(st.sampled_from(("record", "record", "record", "truth")))
    own, truth = update_file(), truth_file()
    if which == "record":
        own = draw(variants(own, "lit_recon_update"))
    else:
        truth = draw(variants(truth, "lit_recon_update"))
    return {"update.safetensors": own, "update.truth.safetensors": truth}


UPDATE = Reader(
    "RecordedUpdate",
    "recorded updates",
    _updates(),
    lambda folder: RecordedUpdate.load(folder / "update.safetensors"),
    _check_update,
    short=120,
)


@functools.cache
def released_file() -> bytes:
    """Two released models."""
    network = ReleasedMLP((1, 4, 4), 3, (5,))
    return save({name: torch.stack([value.detach()] * 2).contiguous() for name, value in network.named_parameters()})


def _check_released(found: Any, files: Files) -> None:
    assert found.isfinite().all()
    assert found.dim() == 2
    assert len(found) == 2


RELEASED = Reader(
    "load_released",
    "released models",
    one(variants(released_file())),
    lambda folder: load_released(folder / "file.safetensors", ReleasedMLP((1, 4, 4), 3, (5,)), 2),
    _check_released,
    short=60,
)


@functools.cache
def finished_file() -> bytes:
    """A group of two finished victims."""
    curve: Curve = {"step": [0.0, 1.0], "loss": [1.0, 0.5]}
    batches = [
        FinishedBatch(
            number,
            Reconstruction(pixels(2, 4), torch.tensor([0, 1]), 0.5, curve, ("note",)),
            [curve],
            1.0,
            0.5,
            10,
        )
        for number in range(2)
    ]
    return written(lambda path: save_finished(path.parent, batches), "victims_0000-0001.safetensors")


def _check_finished(found: Any, files: Files) -> None:
    for index, batch in found.items():
        images = batch.reconstruction.images
        assert index == batch.index >= 0
        assert images.dim() == 4, images.shape
        assert batch.reconstruction.labels.shape == images.shape[:1]
        assert isinstance(batch.reconstruction.loss, float | int), batch.reconstruction.loss
        assert isinstance(batch.seconds, float | int)


FINISHED = Reader(
    "load_finished",
    "finished victims",
    one(variants(finished_file(), "lit_recon.victims"), "victims_0000-0001.safetensors"),
    lambda folder: load_finished(folder),
    _check_finished,
    short=80,
)


@functools.cache
def outcome_file() -> bytes:
    """The outcome of an attack of an audit."""
    found = Reconstruction(pixels(2, 4), torch.tensor([0, 1]), 0.5, certified=torch.tensor([True, False]))
    outcome = Outcome("analytic", "Analytic inversion", "nothing", found, "", 1.0, 0, 0.5, 1, ("note",))
    return written(lambda path: outcome.write(path.parent), "analytic.safetensors")


def _check_outcome(found: Any, files: Files) -> None:
    assert isinstance(found.name, str)
    assert isinstance(found.seconds, float | int)
    assert isinstance(found.certified, int)
    if found.found is not None:
        assert found.found.images.dim() == 4
        assert found.found.labels.shape == found.found.images.shape[:1]


OUTCOME = Reader(
    "read_outcome",
    "outcomes of audits",
    one(variants(outcome_file(), "lit_recon_audit")),
    lambda folder: read_outcome(folder / "file.safetensors"),
    _check_outcome,
    short=80,
)
