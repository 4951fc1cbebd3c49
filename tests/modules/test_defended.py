"""Training under a defense: the very object, plain training's weights where it does nothing, and its price."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lit_recon._torchvision

import pytest
import torch
from pytorch_lightning import Callback
from torch import Tensor

from lit_recon.clients import GradientOperator, LocalTraining
from lit_recon.data.dataset import seeded_generator
from lit_recon.data.sources import Digits
from lit_recon.defenses import (
    DPSGD,
    Batch,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    MixUp,
    NetworkDropout,
    OptimalGradientNoise,
    PerExampleClipping,
    defended_gradient,
)
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import MLP, Backbone, ConvNet, LeNet, WideFeatureLayer, WideResNet, load_backbone
from lit_recon.modules.backbone import BackboneModule, DefendedBackboneModule, train_backbone
from lit_recon.modules.data import BackboneDataModule
from lit_recon.records import Weights
from lit_recon.training.module import (
    LAST_CHECKPOINT,
    Metrics,
    SGDSchedule,
    TrainingModule,
    read_utility,
    training_callbacks,
)
from lit_recon.training.trainer import Precision, TrainerSettings, build_trainer
from tests.modules.killing import Kill, KilledError, assert_same

DIGITS = BackboneDataModule(Digits(), padding=1, flip=False)
SLOW = SGDSchedule(lr=0.05, decay_every=1, decay=0.5)


def convnet(norm: str = "batch", wide: bool = False, seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    trunk = ConvNet((1, 8, 8), widths=[4, 8], norm=norm)  # type: ignore[arg-type]  # a text of the configuration
    layer = WideFeatureLayer(trunk.out_features, 64, 32, "gelu") if wide else None
    return Backbone(trunk, 10, DIGITS.normalization, layer)


def mlp(seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    return Backbone(MLP((1, 8, 8), hidden=[64]), 10, DIGITS.normalization)


def train(
    module: TrainingModule,
    out: Path,
    epochs: int = 2,
    n_train: int = 150,
    batch_size: int = 64,
    minutes: float = 60.0,
    callbacks: tuple[Callback, ...] = (),
    precision: Precision = "32-true",
) -> tuple[Backbone, Metrics]:
    (out / LAST_CHECKPOINT).parent.mkdir(parents=True, exist_ok=True)
    data = BackboneDataModule(Digits(), batch_size, padding=1, flip=False, n_train=n_train)
    every = [*callbacks, *training_callbacks(out, data.class_names, data.split_hash, minutes)]
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], every, max_epochs=epochs, precision=precision)
    return load_backbone(train_backbone(trainer, module, data, out)).model, read_utility(out)


@pytest.mark.parametrize("wide", [False, True], ids=["batch norm", "wide layer"])
@pytest.mark.parametrize(
    "defense",
    [Chain([]), GaussianNoise(0.0), GradientPruning(0.0), Chain([MixUp(0.0), NetworkDropout(0.0)])],
    ids=["empty chain", "no noise", "no pruning", "no mixing"],
)
def test_a_defense_that_does_nothing_trains_the_plain_weights(defense: Defense, wide: bool, tmp_path: Path) -> None:
    """Bit for bit, running statistics and center included."""
    plain, expected = train(BackboneModule(convnet(wide=wide), SLOW), tmp_path / "plain")
    defended, utility = train(DefendedBackboneModule(convnet(wide=wide), defense, SLOW), tmp_path / "defended")
    assert_same(plain, defended)
    assert utility == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("defense", [PerExampleClipping(float("inf")), DPSGD()], ids=repr)
def test_per_example_defenses_without_a_bound_train_nearly_the_plain_weights(defense: Defense, tmp_path: Path) -> None:
    """A mean of gradients is not the gradient of the mean to the last bit of float32."""
    plain, _ = train(BackboneModule(convnet("group"), SLOW), tmp_path / "plain")
    defended, _ = train(DefendedBackboneModule(convnet("group"), defense, SLOW), tmp_path / "defended")
    for (name, left), right in zip(plain.state_dict().items(), defended.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "defense",
    [
        DPSGD(bound=0.5, noise_multiplier=0.1),
        GaussianNoise(0.01),
        GradientDropout(0.5),
        Chain([GradientClipping(0.1), GradientPruning(0.5)]),
    ],
    ids=repr,
)
def test_a_step_goes_along_what_a_client_releases(defense: Defense, tmp_path: Path) -> None:
    """One step of plain SGD moves the weights by the rate times `defended_gradient`."""
    model, rate = mlp(), 0.25
    data = BackboneDataModule(Digits(), 20, padding=1, flip=False, n_train=20)
    [(images, labels)] = data.train_dataloader()
    weights = copy.deepcopy(Weights.of(model))
    gradient = partial(GradientOperator(model, "train"), weights)
    generator = seeded_generator(3, "defense", 0, 0)
    released = defended_gradient(defense, model, gradient, Batch(images, labels), generator)
    schedule = SGDSchedule(lr=rate, momentum=0.0, weight_decay=0.0)
    trained, _ = train(DefendedBackboneModule(model, defense, schedule, seed=3), tmp_path, 1, 20, 20)
    for name, value in trained.named_parameters():
        torch.testing.assert_close(value, weights.parameters[name] - rate * released[name], rtol=1e-6, atol=1e-7)


def test_a_step_takes_one_forward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss that is logged also gives the gradient; the other way to a gradient is closed here."""
    monkeypatch.setattr(GradientOperator, "__call__", None)
    _, utility = train(DefendedBackboneModule(convnet(wide=True), GradientPruning(0.5), SLOW), tmp_path)
    assert isinstance(utility["final_train_loss"], float)


def wide_resnet(dropout: float = 0.5) -> Backbone:
    torch.manual_seed(0)
    return Backbone(WideResNet((1, 8, 8), depth=10, widening=1, dropout=dropout), 10, DIGITS.normalization)


@pytest.mark.parametrize(
    ("defense", "local"),
    [
        (GaussianNoise(0.01), None),
        (GaussianNoise(0.01), LocalTraining(steps=2, lr=0.05)),
        (Chain([MixUp(1.0), NetworkDropout(0.5)]), None),
    ],
    ids=["noise", "local steps", "mixtures and dropout"],
)
def test_layers_of_dropout_are_off(defense: Defense, local: LocalTraining | None, tmp_path: Path) -> None:
    """Bit for bit, also in running statistics and in the loss, and after a validation."""
    whole, dropping = (DefendedBackboneModule(wide_resnet(rate), defense, SLOW, local) for rate in (0.0, 0.5))
    expected, utility = train(whole, tmp_path / "whole", n_train=40, batch_size=20)
    trained, same = train(dropping, tmp_path / "dropping", n_train=40, batch_size=20)
    assert_same(expected, trained)
    assert same == utility


def test_dropout_of_the_network_is_off_in_what_a_client_releases(tmp_path: Path) -> None:
    model = wide_resnet()
    data = BackboneDataModule(Digits(), 20, padding=1, flip=False, n_train=20)
    [(images, labels)] = data.train_dataloader()
    weights = copy.deepcopy(Weights.of(model))
    expected = GradientOperator(model, "train")(weights, Batch(images, labels))
    schedule = SGDSchedule(lr=0.1, momentum=0.0, weight_decay=0.0)
    trained, _ = train(DefendedBackboneModule(model, GaussianNoise(0.0), schedule), tmp_path, 1, 20, 20)
    for name, value in trained.named_parameters():
        torch.testing.assert_close(value, weights.parameters[name] - 0.1 * expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        lambda: BackboneModule(convnet("group"), SLOW),
        lambda: DefendedBackboneModule(convnet("group"), GaussianNoise(1e-3), SLOW),
        lambda: DefendedBackboneModule(convnet("group"), DPSGD(1.0, 1e-3), SLOW),
        lambda: DefendedBackboneModule(convnet("group"), OptimalGradientNoise(1e-3), SLOW),
        lambda: DefendedBackboneModule(convnet("group"), Defense(), SLOW, LocalTraining(steps=2, lr=0.05)),
    ],
    ids=["plain", "one pass", "per example", "scores", "local steps"],
)
def test_mixed_precision_computes_every_layer_in_16_bits(
    module: Callable[[], TrainingModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the gradient too, whose forward pass is not always that of the loss; weights stay in 32 bits."""
    seen: dict[str, set[torch.dtype]] = {"32-true": set(), "bf16-mixed": set()}
    found = {}
    convolution = torch.nn.functional.conv2d
    for precision, dtypes in seen.items():

        def watched(*given: Any, dtypes: set[torch.dtype] = dtypes, **named: Any) -> Tensor:
            result = convolution(*given, **named)
            dtypes.add(result.dtype)
            return result

        monkeypatch.setattr(torch.nn.functional, "conv2d", watched)
        out = tmp_path / precision
        trained, utility = train(module(), out, 3, 300, precision=precision)  # type: ignore[arg-type]  # a key
        assert all(value.dtype == torch.float32 for value in trained.parameters())
        found[precision] = utility["final_train_loss"]
    assert seen == {"32-true": {torch.float32}, "bf16-mixed": {torch.bfloat16}}
    # they differed by at most 1.4 % in other trainings
    assert found["bf16-mixed"] == pytest.approx(found["32-true"], rel=0.05)


def mixed_statistics(images: Tensor, model: Backbone, defense: Defense) -> Tensor:
    batch = defense.transform_batch(Batch(images, torch.zeros(len(images), dtype=torch.int64)), model, generator(0))
    copied = convnet()
    copied.load_state_dict(model.state_dict())
    copied.train()(batch.images)
    return first_variance(copied)


def first_variance(model: Backbone) -> Tensor:
    return next(value for name, value in model.state_dict().items() if name.endswith("running_var"))


def generator(step: int) -> torch.Generator:
    return seeded_generator(0, "defense", step, 0)


def test_running_statistics_follow_the_mixtures_that_are_trained_on(tmp_path: Path) -> None:
    defense = MixUp(1.0)
    data = BackboneDataModule(Digits(), 20, padding=1, flip=False, n_train=20)
    [(images, _)] = data.train_dataloader()
    expected = mixed_statistics(images, convnet(), defense)
    clean = mixed_statistics(images, convnet(), Defense())
    trained, _ = train(DefendedBackboneModule(convnet(), defense), tmp_path, 1, 20, 20)
    torch.testing.assert_close(first_variance(trained), expected, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(clean, expected, rtol=1e-3)


def test_the_loss_is_that_of_the_images_as_they_came(tmp_path: Path) -> None:
    """Mixtures and dropout have a loss of their own, which would not compare."""
    data = BackboneDataModule(Digits(), 20, padding=1, flip=False, n_train=20)
    [(images, labels)] = data.train_dataloader()
    with torch.no_grad():
        expected = float(torch.nn.functional.cross_entropy(mlp()(images), labels))
    for defense in (GaussianNoise(1.0), MixUp(1.0), NetworkDropout(0.9), Chain([MixUp(1.0), NetworkDropout(0.5)])):
        _, utility = train(DefendedBackboneModule(mlp(), defense), tmp_path / type(defense).__name__, 1, 20, 20)
        assert utility["final_train_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "strengths"),
    [
        (lambda strength: Chain([GradientClipping(1.0), GaussianNoise(strength)]), [0.0, 0.3, 30.0]),
        (lambda strength: GradientPruning(strength), [0.0, 0.999, 1.0]),
    ],
    ids=["noise", "pruning"],
)
def test_stronger_defenses_cost_accuracy(
    family: Callable[[float], Defense], strengths: list[float], tmp_path: Path
) -> None:
    schedule = SGDSchedule(lr=0.05)
    figures = [
        train(DefendedBackboneModule(mlp(), family(s), schedule), tmp_path / str(s), 3, 1400)[1] for s in strengths
    ]
    accuracies = [float(figure["accuracy"] or 0.0) for figure in figures]
    assert accuracies[0] > 0.5
    assert accuracies[-1] < 0.3
    assert all(weak >= strong - 0.05 for weak, strong in pairwise(accuracies))


def test_a_bound_of_zero_freezes_the_weights(tmp_path: Path) -> None:
    schedule = SGDSchedule(lr=1.0, weight_decay=0.0)
    trained, _ = train(DefendedBackboneModule(mlp(), DPSGD(bound=0.0, noise_multiplier=5.0), schedule), tmp_path)
    assert_same(trained, mlp())


@pytest.mark.parametrize("others", [[], [GaussianNoise(0.1)]], ids=["alone", "before noise"])
@pytest.mark.parametrize("local", [None, LocalTraining(steps=2, lr=0.05)], ids=["a gradient", "local steps"])
def test_excluded_variables_stay_as_they_were(
    others: list[Defense], local: LocalTraining | None, tmp_path: Path
) -> None:
    """Weight decay and momentum do not move them."""
    defense = Chain([ExcludedVariables("^head"), *others])
    trained, _ = train(DefendedBackboneModule(mlp(), defense, SGDSchedule(), local), tmp_path, 1)
    start = dict(mlp().named_parameters())
    stayed = {name for name, value in trained.named_parameters() if torch.equal(value, start[name])}
    assert stayed == {"head.weight", "head.bias"}


def test_local_steps_of_one_step_are_the_gradient(tmp_path: Path) -> None:
    plain, _ = train(BackboneModule(convnet(), SLOW), tmp_path / "plain")
    module = DefendedBackboneModule(convnet(), Defense(), SLOW, LocalTraining(steps=1, lr=0.5))
    federated, _ = train(module, tmp_path / "federated")
    for left, right in zip(plain.state_dict().values(), federated.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_local_steps_are_an_ordinary_training(tmp_path: Path) -> None:
    """One client that returns its weights to a server with rate 1: its own SGD, step by step."""
    data = BackboneDataModule(Digits(), 40, padding=1, flip=False, n_train=40)
    [(images, labels)] = data.train_dataloader()
    expected = mlp()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.5)
    for step in range(4):
        half = slice(0, 20) if step % 2 == 0 else slice(20, 40)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(expected(images[half]), labels[half]).backward()
        optimizer.step()
    local = LocalTraining(steps=4, lr=0.1, momentum=0.5, batches=2, release="difference")
    server = SGDSchedule(lr=1.0, momentum=0.0, weight_decay=0.0)
    trained, _ = train(DefendedBackboneModule(mlp(), Defense(), server, local), tmp_path, 1, 40, 40)
    for left, right in zip(expected.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [3, 5], ids=["epoch start", "mid-epoch"])
@pytest.mark.parametrize(
    "defense",
    [Chain([MixUp(1.0), NetworkDropout(0.3), GradientDropout(0.2), GaussianNoise(0.1)]), DPSGD(1.0, 0.5)],
    ids=["chain", "DP-SGD"],
)
def test_a_killed_training_ends_as_one_left_alone(defense: Defense, step: int, tmp_path: Path) -> None:
    """Bit for bit: its random numbers are functions of seed and step."""
    alone, expected = train(DefendedBackboneModule(mlp(), defense, SLOW), tmp_path / "alone", 3)
    module = DefendedBackboneModule(mlp(), defense, SLOW)
    with pytest.raises(KilledError):
        train(module, tmp_path / "killed", 3, minutes=0.0, callbacks=(Kill(step),))
    resumed, utility = train(DefendedBackboneModule(mlp(1), defense, SLOW), tmp_path / "killed", 3, minutes=0.0)
    assert_same(alone, resumed)
    assert utility == expected


def test_layers_of_dropout_follow_seed_and_step(tmp_path: Path) -> None:
    """Bit for bit in plain trainings, after a kill and whatever PyTorch's generator has drawn before."""
    alone, _ = train(BackboneModule(wide_resnet(), SLOW), tmp_path / "alone")
    other, _ = train(BackboneModule(wide_resnet(), SLOW, seed=1), tmp_path / "other")
    assert not torch.equal(alone.head.weight, other.head.weight)
    with pytest.raises(KilledError):
        train(BackboneModule(wide_resnet(), SLOW), tmp_path / "killed", minutes=0.0, callbacks=(Kill(4),))
    resumed, _ = train(BackboneModule(wide_resnet(), SLOW), tmp_path / "killed", minutes=0.0)
    assert_same(alone, resumed)


def test_the_seed_decides_the_noise(tmp_path: Path) -> None:
    noisy = [DefendedBackboneModule(mlp(), GaussianNoise(0.1), SLOW, seed=seed) for seed in (0, 0, 1)]
    first, same, other = (train(module, tmp_path / str(i), 1)[0] for i, module in enumerate(noisy))
    assert_same(first, same)
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("defense", [DPSGD(1.0), PerExampleClipping(1.0)], ids=repr)
def test_per_example_gradients_need_another_norm(defense: Defense) -> None:
    with pytest.raises(UnsupportedModelError, match="norm: group"):
        DefendedBackboneModule(convnet("batch"), defense)


def test_per_example_defenses_know_no_local_steps() -> None:
    with pytest.raises(ConfigError, match="leave local_steps out"):
        DefendedBackboneModule(mlp(), DPSGD(1.0), local_steps=LocalTraining())


def test_a_network_with_dropout_is_exported_without_its_masks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = DefendedBackboneModule(Backbone(LeNet((1, 8, 8)), 10, DIGITS.normalization), NetworkDropout(0.5))
    model, _ = train(module, tmp_path, 1)
    assert not [name for name, _ in model.named_buffers() if "dropout" in name]
    images = DIGITS.test.pixels()[:5]
    torch.testing.assert_close(model(images), module.model.eval()(images))
