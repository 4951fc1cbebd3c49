"""Training of a backbone: what moves and what does not, what is left behind, and going on after a kill."""

from __future__ import annotations

import hashlib
from pathlib import Path

import lit_recon._torchvision

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lit_recon.data.sources import Digits, ImageSource
from lit_recon.errors import ConfigError, CorruptFileError, RunExistsError
from lit_recon.models import MLP, Backbone, BackboneCheckpoint, ConvNet, WideFeatureLayer, load_backbone
from lit_recon.modules.backbone import BackboneModule, train_backbone
from lit_recon.modules.data import BackboneDataModule
from lit_recon.training.module import (
    BACKBONE_FILE,
    LAST_CHECKPOINT,
    UTILITY_FILE,
    ExportBackbone,
    Metrics,
    SGDSchedule,
    TrainingModule,
    read_utility,
    training_callbacks,
)
from lit_recon.training.trainer import TrainerSettings, build_trainer
from tests.modules.killing import KilledError, assert_same
from tests.processes import outputs, ranks

DIGITS = BackboneDataModule(Digits(), padding=1, flip=False)


def digits_model(seed: int = 0) -> Backbone:
    """A small one with a wide layer."""
    torch.manual_seed(seed)
    trunk = ConvNet((1, 8, 8), widths=[4, 8])
    return Backbone(trunk, 10, DIGITS.normalization, WideFeatureLayer(trunk.out_features, 64, 32, "gelu"))


def train(
    module: TrainingModule,
    out: Path,
    epochs: int,
    minutes: float = 60.0,
    *more: Callback,
    n_train: int | None = 400,
    source: ImageSource | None = None,
) -> BackboneCheckpoint:
    (out / LAST_CHECKPOINT).parent.mkdir(parents=True, exist_ok=True)
    data = BackboneDataModule(source or Digits(), padding=1, flip=False, n_train=n_train)
    callbacks = [*more, *training_callbacks(out, data.class_names, data.split_hash, minutes)]
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], callbacks, max_epochs=epochs)
    return load_backbone(train_backbone(trainer, module, data, out))


def plain(seed: int = 0, **rates: float) -> BackboneModule:
    return BackboneModule(digits_model(seed), SGDSchedule(**rates))  # type: ignore[arg-type]  # one of them an int


def accuracy_on_digits(model: Backbone) -> float:
    """Measured without Lightning."""
    return float((model(DIGITS.test.pixels()).argmax(dim=1) == DIGITS.test.labels).float().mean())


class Kill(Callback):
    """Ends training at the given hook of the given epoch."""

    def __init__(self, hook: str, epoch: int, batch: int = 0) -> None:
        self.hook, self.epoch, self.batch = hook, epoch, batch

    def _perhaps(self, hook: str, trainer: Trainer, batch: int = 0) -> None:
        if (hook, trainer.current_epoch, batch) == (self.hook, self.epoch, self.batch):
            raise KilledError

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        self._perhaps("batch", trainer, batch_idx)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._perhaps("validation", trainer)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._perhaps("fit end", trainer)


def test_digits_are_learned_within_seconds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Backbone(ConvNet((1, 8, 8), widths=[16, 32, 64]), 10, DIGITS.normalization)
    checkpoint = train(BackboneModule(model), tmp_path, epochs=5, n_train=None)
    assert checkpoint.accuracy is not None
    assert checkpoint.accuracy >= 0.9
    assert checkpoint.accuracy == pytest.approx(accuracy_on_digits(checkpoint.model), abs=1e-6)
    assert checkpoint.epoch == 5
    assert checkpoint.class_names == DIGITS.class_names
    assert checkpoint.split_hash == DIGITS.split_hash


def test_digits_are_learned_through_a_wide_random_layer(tmp_path: Path) -> None:
    """Thousands of neurons of unit size at the default rate: the head's own rate must keep it from diverging."""
    torch.manual_seed(0)
    trunk = ConvNet((1, 8, 8), widths=[8, 16, 32])
    model = Backbone(trunk, 10, DIGITS.normalization, WideFeatureLayer(trunk.out_features, 4096, 1024))
    checkpoint = train(BackboneModule(model), tmp_path, epochs=4, n_train=None)
    assert checkpoint.accuracy is not None
    assert checkpoint.accuracy >= 0.9
    layer = checkpoint.model.feature_layer
    assert layer is not None
    with torch.no_grad():
        directions = layer.directions(checkpoint.model.features(DIGITS.test.pixels()))
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(359))
    assert directions.mean(dim=0).square().sum() < 0.2


def test_what_a_training_step_moves() -> None:
    module = plain(weight_decay=0.1)
    before = {name: value.detach().clone() for name, value in module.model.named_parameters()}
    [optimizer], _ = module.configure_optimizers()
    images, labels = next(iter(DIGITS.train_dataloader()))
    torch.nn.functional.cross_entropy(module(images), labels).backward()
    optimizer.step()
    for name, value in module.model.named_parameters():
        assert torch.equal(value, before[name]) == name.startswith("feature_layer.random"), name


def test_the_rate_falls_to_a_tenth_every_fifty_epochs() -> None:
    module = plain()
    [optimizer], [scheduler] = module.configure_optimizers()
    rates = []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1 * 0.1 ** (epoch // 50) for epoch in range(200)])
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}


def rates_of(model: Backbone) -> dict[str, float]:
    [optimizer], _ = BackboneModule(model, SGDSchedule(lr=0.2)).configure_optimizers()
    names = {id(value): name for name, value in model.named_parameters()}
    return {names[id(value)]: group["lr"] for group in optimizer.param_groups for value in group["params"]}


@pytest.mark.parametrize(("n_neurons", "rate"), [(32, 0.2), (64, 0.2), (128, 0.1), (8192, 0.2 / 128)])
def test_the_rate_of_a_head_behind_a_wide_layer(n_neurons: int, rate: float) -> None:
    trunk = MLP((1, 8, 8), hidden=[6])
    layer = WideFeatureLayer(6, n_neurons, 4)
    rates = rates_of(Backbone(trunk, 10, DIGITS.normalization, layer))
    assert rates.pop("head.weight") == rates.pop("head.bias") == pytest.approx(rate)
    assert set(rates.values()) == {0.2}
    assert "feature_layer.trained.weight" in rates
    assert "feature_layer.random.weight" not in rates


def test_the_rate_of_a_plain_head_is_everybodys() -> None:
    assert set(rates_of(Backbone(MLP((1, 8, 8), hidden=[700]), 10, DIGITS.normalization)).values()) == {0.2}


def test_the_logged_figures_are_exact(tmp_path: Path) -> None:
    module = plain()
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], max_epochs=1)
    [logged] = trainer.test(module, DIGITS, verbose=False)
    images, labels = DIGITS.test.pixels(), DIGITS.test.labels
    with torch.no_grad():
        logits: Tensor = module.eval()(images)
    assert logged["test_accuracy"] == pytest.approx(float((logits.argmax(dim=1) == labels).float().mean()))
    assert logged["test_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)


@pytest.mark.parametrize(
    ("kill", "minutes"),
    [
        (Kill("batch", epoch=1), 60.0),
        (Kill("batch", epoch=2, batch=3), 60.0),
        (Kill("batch", epoch=0, batch=3), 0.0),
        (Kill("batch", epoch=2, batch=6), 0.0),
        (Kill("validation", epoch=1), 60.0),
        (Kill("validation", epoch=1), 0.0),
        (Kill("fit end", epoch=4), 60.0),
    ],
    ids=[
        "epoch start",
        "mid-epoch",
        "batch of the first epoch",
        "last batch",
        "validation",
        "near validation",
        "export",
    ],
)
def test_a_killed_training_ends_as_one_left_alone(kill: Kill, minutes: float, tmp_path: Path) -> None:
    """Bit for bit, over changes of the rate every epoch; `minutes=0` saves after every batch."""
    alone = train(plain(decay_every=1, decay=0.5), tmp_path / "alone", epochs=4)
    with pytest.raises(KilledError):
        train(plain(decay_every=1, decay=0.5), tmp_path / "killed", 4, minutes, kill)
    assert not (tmp_path / "killed" / BACKBONE_FILE).exists()
    steps = StepCounter()
    resumed = train(plain(seed=1, decay_every=1, decay=0.5), tmp_path / "killed", 4, minutes, steps)
    assert steps.n < 4 * 7
    assert_same(alone.model, resumed.model)
    assert (resumed.epoch, resumed.accuracy) == (alone.epoch, alone.accuracy)
    assert read_utility(tmp_path / "killed") == read_utility(tmp_path / "alone")


def test_a_killed_training_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    """As where the data file was replaced."""
    with pytest.raises(KilledError):
        train(plain(), tmp_path, 4, 60.0, Kill("batch", epoch=2))
    with pytest.raises(ConfigError, match=r"on other data .*put the former data back, or delete .*last\.ckpt"):
        train(plain(), tmp_path, 4, source=Digits(seed=1))
    assert not (tmp_path / BACKBONE_FILE).exists()
    assert train(plain(), tmp_path, 4).epoch == 4


def test_a_killed_training_does_not_go_on_in_another_number_of_processes(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(plain(), tmp_path, 2, 60.0, Kill("batch", epoch=1))
    state = torch.load(tmp_path / LAST_CHECKPOINT, weights_only=False)
    state["callbacks"]["LastCheckpoint"]["processes"] += 1
    torch.save(state, tmp_path / LAST_CHECKPOINT)
    with pytest.raises(ConfigError, match=r"training in 2 processes, here in 1.*: start 2, or delete .*last\.ckpt"):
        train(plain(), tmp_path, 2)
    del state["callbacks"]["LastCheckpoint"]["processes"]  # a state of an earlier release
    torch.save(state, tmp_path / LAST_CHECKPOINT)
    assert train(plain(), tmp_path, 2).epoch == 2


class StepCounter(Callback):
    """Counts the steps of a run."""

    n = 0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        self.n += 1


def test_the_state_is_replaced_in_one_step(tmp_path: Path) -> None:
    train(plain(), tmp_path, epochs=2, minutes=0.0)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        BACKBONE_FILE,
        "last.ckpt",
        UTILITY_FILE,
    ]


def test_a_full_disk_keeps_the_last_state_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(plain(), tmp_path, epochs=1)
    state = tmp_path / "checkpoints" / "last.ckpt"
    before = state.read_bytes()
    (tmp_path / BACKBONE_FILE).unlink()

    def full(trainer: Trainer, path: Path, weights_only: bool) -> None:
        path.write_bytes(before[:99])
        raise OSError(28, "No space left on device", "of_lightning")

    monkeypatch.setattr(Trainer, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space") as caught:
        train(plain(), tmp_path, epochs=2)
    assert caught.value.filename == str(state)
    assert state.read_bytes() == before
    assert [path.name for path in state.parent.iterdir()] == ["last.ckpt"]


def test_a_trained_folder_is_left_alone(tmp_path: Path) -> None:
    train(plain(), tmp_path, epochs=1)
    before = (tmp_path / BACKBONE_FILE).read_bytes()
    with pytest.raises(RunExistsError, match="already trained: choose another output folder"):
        train(plain(seed=1), tmp_path, epochs=1)
    assert (tmp_path / BACKBONE_FILE).read_bytes() == before


def test_the_utility_is_that_of_the_last_epoch(tmp_path: Path) -> None:
    losses: list[float] = []

    class Losses(Callback):
        def on_train_batch_end(
            self,
            trainer: Trainer,
            pl_module: LightningModule,
            outputs: dict[str, Tensor],
            batch: object,
            batch_idx: int,
        ) -> None:
            losses.append(float(outputs["loss"]))

    checkpoint = train(plain(), tmp_path, 2, 60.0, Losses(), n_train=384)
    utility = read_utility(tmp_path)
    assert utility["final_train_loss"] == pytest.approx(sum(losses[-6:]) / 6, rel=1e-5)  # six batches of 64
    assert utility["accuracy"] == checkpoint.accuracy
    with torch.no_grad():
        logits: Tensor = checkpoint.model(DIGITS.test.pixels())
    expected = float(torch.nn.functional.cross_entropy(logits, DIGITS.test.labels))
    assert utility["test_loss"] == pytest.approx(expected, rel=1e-5)


class Poison(Callback):
    """Makes a weight infinite before the given step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            assert isinstance(module, TrainingModule)
            module.model.head.weight.data.fill_(torch.inf)


def without_reasons(utility: Metrics) -> Metrics:
    return {name: value for name, value in utility.items() if not name.endswith("_reason")}


@pytest.mark.parametrize(("step", "epochs"), [(0, 1), (9, 2)])
def test_a_training_that_diverges_ends_and_says_so(step: int, epochs: int, tmp_path: Path) -> None:
    """Seven steps an epoch: one diverges at once, one within the second epoch; eight epochs were asked for."""
    steps = StepCounter()
    checkpoint = train(plain(), tmp_path, 8, 60.0, Poison(step), steps)
    assert steps.n <= 7 * epochs
    assert checkpoint.accuracy is None
    utility = read_utility(tmp_path)
    assert without_reasons(utility) == {"final_train_loss": None, "test_loss": None, "accuracy": None}
    assert "diverged: its loss was no longer finite after step" in str(utility["accuracy_reason"])


def test_a_killed_divergence_is_not_trained_on(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(plain(), tmp_path, 8, 60.0, Poison(0), Kill("fit end", epoch=1))
    steps = StepCounter()
    assert train(plain(), tmp_path, 8, 60.0, steps).accuracy is None
    assert steps.n == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_state(share: float, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(plain(), tmp_path, 3, 60.0, Kill("batch", epoch=1))
    last = tmp_path / LAST_CHECKPOINT
    content = last.read_bytes()
    last.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CorruptFileError, match=r"truncated or not a training state \(.*\): delete it"):
        train(plain(), tmp_path, 3)


@pytest.mark.parametrize(("lr", "decay_every", "decay"), [(0.0, 50, 0.1), (0.1, 0, 0.1), (0.1, 50, -0.1)])
def test_rates_must_be_positive(lr: float, decay_every: int, decay: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0 and decay_every at least 1"):
        SGDSchedule(lr=lr, decay_every=decay_every, decay=decay)


@pytest.mark.parametrize("wrong", [{"momentum": -0.5}, {"momentum": 1.0}, {"weight_decay": -1e-4}], ids=str)
def test_momentum_and_weight_decay_have_ranges(wrong: dict[str, float]) -> None:
    SGDSchedule(momentum=0.0, weight_decay=0.0)
    with pytest.raises(ConfigError, match=r"momentum must lie in \[0, 1\) and weight_decay be at least 0; got"):
        SGDSchedule(**wrong)  # type: ignore[arg-type]  # one of the settings is an int


def test_only_a_backbone_module_is_exported(tmp_path: Path) -> None:
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [])
    with pytest.raises(ConfigError, match="got LightningModule"):
        ExportBackbone(tmp_path, [], "").on_fit_end(trainer, LightningModule())


@pytest.mark.processes
def test_two_processes_train_one_backbone(tmp_path: Path) -> None:
    (tmp_path / LAST_CHECKPOINT).parent.mkdir()
    first, second = outputs(ranks(Path(__file__).with_name("backbone_rank.py"), tmp_path))
    checkpoint = load_backbone(tmp_path / BACKBONE_FILE)
    state = b"".join(value.numpy().tobytes() for value in checkpoint.model.state_dict().values())
    assert first == hashlib.sha256(state).hexdigest()
    assert checkpoint.accuracy == pytest.approx(accuracy_on_digits(checkpoint.model), abs=1e-6)
    assert first == second


@pytest.mark.processes
def test_the_number_of_processes_changes_nothing_at_equal_global_batches(tmp_path: Path) -> None:
    """Sixty images a step, by one, two or three processes."""
    states = []
    for size in (1, 2, 3):
        out = tmp_path / str(size)
        (out / LAST_CHECKPOINT).parent.mkdir(parents=True)
        prints = outputs(ranks(Path(__file__).with_name("backbone_rank.py"), out, 60 // size, size=size))
        assert len(set(prints)) == 1
        states.append(load_backbone(out / BACKBONE_FILE).model.state_dict())
    for other in states[1:]:
        for name, value in states[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)
