"""Models under attack: trained once for many attacks, told apart by all that their weights depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, CorruptFileError, ShapeError
from lit_recon.experiments.settings import BackboneSettings
from lit_recon.experiments.victim_model import VictimModel, find_target
from lit_recon.models import LeNet, ResNet18, WideFeatureLayer
from lit_recon.modules.data import VictimDataModule
from lit_recon.training.trainer import TrainerSettings

CPU = TrainerSettings(accelerator="cpu")
Find = Callable[..., VictimModel]


@pytest.fixture(scope="module")
def victims() -> VictimDataModule:
    return VictimDataModule(Digits(), n_victims=4)


@pytest.fixture
def find(victims: VictimDataModule, tmp_path: Path) -> Find:
    settings = BackboneSettings(cache=tmp_path, trunk=LeNet, epochs=1, n_train=64, padding=1, lr=0.01)

    def find(seed: int = 0, data: VictimDataModule = victims, **changes: object) -> VictimModel:
        return find_target(replace(settings, **changes), data, seed)  # type: ignore[arg-type]  # of many types

    return find


def test_a_backbone_is_trained_once(find: Find) -> None:
    first = find()
    assert first.checkpoint is None
    trained = first.trained(CPU)
    assert trained.epoch == 1
    assert trained.accuracy is not None
    again = find()
    assert again.path == first.path
    assert again.training is None
    kept = again.trained(CPU)
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, kept.model.state_dict()[name])
    assert not (first.path.parent / "checkpoints" / "last.ckpt").exists()


def test_a_backbone_that_another_run_has_trained_meanwhile_is_taken(find: Find) -> None:
    slow, fast = find(), find()
    written = fast.trained(CPU)
    modified = slow.path.stat().st_mtime_ns
    taken = slow.trained(CPU)
    assert slow.path.stat().st_mtime_ns == modified
    assert torch.equal(taken.model.head.weight, written.model.head.weight)


def test_no_epochs_no_training(find: Find) -> None:
    checkpoint = find(epochs=0).trained(CPU)
    assert (checkpoint.epoch, checkpoint.accuracy) == (0, None)
    assert find(epochs=0).path == find(epochs=0, lr=0.5).path  # what is not used changes nothing
    assert torch.equal(find(epochs=0).model.head.weight, checkpoint.model.head.weight)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"epochs": 2},
        {"lr": 0.02},
        {"n_train": 65},
        {"flip": False},
        {"trunk": ResNet18},
        {"feature_layer": WideFeatureLayer},
        {"data": VictimDataModule(Digits(seed=1), n_victims=4)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_weights_makes_another_backbone(find: Find, change: dict[str, object]) -> None:
    assert find(**change).path != find().path


def test_victims_do_not_change_the_backbone(find: Find) -> None:
    assert find(data=VictimDataModule(Digits(), n_victims=9, seed=3)).path == find().path


def test_resnet_is_the_default(find: Find) -> None:
    assert isinstance(find(trunk=None).model.trunk, ResNet18)


def test_a_checkpoint_is_checked_against_the_data(find: Find, tmp_path: Path) -> None:
    path = find(epochs=0).trained(CPU) and find(epochs=0).path
    assert find(checkpoint=path).path == path
    with pytest.raises(ShapeError, match=r"\(1, 9, 9\)"):
        find(checkpoint=path, data=VictimDataModule(Digits(size=9)))
    with pytest.raises(ConfigError, match="split"):
        find(checkpoint=path, data=VictimDataModule(Digits(seed=1)))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError):
        find(checkpoint=path)
