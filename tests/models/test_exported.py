from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.clients import Client
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, UnsupportedModelError
from lit_recon.models import build_module
from lit_recon.models.exported import read_exported
from lit_recon.records import BatchNormMode, Normalization

DYNAMIC = ({0: torch.export.Dim.DYNAMIC},)


class Small(nn.Module):
    """Layers of every kind, one of them used twice, one function, and a weight that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6, eps=1e-3)
        self.twice = nn.Conv2d(6, 6, 3, padding="same", groups=2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, images: Tensor) -> Tensor:
        maps = torch.relu(self.norm(self.first(images)))
        maps = torch.nn.functional.gelu(self.twice(self.twice(maps))) * self.scale[:, None, None]
        logits: Tensor = self.head(self.drop(maps.mean(dim=(2, 3))))
        return logits


def saved(model: nn.Module, path: Path, *inputs: Tensor, shapes: Any = DYNAMIC) -> Path:
    torch.export.save(torch.export.export(model, inputs, dynamic_shapes=shapes), path)
    return path


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small().double()


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(4)


@pytest.mark.parametrize("exported_in", ["train", "eval"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_update_is_that_of_the_model(model: Small, tmp_path: Path, exported_in: str, mode: BatchNormMode) -> None:
    path = saved(getattr(model, exported_in)(), tmp_path / "model.pt2", batch()[0])
    found = read_exported(path)
    assert found.state_dict().keys() == model.state_dict().keys()
    normalization = Normalization((0.5,) * 3, (0.2,) * 3)
    updates = [
        Client(one, mode, image_shape=(3, 8, 8), normalization=normalization).observe(*batch()).update
        for one in (model, found)
    ]
    assert updates[0].keys() == updates[1].keys()
    for name, value in updates[0].items():
        torch.testing.assert_close(updates[1][name], value)


def test_layers_are_found_where_they_were(model: Small, tmp_path: Path) -> None:
    found = read_exported(saved(model, tmp_path / "model.pt2", batch()[0]))
    for name in ("first", "norm", "head"):
        assert repr(found.get_submodule(name)) == repr(model.get_submodule(name))
    assert isinstance(found.get_submodule("twice"), nn.Conv2d)
    assert sum(isinstance(one, nn.Dropout) for one in found.modules()) == 1
    assert found.image_shape == (3, 8, 8)


def test_dropout_and_batch_norm_follow_train_and_eval(model: Small, tmp_path: Path) -> None:
    for mode in ("eval", "train"):
        found = read_exported(saved(getattr(model, mode)(), tmp_path / f"{mode}.pt2", batch()[0])).train()
        before = found.state_dict()["norm.running_mean"].clone()
        one, two = (found(batch()[0]) for _ in range(2))
        assert not torch.equal(one, two)  # one half of the features dropped, anew
        assert not torch.equal(found.state_dict()["norm.running_mean"], before)
        assert found.state_dict()["norm.num_batches_tracked"] == 2
    found.eval()
    torch.testing.assert_close(found(batch()[0]), found(batch()[0]))


class Shared(nn.Module):
    """Two uses of the same weights that are no calls of one layer."""

    def __init__(self, second: Callable[[Tensor, nn.Linear | nn.Conv2d], Tensor], layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer, self.second = layer, second

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1) if isinstance(self.layer, nn.Linear) else images
        return self.second(self.layer(rows).relu(), self.layer).flatten(1)


UNLIKE: dict[str, tuple[nn.Module, type[nn.Module]]] = {
    "BatchNorm1d": (nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4)), nn.BatchNorm1d),
    "BatchNorm3d": (nn.Sequential(nn.Unflatten(1, (3, 1)), nn.BatchNorm3d(3), nn.Flatten()), nn.BatchNorm3d),
    "Dropout1d": (nn.Sequential(nn.Flatten(2), nn.Dropout1d(), nn.Flatten()), nn.Dropout1d),
    "Dropout2d": (nn.Sequential(nn.Dropout2d(), nn.Flatten()), nn.Dropout2d),
    "no bias": (Shared(lambda x, layer: F.linear(x, layer.weight), nn.Linear(192, 192)), nn.Linear),
    "other bias": (
        Shared(lambda x, layer: F.linear(x, layer.weight, x.mean(0)), nn.Linear(192, 192, bias=False)),
        nn.Linear,
    ),
    "other stride": (
        Shared(lambda x, layer: F.conv2d(x, layer.weight, layer.bias, stride=2), nn.Conv2d(3, 3, 3)),
        nn.Conv2d,
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_operations_become_layers_only_where_these_compute_the_same(tmp_path: Path, name: str) -> None:
    model, kind = UNLIKE[name]
    model, images = model.double(), batch()[0]
    found = read_exported(saved(model, tmp_path / "model.pt2", images))
    assert sum(isinstance(one, kind) for one in found.modules()) == 1
    outputs = []
    for one in (model.train(), found.train()):
        torch.manual_seed(0)
        outputs.append(one(images))
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(found.eval()(images), model.eval()(images))


def test_a_configuration_builds_it(model: Small, tmp_path: Path) -> None:
    path = saved(model, tmp_path / "model.pt2", batch()[0])
    built = build_module("lit_recon.models.exported.read_exported", {"path": str(path)}, seed=0)
    torch.testing.assert_close(built.eval()(batch()[0]), model.eval()(batch()[0]))


def test_fixed_batches_and_other_inputs_are_refused(model: Small, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batches of 4 only: export it with dynamic_shapes"):
        read_exported(saved(model, tmp_path / "fixed.pt2", batch()[0], shapes=None))
    with pytest.raises(UnsupportedModelError, match="takes 1 inputs, the first of 2 axes"):
        read_exported(saved(nn.Linear(3, 2), tmp_path / "flat.pt2", torch.rand(4, 3)))
    two = saved(nn.Bilinear(3, 3, 2), tmp_path / "two.pt2", torch.rand(4, 3), torch.rand(4, 3), shapes=DYNAMIC * 2)
    with pytest.raises(UnsupportedModelError, match="takes 2 inputs"):
        read_exported(two)


def test_missing_and_damaged_files(model: Small, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="no exported model at"):
        read_exported(tmp_path / "none.pt2")
    path = saved(model, tmp_path / "model.pt2", batch()[0])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CorruptFileError, match=r"cannot be read .* save the model anew"):
        read_exported(path)


class Malice:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def rewritten(path: Path, changes: dict[str, Any]) -> Path:
    """The file with other contents at the ends of some names; a function changes what is there."""
    changed = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        names = old.namelist()
        for name in names:
            own = next((value for end, value in changes.items() if name.endswith(end)), None)
            content = old.read(name)
            new.writestr(name, content if own is None else own(content) if callable(own) else own)
        for end, value in changes.items():
            if not any(name.endswith(end) for name in names):
                new.writestr(f"{names[0].partition('/')[0]}/{end}", value)
    return changed


def pickled(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_no_code_runs_from_a_file(model: Small, tmp_path: Path) -> None:
    path, trace = saved(model, tmp_path / "model.pt2", batch()[0]), tmp_path / "trace"
    malice = Malice(trace)

    def with_object(content: bytes) -> bytes:
        config = json.loads(content)
        config["config"]["extra"] = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}
        return json.dumps(config).encode()

    def with_size(content: bytes) -> bytes:
        graph = json.loads(content)
        text = json.dumps(graph)
        own = next(iter(sizes_of(graph)))
        evil = f"__import__('pathlib').Path({str(trace)!r}).touch()"
        return text.replace(json.dumps(own)[1:-1], json.dumps(evil)[1:-1]).encode()

    attempts: list[tuple[dict[str, Any], str]] = [
        ({"data/sample_inputs/model.pt": pickled(malice)}, "cannot be read"),
        ({"data/constants/model.pt": pickle.dumps(malice)}, "constants of an older PyTorch"),
        (
            {"model_constants_config.json": with_object, "data/constants/opaque_obj_0": pickle.dumps(malice)},
            "extra, which would be unpickled",
        ),
        ({"data/aotinductor/model/code.so": b"\x7fELF"}, "compiled code"),
        ({"models/model.json": with_size}, "which is no arithmetic"),
    ]
    for changes, match in attempts:
        with pytest.raises(CorruptFileError, match=match):
            read_exported(rewritten(path, changes))
        assert not trace.exists(), match


def sizes_of(content: Any) -> list[str]:
    if isinstance(content, dict):
        own = [content["expr_str"]] if "expr_str" in content else []
        return own + [size for value in content.values() for size in sizes_of(value)]
    return [size for value in content for size in sizes_of(value)] if isinstance(content, list) else []
