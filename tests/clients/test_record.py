"""Recorded updates: what is written is read again, the truth apart, and files that are not one are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lit_recon.clients.record import Circumstances, RecordedUpdate, Recorder, truth_of
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError

KNOWN: dict[str, Any] = {"batch_size": 6, "steps": 4, "batches": 2, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
KNOWN["batch_norm"] = "train"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3


def backward(model: nn.Module) -> None:
    images, labels = batch()
    nn.functional.cross_entropy(model(images), labels).backward()


def train(model: nn.Module) -> None:
    """One step in place, as an optimizer does it."""
    backward(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["gradient", "difference", "weights", None])
@pytest.mark.parametrize("known", [{}, KNOWN], ids=["nothing known", "all known"])
def test_round_trip(tmp_path: Path, form: Any, known: dict[str, Any]) -> None:
    model = network()
    before = copied(model)
    train(model)
    update = RecordedUpdate(before, copied(model), form, Circumstances(**known))
    path = update.save(tmp_path / "new" / "update.safetensors")
    read = RecordedUpdate.load(str(path))
    same(read.before, before)
    same(read.sent, copied(model))
    assert (read.form, read.known, dict(read.truth)) == (form, update.known, {})
    assert [one.name for one in path.parent.iterdir()] == ["update.safetensors"]


def test_what_was_sent_may_lack_parameters_and_buffers(tmp_path: Path) -> None:
    model = network()
    path = Recorder(model).save(tmp_path / "update.safetensors", {"3.bias": torch.ones(3)}, form="difference")
    read = RecordedUpdate.load(path)
    assert (list(read.sent), len(read.before)) == (["3.bias"], len(model.state_dict()))


def test_truth_is_kept_in_another_file(tmp_path: Path) -> None:
    images, labels = batch()
    recorder, path = Recorder(network()), tmp_path / "update.safetensors"
    recorder.save(path, network(), images=images, labels=labels.tolist())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["update.safetensors", "update.truth.safetensors"]
    assert truth_of(path) == tmp_path / "update.truth.safetensors"
    with safe_open(path, framework="pt") as file:
        assert {name.partition("/")[0] for name in file.keys()} == {"before", "sent"}  # noqa: SIM118 a file handle
    same(RecordedUpdate.load(path).truth, {"images": images, "labels": labels})
    # a record without images replaces one with images, which are of another update
    recorder.save(path, network())
    assert dict(RecordedUpdate.load(path).truth) == {}


def test_before_is_copied_at_once(tmp_path: Path) -> None:
    model = network()
    before, recorder = copied(model), Recorder(model, lr=0.1)
    train(model)
    update = recorder.record(model)
    after = copied(model)
    train(model)
    same(update.before, before)
    same(update.sent, after)
    assert not any(value.requires_grad for value in (*update.before.values(), *update.sent.values()))
    assert not torch.equal(before["3.weight"], after["3.weight"])


def test_truth_is_copied() -> None:
    images, labels = batch()
    update = Recorder(network()).record(network(), images=images, labels=labels)
    images.zero_(), labels.zero_()
    same(update.truth, dict(zip(("images", "labels"), batch(), strict=True)))


def test_saved_gradient_is_that_of_autograd(tmp_path: Path) -> None:
    model = network()
    recorder = Recorder(model, batch_size=6)
    with pytest.raises(ConfigError, match="no parameter .* has a gradient: call save_gradient after"):
        recorder.save_gradient(tmp_path / "update.safetensors", model)
    backward(model)
    read = RecordedUpdate.load(recorder.save_gradient(tmp_path / "update.safetensors", model, labels=[0]))
    fresh = network()
    images, labels = batch()
    loss = nn.functional.cross_entropy(fresh(images), labels)
    parameters = dict(fresh.named_parameters())
    same(read.sent, dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
    assert (read.form, read.known.batch_size, read.truth["labels"].tolist()) == ("gradient", 6, [0])


def test_parameters_without_gradient_are_left_out(tmp_path: Path) -> None:
    model = network()
    model[0].requires_grad_(False)
    backward(model)
    read = RecordedUpdate.load(Recorder(model).save_gradient(tmp_path / "update.safetensors", model))
    assert set(read.sent) == {"1.weight", "1.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1 image; got 0"),
        ({"batches": 2}, "got steps=1 and batches=2"),
        ({"steps": 0, "batches": 0}, "got steps=0 and batches=0"),
        ({"batch_size": 5, "steps": 2, "batches": 2}, "batch_size=5 must be a multiple of batches=2"),
        ({"lr": 0.0}, "lr must be a positive number; got 0"),
        ({"lr": float("inf")}, "lr must be a positive number; got inf"),
        ({"momentum": 1.0}, "momentum must be in .* got 1 and 0"),
        ({"momentum": -0.1}, "momentum must be in .* got -0.1 and 0"),
        ({"weight_decay": -1.0}, "weight_decay at least 0; got 0 and -1"),
        ({"batch_norm": "batch"}, "batch_norm must be eval or train; got .batch."),
    ],
)
def test_impossible_circumstances_are_refused(tmp_path: Path, known: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recorder(network(), **known)
    path = tmp_path / "update.safetensors"
    Recorder(network()).save(path, network())
    rewrite(path, **known)
    with pytest.raises(CorruptFileError, match=f"update.safetensors states impossible circumstances .*{message}"):
        RecordedUpdate.load(path)


def test_numbers_of_numpy_and_torch_are_written(tmp_path: Path) -> None:
    known = {"batch_size": np.int64(4), "steps": torch.tensor(2), "lr": np.float32(0.5), "momentum": torch.tensor(0.25)}
    path = Recorder(network(), **known).save(tmp_path / "update.safetensors", network())
    assert RecordedUpdate.load(path).known == Circumstances(batch_size=4, steps=2, lr=0.5, momentum=0.25)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"lr": "0.1"}, "lr, momentum, weight_decay must be numbers; got lr='0.1'"),
        ({"lr": torch.tensor([0.1])}, "must be numbers; got lr=tensor"),
        ({"momentum": None}, "must be numbers; got momentum=None"),
        ({"weight_decay": True}, "must be numbers; got weight_decay=True"),
        ({"batch_size": np.float64(4)}, "steps, batches, batch_size must be whole numbers; got batch_size=np.float64"),
        ({"batch_size": torch.tensor(True)}, "must be whole numbers; got batch_size=tensor"),
    ],
)
def test_what_is_no_number_is_refused_before_the_training(known: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Recorder(network(), **known)


def test_an_unknown_form_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="form must be one of gradient, difference, weights; got 'weight'"):
        Recorder(network()).save(tmp_path / "update.safetensors", network(), form="weight")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_truth_of_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Recorder(network()).save(tmp_path / "update.safetensors", network(), labels=[1])

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("lit_recon.io.tensors.write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        Recorder(network()).save(path, network(), labels=[2])
    assert RecordedUpdate.load(path).truth["labels"].tolist() == [1]


@pytest.mark.parametrize("name", ["update.pt", "update"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"is a .safetensors file; got .*{name}: choose another name"):
        Recorder(network()).save(tmp_path / name, network())
    assert not list(tmp_path.iterdir())


def test_files_that_are_no_recorded_update_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "update.safetensors"
    with pytest.raises(MissingDataError, match="there is no recorded update at .*update.safetensors: record it with"):
        RecordedUpdate.load(path)
    Recorder(network()).save(path, network())
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match="truncated or not a safetensors file"):
            RecordedUpdate.load(path)
    save_file(network().state_dict(), path)
    with pytest.raises(CorruptFileError, match="but not a recorded update written by this package"):
        RecordedUpdate.load(path)


def test_a_damaged_truth_is_not_taken_for_none(tmp_path: Path) -> None:
    path = Recorder(network()).save(tmp_path / "update.safetensors", network(), labels=[1])
    truth_of(path).write_bytes(truth_of(path).read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=r"update.truth.safetensors is truncated"):
        RecordedUpdate.load(path)


@pytest.mark.parametrize("part", ["before", "sent"])
def test_a_file_without_one_of_its_parts_is_refused(tmp_path: Path, part: str) -> None:
    update = replace(Recorder(network()).record(network()), **{part: {}})
    with pytest.raises(CorruptFileError, match="does not hold weights before and an update: record it again"):
        RecordedUpdate.load(update.save(tmp_path / "update.safetensors"))


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    path = Recorder(network()).save(tmp_path / "update.safetensors", network())
    rewrite(path, form="sum")
    with pytest.raises(CorruptFileError, match="does not hold weights before and an update"):
        RecordedUpdate.load(path)


def test_recording_needs_no_framework() -> None:
    """Flower and NVFlare are imported by their adapters alone."""
    code = "import sys, lit_recon.clients.record; print({'flwr', 'nvflare'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()"


def rewrite(path: Path, **header: Any) -> None:
    """Replace entries of the header."""
    with safe_open(path, framework="pt") as file:
        [(key, text)] = file.metadata().items()
    save_file(load_file(path), path, {key: json.dumps({**json.loads(text), **header})})
