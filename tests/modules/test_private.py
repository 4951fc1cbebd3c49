"""Private training: Opacus' mechanism where it can be checked by hand, its extremes, and the account of its privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import lit_recon._torchvision

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from lit_recon.clients import GradientOperator
from lit_recon.data.sources import Digits
from lit_recon.defenses import DPSGD, Batch, defended_gradient
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import MLP, Backbone, ConvNet, LeNet, ResNet18, Trunk, WideFeatureLayer, load_backbone
from lit_recon.modules.backbone import train_backbone
from lit_recon.modules.data import BackboneDataModule, PoissonBatches
from lit_recon.modules.private import PrivacyPlan, PrivacySettings, PrivateBackboneModule, private_model
from lit_recon.privacy import FullBatchSGD, PoissonSGD, PrivateDescent
from lit_recon.records import Weights
from lit_recon.training.module import LAST_CHECKPOINT, Metrics, SGDSchedule, read_utility, training_callbacks
from lit_recon.training.trainer import TrainerSettings, build_trainer
from tests.modules.killing import Kill, KilledError, assert_same

DIGITS = BackboneDataModule(Digits(), padding=1, flip=False)
PLAIN = SGDSchedule(lr=0.5, momentum=0.0, weight_decay=0.0)


def mlp(seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    return Backbone(MLP((1, 8, 8), hidden=[32]), 10, DIGITS.normalization)


def convnet(norm: str = "group", seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    trunk = ConvNet((1, 8, 8), widths=[4, 8], norm=norm)  # type: ignore[arg-type]  # a text of the configuration
    return Backbone(trunk, 10, DIGITS.normalization)


def plan(
    noise: float, bound: float, rate: float = 0.25, batch_size: int = 50, steps: int = 4, delta: float = 1e-3
) -> PrivacyPlan:
    return PrivacyPlan(PrivateDescent(bound, noise, delta=delta), rate, batch_size, steps)


def train(
    module: PrivateBackboneModule,
    out: Path,
    epochs: int = 1,
    n_train: int = 200,
    minutes: float = 60.0,
    callbacks: tuple[Callback, ...] = (),
) -> tuple[Backbone, Metrics]:
    (out / LAST_CHECKPOINT).parent.mkdir(parents=True, exist_ok=True)
    data = BackboneDataModule(Digits(), 50, padding=1, flip=False, n_train=n_train)
    data.poisson = module.plan.sampling_rate, module.plan.steps_per_epoch
    every = [*callbacks, *training_callbacks(out, data.class_names, data.split_hash, minutes)]
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], every, max_epochs=epochs)
    return load_backbone(train_backbone(trainer, module, data, out)).model, read_utility(out)


def batches_of(module: PrivateBackboneModule, n_train: int = 200) -> PoissonBatches:
    data = BackboneDataModule(Digits(), 50, padding=1, flip=False, n_train=n_train)
    data.poisson = module.plan.sampling_rate, module.plan.steps_per_epoch
    batches = data.train_dataloader()
    assert isinstance(batches, PoissonBatches)
    return batches


def assert_close(one: nn.Module, two: nn.Module, tolerance: float) -> None:
    for left, right in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_without_noise_and_bound_it_is_plain_sgd(tmp_path: Path) -> None:
    """On the same batches, divided by the expected size; momentum, weight decay and a normalizing network included."""
    schedule = SGDSchedule(lr=0.2, momentum=0.9, weight_decay=0.01)
    module = PrivateBackboneModule(convnet(), plan(0.0, math.inf), schedule)
    expected = convnet().train()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    for images, labels in batches_of(module):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(expected(images), labels, reduction="sum") / 50).backward()
        optimizer.step()
    trained, utility = train(module, tmp_path)
    assert_close(trained, expected, 1e-5)
    assert utility["epsilon"] is None
    assert utility["epsilon_reason"] == "without noise no epsilon is guaranteed"


def one_step(module: PrivateBackboneModule, before: Backbone, out: Path) -> dict[str, torch.Tensor]:
    """What a step of plain SGD went along."""
    old = {name: value.detach().clone() for name, value in before.named_parameters()}
    trained, _ = train(module, out)
    return {name: (old[name] - value.detach()) / PLAIN.lr for name, value in trained.named_parameters()}


@pytest.mark.parametrize("bound", [0.3, 2.0, math.inf])
def test_a_step_without_noise_is_that_of_the_defense(bound: float, tmp_path: Path) -> None:
    """All images are drawn, so that expected and actual size agree; Opacus adds 1e-6 to the norm."""
    module = PrivateBackboneModule(convnet(), plan(0.0, bound, 1.0, 200, 1), PLAIN)
    [(images, labels)] = batches_of(module)
    model = convnet()
    gradient = partial(GradientOperator(model, "train"), Weights.of(model))
    expected = defended_gradient(DPSGD(bound), model, gradient, Batch(images, labels), torch.Generator())
    stepped = one_step(module, model, tmp_path)
    for name, value in expected.items():
        torch.testing.assert_close(stepped[name], value, rtol=1e-3, atol=2e-6)


def test_its_noise_has_the_deviation_of_the_defense(tmp_path: Path) -> None:
    """On an image-free batch the step is the noise alone."""
    noise, bound = 3.0, 0.7
    module = PrivateBackboneModule(mlp(), plan(noise, bound, 1e-12, 50, 1), PLAIN)
    assert [len(labels) for _, labels in batches_of(module)] == [0]
    stepped = one_step(module, mlp(), tmp_path)
    drawn = torch.cat([value.flatten() for value in stepped.values()])
    std = DPSGD(bound, noise).released_std(50)
    assert std == pytest.approx(noise * bound / 50)
    deviation = std / math.sqrt(2 * len(drawn))
    assert abs(float(drawn.std()) - std) < 4 * deviation
    assert abs(float(drawn.mean())) < 4 * std / math.sqrt(len(drawn))


def test_empty_batches_count(tmp_path: Path) -> None:
    """They release noise: weights move, privacy is spent, and the loss of an epoch without images is no number."""
    module = PrivateBackboneModule(mlp(), plan(1.0, 1.0, 1e-12), PLAIN)
    trained, utility = train(module, tmp_path)
    assert module.releases == 4
    assert not torch.equal(trained.head.weight, mlp().head.weight)
    assert utility["final_train_loss"] is None
    assert utility["final_train_loss_reason"] == "no example was drawn in the last epoch"
    assert isinstance(utility["accuracy"], float)


def test_a_bound_of_zero_freezes_the_weights(tmp_path: Path) -> None:
    trained, _ = train(PrivateBackboneModule(mlp(), plan(10.0, 0.0), PLAIN), tmp_path, epochs=2)
    assert_same(trained, mlp())


@pytest.mark.parametrize(("noise", "low", "high"), [(0.5, 0.7, 1.0), (1000.0, 0.0, 0.3)])
def test_noise_of_a_thousand_ruins_the_accuracy(noise: float, low: float, high: float, tmp_path: Path) -> None:
    module = PrivateBackboneModule(mlp(), plan(noise, 1.0, 100 / 1400, 100, 14), SGDSchedule(lr=0.5, momentum=0.5))
    _, utility = train(module, tmp_path, epochs=3, n_train=1400)
    assert low <= float(utility["accuracy"] or 0.0) <= high


class EpsilonLog(Callback):
    """What is logged as epsilon after every epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "epsilon" in trainer.callback_metrics:
            self.values.append(float(trainer.callback_metrics["epsilon"]))


def test_epsilon_is_logged_after_every_epoch(tmp_path: Path) -> None:
    log = EpsilonLog()
    module = PrivateBackboneModule(mlp(), plan(2.0, 1.0), PLAIN)
    _, utility = train(module, tmp_path, epochs=3, callbacks=(log,))
    expected = [PoissonSGD(2.0, steps, sampling_rate=0.25).epsilon(1e-3) for steps in (4, 8, 12)]
    assert [*log.values, utility["epsilon"]] == pytest.approx(expected, rel=1e-6)
    assert utility["delta"] == 1e-3
    assert utility["neighbors"] == "add_or_remove_one"
    assert utility["accountant"] == "privacy loss distribution (dp-accounting)"


def test_full_batches_are_accounted_exactly_at_a_large_epsilon(tmp_path: Path) -> None:
    module = PrivateBackboneModule(mlp(), plan(0.05, 1.0, 1.0, 200, 2), PLAIN)
    _, utility = train(module, tmp_path)
    assert utility["epsilon"] == pytest.approx(FullBatchSGD(0.05, 2).epsilon(1e-3))
    assert float(utility["epsilon"] or 0.0) > 400
    assert utility["accountant"] == "closed form (Gaussian)"


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6], ids=["epoch start", "mid-epoch"])
def test_a_killed_training_ends_as_one_left_alone(step: int, tmp_path: Path) -> None:
    """Same weights bit for bit, same epsilon: the accountant's state is in the checkpoint."""
    alone, expected = train(PrivateBackboneModule(convnet(), plan(1.0, 1.0), PLAIN), tmp_path / "alone", 3)
    module = PrivateBackboneModule(convnet(), plan(1.0, 1.0), PLAIN)
    with pytest.raises(KilledError):
        train(module, tmp_path / "killed", 3, minutes=0.0, callbacks=(Kill(step),))
    again = PrivateBackboneModule(convnet(seed=1), plan(1.0, 1.0), PLAIN)
    resumed, utility = train(again, tmp_path / "killed", 3, minutes=0.0)
    assert_same(alone, resumed)
    assert utility == expected
    assert again.releases == 12


def test_a_training_resumes_with_its_own_mechanism_only(tmp_path: Path) -> None:
    module = PrivateBackboneModule(mlp(), plan(1.0, 1.0), PLAIN)
    with pytest.raises(KilledError):
        train(module, tmp_path, 3, callbacks=(Kill(4),))
    with pytest.raises(ConfigError, match="resume it with its own settings"):
        train(PrivateBackboneModule(mlp(), plan(0.5, 1.0), PLAIN), tmp_path, 3)


@pytest.mark.parametrize("trunk", [ConvNet, ResNet18], ids=["ConvNet", "ResNet18"])
def test_batch_norm_is_replaced_by_group_norm(trunk: type[Trunk]) -> None:
    torch.manual_seed(0)
    widths: Mapping[str, object] = {"widths": [8, 16]} if trunk is ConvNet else {"width": 8}
    model = Backbone(trunk((1, 8, 8), **widths), 10, DIGITS.normalization)
    state = torch.random.get_rng_state()
    fixed, replaced = private_model(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(replaced) == len([m for m in fixed.modules() if isinstance(m, nn.GroupNorm)]) > 0
    assert not [m for m in fixed.modules() if isinstance(m, nn.BatchNorm2d)]
    old = model.state_dict()
    for name, value in fixed.state_dict().items():
        assert torch.equal(value, old[name]), name
    assert private_model(fixed) == (fixed, [])


@pytest.mark.parametrize("head_bias", [False, True])
def test_the_head_stays_as_it_is(head_bias: bool) -> None:
    model = Backbone(ConvNet((1, 8, 8), widths=[4], norm="batch"), 10, DIGITS.normalization, head_bias=head_bias)
    fixed, _ = private_model(model)
    assert (fixed.head.bias is not None) == head_bias


class _Unlike(ConvNet):
    """Another network with GroupNorm than with BatchNorm."""

    def __init__(self, image_shape: tuple[int, int, int], *, extra: str, norm: Literal["batch", "group"]) -> None:
        super().__init__(image_shape, widths=[4], norm=norm)
        self.arguments = {"image_shape": list(image_shape), "extra": extra, "norm": norm}
        if norm == extra:
            self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("extra", "message"), [("group", r"new are \['trunk.scale'\]"), ("batch", r"gone \['trunk.scale'\]")]
)
def test_a_trunk_with_other_weights_behind_group_norm_is_refused(extra: str, message: str) -> None:
    model = Backbone(_Unlike((1, 8, 8), extra=extra, norm="batch"), 10, DIGITS.normalization)
    with pytest.raises(UnsupportedModelError, match=message):
        private_model(model)


def test_batch_norm_without_the_fix_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"trunk\S*'.* mix the examples of a batch"):
        PrivateBackboneModule(convnet("batch"), plan(1.0, 1.0))


def test_a_running_center_is_refused() -> None:
    trunk = LeNet((1, 8, 8))
    model = Backbone(trunk, 10, DIGITS.normalization, WideFeatureLayer(trunk.out_features, 16, 8))
    with pytest.raises(UnsupportedModelError, match="without noise: train without dp"):
        private_model(model)


def test_a_norm_that_cannot_be_replaced_is_refused() -> None:
    model = mlp()
    model.trunk.add_module("norm", nn.BatchNorm1d(32))
    with pytest.raises(UnsupportedModelError, match="MLP has .* no setting norm: group"):
        private_model(model)


def test_what_opacus_refuses_is_refused() -> None:
    model = mlp()
    model.trunk.add_module("norm", nn.InstanceNorm1d(32, affine=True, track_running_stats=True))
    with pytest.raises(UnsupportedModelError, match="Opacus cannot train this model privately"):
        private_model(model)


def test_a_trainer_is_needed() -> None:
    with pytest.raises(ConfigError, match="trained by a Trainer"):
        PrivateBackboneModule(mlp(), plan(1.0, 1.0)).backward(torch.zeros(()))


def test_the_plan_is_that_of_the_settings() -> None:
    module = PrivateBackboneModule(mlp(), PrivacySettings(1.0, 1.0, delta=1e-4).plan(200, 50, 2))
    assert module.plan == plan(1.0, 1.0, delta=1e-4)
