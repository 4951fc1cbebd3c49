"""Trained reconstructors go on after a kill, and a modern perceptron learns as the paper's does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background, Reconstructor
from lit_recon.attacks.released.networks.perceptrons import (
    ComponentsModule,
    ComponentsReconstructor,
    NeuralReconstructor,
    ReconstructorModule,
)
from lit_recon.errors import ConfigError, CorruptFileError

SMALL = NeuralReconstructor(hidden=[8], epochs=3, batch_size=16, accelerator="cpu")


def shadows(s: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(s, 1, 3, 3, generator=generator)
    differences = 1e-3 * images.flatten(1) @ torch.randn(9, 12, generator=generator)
    return differences, images, torch.arange(s) % 3


def fitted(state: Path | None, attack: NeuralReconstructor | ComponentsReconstructor = SMALL) -> Reconstructor:
    return attack.bind(Background(state=state)).fitted(*shadows(), 3)


def kill_in_second_epoch(monkeypatch: pytest.MonkeyPatch, module: type[Any]) -> None:
    step, steps = module.training_step, []

    def stop(self: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        steps.append(batch_idx)
        if len(steps) == 5:  # three batches per epoch
            raise RuntimeError("killed")
        loss: Tensor = step(self, batch, batch_idx)
        return loss

    monkeypatch.setattr(module, "training_step", stop)


@pytest.mark.parametrize(
    ("attack", "module"),
    [
        (SMALL, ReconstructorModule),
        (ComponentsReconstructor(6, [8], epochs=3, batch_size=16, accelerator="cpu"), ComponentsModule),
    ],
)
def test_a_killed_training_ends_as_a_whole_one(
    attack: NeuralReconstructor | ComponentsReconstructor,
    module: type[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = fitted(None, attack)
    kill_in_second_epoch(monkeypatch, module)
    with pytest.raises(RuntimeError, match="killed"):
        fitted(tmp_path, attack)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    resumed = fitted(tmp_path, attack)
    assert resumed.facts == whole.facts
    differences = shadows()[0]
    assert torch.equal(resumed.reconstruct(differences).images, whole.reconstruct(differences).images)
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


def test_a_finished_training_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fitted(tmp_path)

    def never(self: ReconstructorModule, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        raise AssertionError("trained again")

    monkeypatch.setattr(ReconstructorModule, "training_step", never)
    again = fitted(tmp_path)
    assert again.facts == first.facts
    differences = shadows()[0]
    assert torch.equal(again.reconstruct(differences).images, first.reconstruct(differences).images)


def test_other_pairs_or_settings_have_a_state_of_their_own(tmp_path: Path) -> None:
    fitted(tmp_path)
    fitted(tmp_path, NeuralReconstructor(hidden=[8], epochs=1, batch_size=16, accelerator="cpu"))
    differences, images, labels = shadows(20)
    SMALL.bind(Background(state=tmp_path)).fitted(differences, images, labels, 3)
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    assert SMALL.bind(Background()) == SMALL
    assert SMALL.background is None


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    fitted(tmp_path)
    (state,) = tmp_path.glob("*.ckpt")
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CorruptFileError, match="delete it to start over"):
        fitted(tmp_path)


def test_a_perceptron_on_components_learns() -> None:
    differences, images, labels = shadows(60)
    attack = ComponentsReconstructor(9, [60], lr=1e-2, epochs=60, batch_size=20, accelerator="cpu")
    before = torch.get_rng_state()
    found = attack.fitted(differences, images, labels, 3)
    assert torch.equal(torch.get_rng_state(), before)
    error = (found.reconstruct(differences).images - images).square().mean()
    assert error < 0.3 * (images.mean(dim=0) - images).square().mean()
    assert found.facts["components"] == 9
    assert found.facts["training_loss"] < 0.03
    assert found.notes == ()
    assert torch.equal(found.reconstruct(differences).labels, labels)


def test_its_rate_ends_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    step = ComponentsModule.training_step

    def watch(self: ComponentsModule, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ComponentsModule, "training_step", watch)
    fitted(None, ComponentsReconstructor(4, [8], lr=0.1, epochs=2, batch_size=10, accelerator="cpu"))
    expected = [0.05 * (1 + float(torch.cos(torch.tensor(torch.pi * i / 8)))) for i in range(8)]
    assert rates == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has the accelerator")
def test_a_missing_accelerator_is_refused_where_the_network_is_to_be_trained(tmp_path: Path) -> None:
    """A process that only plans may lack it."""
    attack = NeuralReconstructor(hidden=[8], accelerator="mps")
    with pytest.raises(ConfigError, match=r"reconstructor.accelerator: .*MPS"):
        attack.bind(Background(state=tmp_path))
    with pytest.raises(ConfigError, match=r"reconstructor.accelerator: .*MPS"):
        attack.bind(Background()).fitted(*shadows(), 3)


@pytest.mark.parametrize(
    "arguments", [{"components": 0}, {"hidden": []}, {"epochs": 0}, {"lr": 0.0}, {"weight_decay": -1.0}]
)
def test_impossible_settings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        ComponentsReconstructor(**arguments)
