"""Modules of other libraries: built, given weights, and checked to be classifiers of images."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_recon.errors import (
    ConfigError,
    CorruptFileError,
    LitReconError,
    MissingDataError,
    ShapeError,
    UnsupportedModelError,
)
from lit_recon.io.tensors import read_state
from lit_recon.models import MLP, Backbone, build_module, load_weights, public_model
from lit_recon.records import Normalization

GREY = Normalization((0.3,), (0.4,))
SHAPE = (1, 4, 4)


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, outputs))


class Returns(nn.Module):
    """Returns what it is told, whatever the images."""

    def __init__(self, returned: object) -> None:
        super().__init__()
        self.layer, self.returned = nn.Linear(16, 3), returned

    def forward(self, images: Tensor) -> object:
        return self.returned


class Tokens(nn.Module):
    """Takes something else than images."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(tokens)
        return embedded.mean(1)


def test_a_module_is_given_normalized_pixels_under_its_own_names() -> None:
    model = network().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    public = public_model(model, SHAPE, GREY)
    images = torch.rand(5, *SHAPE)
    torch.testing.assert_close(public.model(images), model((images - 0.3) / 0.4))
    assert public[1:] == (SHAPE, GREY, 3)
    assert [name for name, _ in public.model.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(public.model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model, "n_classes")


def test_without_normalization_a_module_is_given_the_pixels() -> None:
    public = public_model(network().double(), SHAPE)
    images = torch.rand(2, *SHAPE).double()
    torch.testing.assert_close(public.model(images), network().double().eval()(images))
    assert public.normalization == Normalization((0.0,), (1.0,))


def test_a_module_may_carry_shape_and_normalization() -> None:
    model = network()
    model.image_shape, model.normalization = SHAPE, GREY
    public = public_model(model)
    assert public[1:] == (SHAPE, GREY, 3)
    images = torch.rand(2, *SHAPE)
    torch.testing.assert_close(public.model(images), network().eval()(images))
    with pytest.raises(ConfigError, match="Sequential normalizes its input by itself"):
        public_model(model, normalization=GREY)
    with pytest.raises(ShapeError, match=r"takes images \(1, 4, 4\), but image_shape is \(1, 5, 5\)"):
        public_model(model, (1, 5, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", [network(), Backbone(MLP(SHAPE, [4]), 3, GREY)], ids=["module", "backbone"])
def test_models_in_half_precision_are_refused(model: nn.Module, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModelError, match=f"has parameters of {dtype}; attacks need .*: call .float()"):
        public_model(copy.deepcopy(model).to(dtype), SHAPE)


def test_a_backbone_stays_what_it_is() -> None:
    model = Backbone(MLP(SHAPE, [4]), 3, GREY)
    assert public_model(model) == (model, SHAPE, GREY, 3)


@pytest.mark.parametrize(
    ("model", "shape", "normalization", "error", "message"),
    [
        (network(), None, None, ConfigError, "has no attribute image_shape: give image_shape="),
        (network(), (4, 4), None, ShapeError, r"\(channels, height, width\), all positive; got \(4, 4\)"),
        (network(), (1, 0, 4), None, ShapeError, "all positive"),
        (network(), (3, 4, 4), GREY, ShapeError, r"normalization has 1 channels, but images are \(3, 4, 4\)"),
        (nn.Flatten(), SHAPE, None, UnsupportedModelError, "Flatten has no parameters"),
        (network(), (1, 5, 5), None, UnsupportedModelError, r"must take images \(2, 1, 5, 5\) .* RuntimeError: mat1"),
        (Tokens(), SHAPE, None, UnsupportedModelError, "Tokens must take images .* fails: RuntimeError"),
        (Returns({"logits": 1}), SHAPE, None, UnsupportedModelError, r"must return logits \(2, k\) .* returns dict"),
        (Returns(torch.ones(2, 3, 1)), SHAPE, None, UnsupportedModelError, r"returns a tensor \(2, 3, 1\)"),
        (Returns(torch.ones(4, 3)), SHAPE, None, UnsupportedModelError, r"returns a tensor \(4, 3\)"),
        (network(1), SHAPE, None, UnsupportedModelError, r"k >= 2 classes .* returns a tensor \(2, 1\)"),
    ],
)
def test_what_is_no_classifier_of_images_is_refused(
    model: nn.Module,
    shape: tuple[int, ...] | None,
    normalization: Normalization | None,
    error: type[LitReconError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        public_model(model, shape, normalization)


def test_random_weights_follow_from_the_seed() -> None:
    state = torch.get_rng_state()
    one, same, other = (build_module("torch.nn.Linear", {"in_features": 3, "out_features": 2}, s) for s in (1, 1, 2))
    assert torch.equal(one.weight, same.weight)
    assert not torch.equal(one.weight, other.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_function_may_build_the_module() -> None:
    assert build_module("torchvision.models.squeezenet1_1", {"num_classes": 7}, 0).num_classes == 7


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("Linear", {}, "'Linear' cannot be imported .*: give the import path"),
        ("nowhere.Linear", {}, "cannot be imported .*No module named 'nowhere'"),
        ("torch.nn.Linnear", {}, "cannot be imported .*has no attribute 'Linnear'"),
        ("collections.OrderedDict", {}, r"must be a torch.nn.Module, or a function .*; it is the class OrderedDict"),
        ("math.pi", {}, "it is of type float"),
        ("builtins.dict", {}, "it is the class dict"),
        ("math.factorial", {}, r"math.factorial\(\) fails: TypeError: .*; change model.init_args"),
        ("os.getcwd", {}, "it returned of type str"),
        ("torch.nn.Linear", {"features": 3}, r"torch.nn.Linear\(features=3\) fails: TypeError: .*'features'"),
    ],
)
def test_what_gives_no_module_is_refused(path: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_module(path, arguments, 0)


WRITERS: dict[str, Callable[[dict[str, Tensor], Path], Path]] = {
    "safetensors": lambda state, folder: (save_file(state, folder / "w.safetensors"), folder / "w.safetensors")[1],
    "pt": lambda state, folder: (torch.save(state, folder / "w.pt"), folder / "w.pt")[1],
    "nested": lambda state, folder: (
        torch.save({"epoch": 3, "state_dict": state}, folder / "w.pth"),
        folder / "w.pth",
    )[1],
}


@pytest.mark.parametrize("kind", WRITERS)
def test_weights_by_the_names_of_the_state_dict(kind: str, tmp_path: Path) -> None:
    wanted = network().state_dict()
    model = network()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    load_weights(model, WRITERS[kind](wanted, tmp_path))
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    state = network().state_dict()
    state["3.weight"] = torch.zeros(4, 8)
    del state["0.weight"]
    state |= {f"extra{i}": torch.zeros(1) for i in range(7)}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ShapeError) as raised:
        load_weights(network(), tmp_path / "w.safetensors")
    message = str(raised.value)
    assert (
        "do not fit Sequential: 1 missing: 0.weight; 7 superfluous: extra0, extra1, extra2, extra3, extra4, ...;"
        in (message)
    )
    assert "1 of another shape: 3.weight (4, 8) instead of (3, 8)" in message


def test_diverged_weights_are_refused(tmp_path: Path) -> None:
    state = network().state_dict()
    state["3.weight"][0, 0] = torch.nan
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match="NaN or infinite in 1 tensors: 3.weight; .*lower learning rate"):
        load_weights(network(), tmp_path / "w.safetensors")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save({"state_dict": network().state_dict(), "more": Bomb()}, tmp_path / "w.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(), protocol=2))
    torch.save(network(), tmp_path / "module.pt")
    for name in ("w.pt", "plain.pt", "module.pt"):
        with pytest.raises(CorruptFileError, match=r"holds more than tensors .*: save model.state_dict\(\)"):
            load_weights(network(), tmp_path / name)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_a_state_dict_may_be_under_a_key(key: str, tmp_path: Path) -> None:
    state, path = network().state_dict(), tmp_path / "w.pt"
    optimizer = torch.optim.Adam(network().parameters()).state_dict()
    torch.save({"epoch": 3, "loss": torch.zeros(2), key: state, "optimizer": optimizer, "more": {}}, path)
    found = read_state(path, "weights", "save it")
    assert all(torch.equal(found[name], value) for name, value in state.items())
    torch.save({"model": state, "average": state}, path)
    with pytest.raises(CorruptFileError, match="one dict of tensors by name; got several, under model, average: save"):
        read_state(path, "weights", "save it")


def test_files_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    for name in ("nowhere.pt", "nowhere.safetensors"):
        with pytest.raises(MissingDataError, match=f"there are no weights at .*{name}|there is no weights"):
            load_weights(network(), tmp_path / name)
    with pytest.raises(ConfigError, match=r"must be a .safetensors, .pt or .pth file; got .*w.bin"):
        load_weights(network(), tmp_path / "w.bin")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CorruptFileError, match="must hold a dict of tensors by name"):
        load_weights(network(), tmp_path / "list.pt")
    torch.save(network().state_dict(), tmp_path / "w.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "w.pt").read_bytes()[:300])
    with pytest.raises(CorruptFileError, match="truncated"):
        load_weights(network(), tmp_path / "half.pt")
    np.savez(tmp_path / "w.npz", weight=np.zeros(3))
    with pytest.raises(CorruptFileError, match=r"neither a \.safetensors file nor one of torch\.save.*: save it"):
        read_state(tmp_path / "w.npz", "weights", "save it")
