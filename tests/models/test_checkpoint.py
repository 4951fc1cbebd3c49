"""Backbones on disk: bit for bit back, and a clear word about every file that is not one."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import lit_recon.io.files
from lit_recon.errors import (
    CorruptFileError,
    LitReconError,
    MissingDataError,
    ShapeError,
    UnsupportedModelError,
)
from lit_recon.models import (
    MLP,
    Backbone,
    BackboneCheckpoint,
    ConvNet,
    LeNet,
    ResNet18,
    Trunk,
    WideFeatureLayer,
    WideResNet,
    load_backbone,
    save_backbone,
)
from lit_recon.models.checkpoint import FORMAT
from lit_recon.records import Normalization

GREY = Normalization((0.1306605,), (1 / 3,))
COLOR = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def channels_last(model: Backbone) -> Backbone:
    """With kernels that are strided in memory."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


MODELS: dict[str, Callable[[], Backbone]] = {
    "resnet": lambda: Backbone(ResNet18((3, 9, 8), "batch", "gelu", width=4), 3, COLOR),
    "resnet-group": lambda: Backbone(ResNet18((1, 8, 8), "group", width=4), 3, GREY),
    "wide-resnet": lambda: Backbone(WideResNet((1, 8, 8), 10, 1, dropout=0.1), 3, GREY),
    "convnet": lambda: Backbone(ConvNet((1, 8, 8), [4, 5], "none", "elu"), 3, GREY),
    "lenet": lambda: Backbone(LeNet((3, 8, 8), width=5), 3, COLOR),
    "mlp": lambda: Backbone(MLP((1, 4, 4), [7, 6], "tanh"), 3, GREY),
    "homogeneous": lambda: Backbone(MLP((1, 4, 4), [7], "relu", "first", 1e-3), 3, GREY, head_bias=False),
    "double": lambda: Backbone(MLP((1, 4, 4), [7]), 3, GREY).double(),
    "channels-last": lambda: channels_last(Backbone(ConvNet((3, 8, 8)), 3, COLOR)),
    "feature-layer": lambda: Backbone(MLP((1, 4, 4), [6]), 3, GREY, WideFeatureLayer(6, 11, 4, "gelu", seed=5)),
    "random-layer": lambda: Backbone(MLP((1, 4, 4), [6]), 3, GREY, WideFeatureLayer(6, 11, 0)),
}


def checkpoint_of(name: str, accuracy: float | None = 0.1 + 0.2) -> BackboneCheckpoint:
    torch.manual_seed(0)
    model = MODELS[name]()
    model.train()(torch.rand(4, *model.image_shape, dtype=model.head.weight.dtype))  # buffers leave their start
    return BackboneCheckpoint(model, ["a", "b", "ü"], "0123456789abcdef", 7, accuracy)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "on" / "demand" / "backbone.safetensors"


def rewrite(path: Path, change: Callable[[dict[str, object], dict[str, Tensor]], None]) -> None:
    """Save the file again with another header or other tensors."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[FORMAT.key])
    state = load_file(path)
    change(header, state)
    save_file(state, path, metadata={FORMAT.key: json.dumps(header)})


@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit_back(name: str, path: Path) -> None:
    saved = checkpoint_of(name)
    save_backbone(path, saved)
    loaded = load_backbone(path)
    assert replace(loaded, model=saved.model) == saved
    assert loaded.model.normalization == saved.model.normalization
    assert loaded.model.trunk.arguments == saved.model.trunk.arguments
    states = saved.model.state_dict(), loaded.model.state_dict()
    assert list(states[0]) == list(states[1])
    for key, value in states[0].items():
        assert value.dtype == states[1][key].dtype
        assert torch.equal(value, states[1][key]), key
    frozen = [[name for name, p in m.named_parameters() if not p.requires_grad] for m in (saved.model, loaded.model)]
    assert frozen[0] == frozen[1]
    images = torch.rand(2, *saved.model.image_shape, dtype=saved.model.head.weight.dtype)
    torch.testing.assert_close(loaded.model(images), saved.model.eval()(images))


def test_a_loaded_model_is_in_evaluation_mode(path: Path) -> None:
    save_backbone(path, checkpoint_of("convnet"))
    assert not any(part.training for part in load_backbone(path).model.modules())


def test_an_unmeasured_accuracy_stays_unknown(path: Path) -> None:
    save_backbone(path, checkpoint_of("mlp", accuracy=None))
    assert load_backbone(path).accuracy is None


def test_loading_leaves_the_global_random_state_alone(path: Path) -> None:
    save_backbone(path, checkpoint_of("lenet"))
    state = torch.get_rng_state()
    load_backbone(path)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failed_save_leaves_the_old_file_and_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_backbone(path, checkpoint_of("mlp"))
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(lit_recon.io.files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_backbone(path, checkpoint_of("mlp", accuracy=None))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"no backbone at .*: train one with"):
        load_backbone(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file(share: float, path: Path) -> None:
    save_backbone(path, checkpoint_of("resnet"))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CorruptFileError, match=r"is truncated or not a safetensors file \(.*\): train one with"):
        load_backbone(path)


def test_a_pickle_is_not_opened(path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(path.parent / "exploded"),)

    path.parent.mkdir(parents=True)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CorruptFileError):
        load_backbone(path)
    assert os.listdir(path.parent) == [path.name]


def test_somebody_elses_safetensors_file(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(CorruptFileError, match="not a backbone written by this package"):
        load_backbone(tmp_path / "foreign.safetensors")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}"])
def test_a_header_that_says_nothing(text: str, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "odd.safetensors", metadata={FORMAT.key: text})
    with pytest.raises(CorruptFileError):
        load_backbone(tmp_path / "odd.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda header, state: header.pop("n_classes"),
        lambda header, state: header.pop("split_hash"),
        lambda header, state: header.update(n_classes=4),
        lambda header, state: header.update(class_names=["a"]),
        lambda header, state: header.update(normalization={"mean": [0.5], "std": [0.0]}),
        lambda header, state: header.update(normalization=None),
        lambda header, state: header["trunk_arguments"].update(hidden=[5, 6]),
        lambda header, state: header["trunk_arguments"].update(unknown=1),
        lambda header, state: header["trunk_arguments"].update(image_shape=[4, 4]),
        lambda header, state: state.pop("head.bias"),
        lambda header, state: state.pop("head.weight"),
        lambda header, state: state.update(extra=torch.zeros(1)),
    ],
)
def test_header_and_tensors_that_do_not_fit(
    change: Callable[[dict[str, object], dict[str, Tensor]], None], path: Path
) -> None:
    save_backbone(path, checkpoint_of("mlp"))
    rewrite(path, change)
    with pytest.raises(CorruptFileError, match="does not describe a backbone that its own tensors fit"):
        load_backbone(path)


def test_another_format_version(path: Path) -> None:
    save_backbone(path, checkpoint_of("mlp"))
    rewrite(path, lambda header, state: header.update(version=2))
    with pytest.raises(CorruptFileError, match="another format than 1"):
        load_backbone(path)


class Averages(Trunk):
    """A user's own trunk."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        super().__init__(image_shape, {})
        self.out_features = image_shape[0]

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


def test_a_trunk_of_the_users_own(path: Path) -> None:
    save_backbone(path, BackboneCheckpoint(Backbone(Averages((3, 4, 4)), 2, COLOR), ["a", "b"], "", 0))
    assert isinstance(load_backbone(path).model.trunk, Averages)
    rewrite(path, lambda header, state: header.update(trunk=f"{__name__}.Medians"))
    with pytest.raises(UnsupportedModelError, match=r"Medians' cannot be imported .*: put the package"):
        load_backbone(path)
    rewrite(path, lambda header, state: header.update(trunk="pathlib.Path"))
    with pytest.raises(UnsupportedModelError, match=r"'pathlib.Path' is no subclass of lit_recon.models.Trunk"):
        load_backbone(path)


#: A user's own trunk, which has the name of one of this package's.
UsersLeNet = type("LeNet", (Averages,), {"__module__": __name__, "__qualname__": "UsersLeNet"})


def test_two_trunks_of_one_name(path: Path) -> None:
    save_backbone(path, BackboneCheckpoint(Backbone(UsersLeNet((3, 4, 4)), 2, COLOR), ["a", "b"], "", 0))
    assert type(load_backbone(path).model.trunk) is UsersLeNet
    save_backbone(path, checkpoint_of("lenet"))
    assert type(load_backbone(path).model.trunk) is LeNet


def test_a_file_of_version_0_1_names_its_trunk_by_the_bare_class(path: Path) -> None:
    save_backbone(path, checkpoint_of("convnet"))
    rewrite(path, lambda header, state: header.update(trunk="ConvNet"))
    assert type(load_backbone(path).model.trunk) is ConvNet


def test_a_path_may_be_text(path: Path) -> None:
    save_backbone(str(path), checkpoint_of("mlp"))
    assert load_backbone(str(path)).epoch == 7


def test_one_class_name_per_output() -> None:
    with pytest.raises(ShapeError, match="got 2 names for 3 outputs"):
        BackboneCheckpoint(MODELS["mlp"](), ["a", "b"], "", 0)


def test_every_refusal_is_one_of_ours() -> None:
    """The commands turn these into one line and exit code 2."""
    assert all(issubclass(error, LitReconError) for error in (CorruptFileError, MissingDataError, ShapeError))
