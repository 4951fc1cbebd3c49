"""Readers of what PyTorch writes: state dicts, exported models, and states of interrupted attacks and trainings."""

from __future__ import annotations

import functools
import io
import json
import pickle
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from lit_recon.attacks.updates.gradient_matching.attack import GradientMatching
from lit_recon.clients import Client
from lit_recon.models.classifiers.foreign import load_weights, public_model
from lit_recon.models.exported import read_exported
from lit_recon.modules.attack_state import run_attack
from lit_recon.records import Observation
from lit_recon.training.module import state_to_resume
from tests.fuzzing.archives import entries_of, misfiled, rezipped, zipped
from tests.fuzzing.harness import Files, Reader
from tests.fuzzing.mutations import damaged, json_text, pick
from tests.fuzzing.payloads import CANARY, HARMFUL_TEXT, SCRIPTS, harmful_pickle
from tests.fuzzing.tensor_files import network


def saved(content: object) -> bytes:
    """A file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


#: Pickles that make a file, as whole files and as `data.pkl` of an archive.
_HARMFUL = [harmful_pickle(protocol) for protocol in (0, 2, 4)]
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + harmful_pickle()


def _states() -> list[object]:
    """What a user may have saved, right and wrong."""
    state = network().state_dict()
    first = next(iter(state))
    return [
        {"state_dict": state},
        OrderedDict(state),
        {**state, first: state[first] * torch.nan},
        {**state, first: state[first].double()},
        {**state, first: state[first][:1]},
        {**state, first: state[first].to_sparse()},
        {**state, first: state[first].to(torch.complex64)},
        {**state, first: torch.ones(state[first].shape, dtype=torch.uint8)},
        {**state, first: torch.empty(state[first].shape, device="meta")},
        {**state, 5: state[first]},
        {**state, "<script>": state[first]},
        {"state_dict": {"state_dict": state}},
        {"state_dict": None},
        [*state.values()],
        state[first],
        {"a": {"b": 1}},
        {},
        None,
        "text",
        {"weight": torch.zeros(1).expand(10**9)},  # 4 bytes that claim a billion numbers
    ]


def torch_variants(content: bytes) -> st.SearchStrategy[bytes]:
    """A file of `torch.save` with harmful pickles, changed entries, or damaged bytes."""
    entries = entries_of(content)

    def change(name: str, own: bytes) -> st.SearchStrategy[bytes]:
        return damaged(own) | st.sampled_from((*_HARMFUL, b"", own * 2, own[: len(own) // 2]))

    harmful = st.sampled_from([*_HARMFUL, _LEGACY, *(_with_pickle(content, one) for one in _HARMFUL)])
    return pick(
        [
            (1, st.just(content)),
            (1, st.binary(max_size=200) | harmful),
            (3, damaged(content)),
            (6, rezipped(entries, change)),
            (2, misfiled(content)),
        ]
    )


def _with_pickle(content: bytes, own: bytes) -> bytes:
    return zipped([(name, own if name.endswith("data.pkl") else old) for name, old in entries_of(content)])


@functools.cache
def state_file() -> bytes:
    """A state dict of `torch.save`."""
    return saved(network().state_dict())


def _load_weights(folder: Path) -> nn.Module:
    model = network()
    load_weights(model, folder / "weights.pt")
    return model


def _check_checksums(content: object) -> None:
    """An archive has checksums: what was damaged blindly is refused."""
    assert isinstance(content, bytes)
    if content[:2] == b"PK":  # others are of older releases of PyTorch, which wrote no checksums
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None, "damaged content was read"


def _check_weights(found: Any, files: Files) -> None:
    _check_checksums(files["weights.pt"])
    assert all(value.isfinite().all() for value in found.state_dict().values())
    content = files["weights.pt"]
    assert isinstance(content, bytes)
    given = torch.load(io.BytesIO(content), weights_only=True)
    given = given.get("state_dict", given)
    for name, value in found.state_dict().items():
        assert not given[name].is_complex(), f"the imaginary part of {name} is lost"
        assert torch.equal(value, given[name].to(value.dtype)), f"{name} is not what the file holds"
        assert value.is_floating_point() == given[name].is_floating_point(), f"{name} is of another kind"


STATE_DICT = Reader(
    "load_weights",
    ".pt state dicts",
    pick([(3, torch_variants(state_file())), (1, st.sampled_from([saved(state) for state in _states()]))]).map(
        lambda content: {"weights.pt": content}
    ),
    _load_weights,
    _check_weights,
    short=100,
)


class _Net(nn.Module):
    """The layers that the reader of exported models brings back."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.fc = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.norm(self.convolution(images)).relu().mean((2, 3)))
        return logits


@functools.cache
def exported_file() -> bytes:
    """A file of `torch.export.save`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Net().eval()
    images = torch.zeros(2, 1, 5, 5)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)), buffer)
    return buffer.getvalue()


#: Operations that would do more than compute, or that no loader should look up.
_TARGETS = (
    *(
        "torch.ops.aten.from_file.default",
        "torch.os.system",
        "torch.hub.load",
        "torch.load",
        "_operator.call",
        "math.inf",
    ),
    *(
        "torch.ops.aten.relu.default",
        "torch.ops.aten.relu_.default",
        "torch.ops.higher_order.cond",
        "#a:b",
        "builtins.exec",
    ),
    *("torch.ops.aten.set_.source_Tensor", "torch.ops.aten.as_strided.default", "torch.ops.aten.resize_.default", ""),
    *(
        "torch.ops.prim.device.default",
        "torch.ops.aten.repeat.default",
        "_operator.mul",
        "torch.ops.aten.empty.memory_format",
    ),
)


def with_target(content: bytes, target: str, inputs: list[dict[str, Any]] | None = None) -> bytes:
    """An exported model whose first `relu` is another operation."""
    made = []
    for name, own in entries_of(content):
        if "/models/" in name:
            tree = json.loads(own)
            [node] = [node for node in tree["graph_module"]["graph"]["nodes"] if "relu" in node["target"]]
            node["target"] = target
            if inputs is not None:
                node["inputs"] = inputs
            own = json.dumps(tree).encode()
        made.append((name, own))
    return zipped(made)


def file_arguments(path: str) -> list[dict[str, Any]]:
    """Arguments of `from_file` by which PyTorch would make a file."""
    given = {"filename": {"as_string": path}, "shared": {"as_bool": True}, "size": {"as_int": 64}}
    return [{"name": name, "arg": value, "kind": 1} for name, value in given.items()]


def _change(name: str, own: bytes) -> st.SearchStrategy[bytes]:
    if name.endswith(".json"):
        expression = st.sampled_from((HARMFUL_TEXT, "Symbol('s0')", "10**10**10", "s0", "Max(1, 2)"))
        values = (*_TARGETS, *SCRIPTS, HARMFUL_TEXT, "../../weights", "Pow(9, Pow(9, Pow(9, 9)))", "9**9**9**9")
        return json_text(json.loads(own), values=values) | expression.map(
            lambda text: own.replace(b"Symbol('s77', positive=True, integer=True)", text.encode())
        )
    return damaged(own) | st.sampled_from((harmful_pickle(), b"", own * 3))


@functools.cache
def _exported_inputs() -> st.SearchStrategy[bytes]:
    content = exported_file()
    entries = entries_of(content)
    graph = [(name, own) for name, own in entries if "/models/" in name]
    rest = [entry for entry in entries if entry not in graph]

    def regraph(changed: bytes) -> bytes:
        return zipped([*rest, (graph[0][0], changed)])

    targets = st.sampled_from(_TARGETS).map(lambda target: with_target(content, target))
    files = st.just(with_target(content, "torch.ops.aten.from_file.default", file_arguments(str(CANARY))))
    return pick(
        [
            (1, st.just(content)),
            (1, st.binary(max_size=100) | st.sampled_from(_HARMFUL)),
            (2, damaged(content)),
            (6, _change(*graph[0]).map(regraph)),
            (4, rezipped(entries, _change)),
            (1, targets | files),
        ]
    )


def _read_exported(folder: Path) -> Any:
    model = read_exported(folder / "model.pt2")
    public = public_model(model, (1, 5, 5))
    return public.model(torch.zeros(2, 1, 5, 5))


def _check_logits(found: Any, files: Files) -> None:
    assert found.dim() == 2


EXPORTED = Reader(
    "read_exported",
    "torch.export files",
    st.deferred(lambda: _exported_inputs()).map(lambda content: {"model.pt2": content}),
    _read_exported,
    _check_logits,
    short=50,
    names=("ExportedClassifier",),
)


@functools.cache
def _observation() -> tuple[GradientMatching, Observation]:
    """A small attack and what it sees."""
    model = network()
    client = Client(public_model(model, (1, 8, 8)).model)
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return GradientMatching(steps=2), client.observe(images, torch.tensor([0, 1]))


def _resume(path: Path) -> Any:
    attack, seen = _observation()
    return run_attack(attack, [seen], path, 0.0, "loop", lambda state, steps: None)


@functools.cache
def running_file() -> bytes:
    """The state of a running attack."""
    with tempfile.TemporaryDirectory() as folder:
        _resume(Path(folder) / "state.pt")
        return (Path(folder) / "state.pt").read_bytes()


def _check_running(found: Any, files: Files) -> None:
    [result] = found.reconstructions
    assert result.images.shape == (2, 1, 8, 8)
    assert result.images.isfinite().all()
    content = files["state.pt"]
    assert isinstance(content, bytes)
    _check_checksums(content)


RUNNING = Reader(
    "run_attack",
    "states of running attacks",
    st.deferred(lambda: torch_variants(running_file())).map(lambda content: {"state.pt": content}),
    lambda folder: _resume(folder / "state.pt"),
    _check_running,
    short=40,
)


@functools.cache
def training_file() -> bytes:
    """A state of training, with the parts that Lightning's have."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return saved({"epoch": 1, "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]})


def _check_training(found: Any, files: Files) -> None:
    content = files["last.ckpt"]
    assert isinstance(content, bytes)
    _check_checksums(content)
    torch.load(io.BytesIO(content), weights_only=True)  # what is accepted can be read


TRAINING = Reader(
    "state_to_resume",
    "states of trainings",
    st.deferred(lambda: torch_variants(training_file())).map(lambda content: {"last.ckpt": content}),
    lambda folder: state_to_resume(folder / "last.ckpt"),
    _check_training,
    short=60,
)
