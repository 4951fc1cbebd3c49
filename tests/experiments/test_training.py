"""Backbones that are trained for attacks under a defense or privately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lit_recon.clients import LocalTraining
from lit_recon.data.sources import Digits
from lit_recon.defenses import GaussianNoise, NetworkDropout
from lit_recon.errors import ConfigError
from lit_recon.experiments.settings import BackboneSettings
from lit_recon.experiments.victim_model import VictimModel, find_target
from lit_recon.models import MLP
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.private import PrivacySettings
from lit_recon.training.module import read_utility
from lit_recon.training.trainer import TrainerSettings

CPU = TrainerSettings(accelerator="cpu")
Find = Callable[..., VictimModel]


@pytest.fixture(scope="module")
def victims() -> VictimDataModule:
    return VictimDataModule(Digits(), n_victims=4)


@pytest.fixture
def find(victims: VictimDataModule, tmp_path: Path) -> Find:
    settings = BackboneSettings(cache=tmp_path, trunk=MLP, epochs=1, n_train=64, padding=1, lr=0.01)

    def find(**changes: object) -> VictimModel:
        return find_target(replace(settings, **changes), victims, 0)  # type: ignore[arg-type]  # of many types

    return find


def test_how_it_was_trained_tells_backbones_apart(find: Find) -> None:
    private = PrivacySettings(max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3)
    ways: list[dict[str, object]] = [
        {},
        {"defense": GaussianNoise(0.1)},
        {"defense": GaussianNoise(0.2)},
        {"local_steps": LocalTraining()},
        {"local_steps": LocalTraining(steps=5)},
        {"dp": private},
        {"dp": replace(private, noise_multiplier=2.0)},
        {"head_bias": False},
        {"trunk": partial(MLP, biases="first")},
        {"until_loss": 0.5},
        {"precision": "bf16-mixed"},
    ]
    paths = [find(**way).path for way in ways]
    assert len(set(paths)) == len(ways)
    assert [find(**way).path for way in ways] == paths


def test_how_often_it_is_validated_tells_backbones_apart_only_if_they_may_end_early(find: Find) -> None:
    assert find(epochs=4, validate_every=2).path == find(epochs=4).path
    assert find(epochs=4, validate_every=2, until_loss=0.5).path != find(epochs=4, until_loss=0.5).path


@pytest.mark.parametrize("every", [0, 3])
def test_the_last_epoch_must_be_validated(every: int) -> None:
    with pytest.raises(ConfigError, match="validate_every must divide epochs=4"):
        BackboneSettings(epochs=4, validate_every=every)


def test_a_private_training_does_not_end_where_its_images_say() -> None:
    private = PrivacySettings(max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3)
    with pytest.raises(ConfigError, match="does not depend on the private images: leave until_loss=0.5 out"):
        BackboneSettings(dp=private, until_loss=0.5)


def test_the_model_under_attack_has_no_trace_of_the_trainings_dropout(find: Find) -> None:
    target = find(defense=NetworkDropout(0.5))
    NetworkDropout(0.5).prepare(target.model)  # refuses a model that has it already
    trained = target.trained(CPU)
    assert trained.accuracy is not None
    assert read_utility(target.path.parent)["accuracy"] == trained.accuracy


def test_a_diverged_backbone_is_not_attacked(find: Find) -> None:
    change = {"defense": GaussianNoise(1e38)}
    with pytest.raises(ConfigError, match="diverged, its weights are not finite"):
        find(**change).trained(CPU)
    with pytest.raises(ConfigError, match="a lower lr or a weaker defense"):
        find(**change)
