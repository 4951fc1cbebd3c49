"""Models under attack: trained once for many attacks, told apart by all that their weights depend on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import GradientMatching
from lit_recon.cli import attack, train
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, ShapeError, UnsupportedModelError
from lit_recon.experiments.settings import AttackSettings, BackboneSettings, ModelSettings
from lit_recon.experiments.update_attack import run
from lit_recon.experiments.victim_model import BackboneTraining, VictimModel, find_target
from lit_recon.models import BackboneCheckpoint, LeNet, ResNet18, WideFeatureLayer
from lit_recon.modules.data import VictimDataModule
from lit_recon.records import Normalization
from lit_recon.training.trainer import TrainerSettings

CPU = TrainerSettings(accelerator="cpu")
Find = Callable[..., VictimModel]


@pytest.fixture(scope="module")
def victims() -> VictimDataModule:
    return VictimDataModule(Digits(), n_victims=4)


@pytest.fixture
def find(victims: VictimDataModule, tmp_path: Path) -> Find:
    settings = BackboneSettings(cache=tmp_path, trunk=LeNet, epochs=1, n_train=64, padding=1, lr=0.01)

    def find(seed: int = 0, data: VictimDataModule = victims, processes: int = 1, **changes: object) -> VictimModel:
        changed = replace(settings, **changes)  # type: ignore[arg-type]  # of many types
        return find_target(changed, data, seed, processes=processes)

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


def test_of_runs_that_begin_together_one_trains_and_the_others_wait(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [find(epochs=0) for _ in range(3)]
    began, plain = [], BackboneTraining.run

    def slow(self: BackboneTraining, folder: Path, *others: Any) -> BackboneCheckpoint:
        began.append(folder)
        time.sleep(0.3)
        return plain(self, folder, *others)

    monkeypatch.setattr(BackboneTraining, "run", slow)
    with ThreadPoolExecutor(len(targets)) as pool:
        found = list(pool.map(lambda target: target.trained(TrainerSettings("cpu")), targets))
    assert len(began) == 1
    assert len({one.split_hash for one in found}) == 1


def test_a_last_batch_of_one_image_is_refused(find: Find) -> None:
    """The last maps of a ResNet-18 are of 1x1 on digits; LeNet has no BatchNorm, and an untrained model no batches."""
    with pytest.raises(ConfigError, match=r"65 training images in batches of 64 leave a batch of one image: BatchNorm"):
        find(trunk=ResNet18, n_train=65, batch_size=64)
    for changes in ({"trunk": LeNet}, {"trunk": ResNet18, "epochs": 0}, {"trunk": ResNet18, "n_train": 66}):
        find(**{"n_train": 65, "batch_size": 64, **changes})


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


@pytest.mark.parametrize("devices", [1, 2])
def test_a_process_that_starts_others_names_the_file_as_they_do(
    devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning sets the variables when it starts them; until then the settings alone tell the number of processes."""
    found: list[Path | None] = []

    def stop(settings: AttackSettings, target: VictimModel, victims: VictimDataModule) -> NoReturn:
        found.append(target.path)
        raise ConfigError("far enough")

    monkeypatch.setattr(run, "rehearse", stop)
    settings = ["run", "--data", "Digits", "--backbone.trunk", "LeNet", "--backbone.cache", str(tmp_path)]
    settings += ["--trainer.accelerator", "cpu", "--trainer.devices", str(devices), "--out", str(tmp_path / "run")]
    assert attack(settings) != 0
    for name, value in {"WORLD_SIZE": str(devices), "LOCAL_RANK": "0", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert attack(settings) != 0
    assert found[0] is not None
    assert found[0] == found[1]


def test_a_checkpoint_of_another_network_than_the_settings_name_is_told(find: Find) -> None:
    path = find(epochs=0).trained(CPU) and find(epochs=0).path
    (note,) = find(checkpoint=path, trunk=ResNet18).notes
    assert "the model is the LeNet in" in note
    assert find(checkpoint=path, trunk=LeNet).notes == find(checkpoint=path, trunk=None).notes == ()


def test_the_number_of_processes_tells_backbones_apart(find: Find) -> None:
    assert find(processes=2).path != find().path


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (("--trunk", "LeNet", "--local_steps.batches", "2"), "must divide every client's batch, here 4 images and 3"),
        (("--trunk", "ResNet18", "--batch_size", "2"), "6 training images in batches of 2 leave a batch of one image"),
    ],
    ids=["local batches", "single images"],
)
def test_the_share_of_every_process_is_checked_before_others_start(
    setting: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six images in batches of four, or of two, come out even in one process and do not in two."""
    monkeypatch.setattr(BackboneTraining, "run", None)  # it would start others that run these tests
    small = ["--data", "Digits", "--n_train", "6", "--batch_size", "4", "--epochs", "1", "--trainer.accelerator", "cpu"]
    assert train(["backbone", *small, *setting, "--trainer.devices", "2", "--out", str(tmp_path / "run")]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


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


class Net(nn.Module):
    """A user's own classifier of small grey images."""

    def __init__(self, outputs: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, outputs))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


PATH = f"{__name__}.Net"


def find_foreign(data: VictimDataModule, seed: int = 0, **changes: object) -> VictimModel:
    foreign = ModelSettings(class_path=PATH, **changes)  # type: ignore[arg-type]  # of many types
    return find_target(BackboneSettings(), data, seed, foreign)


def test_a_module_of_another_library(victims: VictimDataModule, tmp_path: Path) -> None:
    found = find_foreign(victims)
    assert (found.path, found.training, found.notes) == (None, None, ())
    assert found.announcement() == [f"model       {PATH}() with random weights"]
    assert found.facts(found.trained(CPU)) == {"model": f"{PATH}()", "weights": "random"}
    assert found.model.normalization == victims.normalization
    assert torch.equal(*(find_foreign(victims).model.get_parameter("layers.3.bias") for _ in range(2)))
    other = find_foreign(victims, seed=1).model
    assert not torch.equal(found.model.get_parameter("layers.3.bias"), other.get_parameter("layers.3.bias"))
    torch.save(Net().state_dict(), tmp_path / "w.pt")
    given = find_foreign(victims, weights=tmp_path / "w.pt", normalization=Normalization((0.0,), (1.0,)))
    assert given.path == tmp_path / "w.pt"
    assert "it was not checked whether" in given.notes[0]
    assert given.model.normalization == Normalization((0.0,), (1.0,))


class UnreadData(VictimDataModule):
    """Data whose reading would be a download."""

    @property
    def splits(self) -> NoReturn:  # type: ignore[override]  # never read
        raise AssertionError("the data were read")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"init_args": {"depth": 3}}, ConfigError, "change model.init_args"),
        ({"weights": Path("nowhere.pt")}, MissingDataError, "nowhere.pt"),
        ({"image_shape": (1, 9, 9)}, UnsupportedModelError, "forward pass fails"),
        ({"image_shape": (1, 8, 8), "normalization": Normalization((0.0,) * 3, (1.0,) * 3)}, ShapeError, "3 channels"),
    ],
)
def test_bad_modules_are_refused_before_the_data_are_read(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_foreign(UnreadData(Digits()), **changes)


def test_a_module_is_checked_against_the_data(victims: VictimDataModule) -> None:
    with pytest.raises(ShapeError, match="has 3 outputs, but the dataset has 10 classes"):
        find_foreign(victims, init_args={"outputs": 3})
    with pytest.raises(ShapeError, match=r"model.image_shape is \(1, 8, 8\), but the images .* are \(1, 9, 9\)"):
        find_foreign(VictimDataModule(Digits(size=9)), image_shape=(1, 8, 8))
    with pytest.raises(ConfigError, match=r"model.weights needs model.class_path"):
        ModelSettings(weights=Path("w.pt"))
    attack = GradientMatching(steps=1)
    with pytest.raises(ConfigError, match="there is one victim model"):
        AttackSettings(
            attack=attack, model=ModelSettings(class_path=PATH), backbone=BackboneSettings(checkpoint=Path("b"))
        )


def test_trunks_of_one_name_are_different_backbones(find: Find) -> None:
    namesake = type("LeNet", (LeNet,), {"__module__": __name__})
    path = find(trunk=namesake).path
    namesake.__name__ = "Namesake"  # the command line, in later tests, finds classes by their names
    assert path != find().path
