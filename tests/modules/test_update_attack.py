"""The Trainer goes over victims: in groups, once each, across interruptions, with the scores of all of them."""

from __future__ import annotations

import csv
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lit_recon._torchvision

import numpy as np
import pytest
import torch

from lit_recon.attacks.base import Attack, SimpleState
from lit_recon.attacks.updates import (
    FeatureMatching,
    GradientMatching,
    KnownLabels,
    MatchingState,
)
from lit_recon.clients import ClientSettings
from lit_recon.data.sources import Npz
from lit_recon.defenses import Defense, GaussianNoise
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.experiments.update_attack.score import run_facts
from lit_recon.metrics import PerceptualDistance, metrics_of
from lit_recon.models import MLP, Backbone, WideFeatureLayer
from lit_recon.modules.attack_state import load_finished
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.loggers import WandbSettings, build_loggers
from lit_recon.modules.update_attack import UpdateAttackModule
from lit_recon.records import Knowledge, Normalization, Observation, Reconstruction
from lit_recon.training.progress import Interrupted
from lit_recon.training.trainer import TrainerSettings, build_trainer
from tests.contracts.test_attacks import PixelDescent
from tests.modules.test_resumable import Grey

STEPS = 6


@pytest.fixture
def victims(tmp_path: Path) -> VictimDataModule:
    """Five clients with two images of two classes each."""
    random = np.random.default_rng(0)
    content = {}
    for part, n in (("train", 40), ("test", 12)):
        content[f"{part}_images"] = random.integers(256, size=(n, 8, 8), dtype=np.uint8)
        content[f"{part}_labels"] = np.arange(n) % 2
    np.savez(tmp_path / "noise.npz", **content)
    return VictimDataModule(Npz(tmp_path / "noise.npz"), n_victims=10, batch_size=2, pool="all")


def module(
    folder: Path,
    clients_per_batch: int | Literal["auto"] = "auto",
    defense: Defense | None = None,
    attack: Attack | None = None,
    **settings: Any,
) -> UpdateAttackModule:
    torch.manual_seed(0)
    model = Backbone(MLP((1, 8, 8), [16], activation="gelu"), 2, Normalization((0.5,), (0.25,)))
    attack = attack or GradientMatching(labels=KnownLabels(), **{"steps": STEPS, "log_every": 2, **settings})
    folder.mkdir(exist_ok=True)
    knowledge, metrics = Knowledge(labels=True), metrics_of(configured=[PerceptualDistance("none")])
    return UpdateAttackModule(attack, model, ClientSettings(), defense, knowledge, folder, metrics, clients_per_batch)


def attacked(running: UpdateAttackModule, victims: VictimDataModule) -> UpdateAttackModule:
    loggers = build_loggers(running.checkpoints / "logs", "run", WandbSettings(mode="disabled"), {})
    build_trainer(TrainerSettings(accelerator="cpu"), loggers).test(running, datamodule=victims, verbose=False)
    return running


def groups(folder: Path) -> list[str]:
    return sorted(path.stem.removeprefix("victims_") for path in folder.glob("*.safetensors"))


def images(running: UpdateAttackModule) -> torch.Tensor:
    return torch.cat([part.finished.reconstruction.images for part in running.scored])


def test_every_client_is_attacked_and_scored_once(victims: VictimDataModule, tmp_path: Path) -> None:
    done = attacked(module(tmp_path / "run", clients_per_batch=2), victims)
    assert groups(tmp_path / "run") == ["0000-0001", "0002-0003", "0004-0004"]
    assert [part.batch.index for part in done.scored] == [0, 1, 2, 3, 4]
    assert [part.batch.ids.tolist() for part in done.scored] == [ids.tolist() for ids in victims.batches]
    errors = torch.cat([part.scores.per_image["rmse"] for part in done.scored])
    assert done.metrics["rmse"] == pytest.approx(float(errors.mean()))
    assert done.metrics["label_accuracy"] == 1
    assert not list((tmp_path / "run").glob("*.pt"))


def test_losses_are_logged_where_the_attack_notes_them_and_means_once(
    victims: VictimDataModule, tmp_path: Path
) -> None:
    done = attacked(module(tmp_path / "run", clients_per_batch=1), victims)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    losses = [(int(row["step"]), float(row["loss"])) for row in rows if row["loss"]]
    assert [step for step, _ in losses] == [victim * STEPS + step for victim in range(5) for step in (1, 3, 5)]
    curves = [part.finished.curves[0] for part in done.scored]
    assert [loss for _, loss in losses] == pytest.approx(
        [curve["loss"][point] for curve in curves for point in (0, 1, 2)]
    )
    means = [row for row in rows if row.get("rmse")]
    assert len(means) == 1
    assert float(means[0]["rmse"]) == pytest.approx(done.metrics["rmse"])


@pytest.mark.parametrize(("fastest", "expected"), [("loop", 5), ("vmap", 1)])
def test_auto_groups_where_that_is_faster(
    fastest: str, expected: int, victims: VictimDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientMatching, "measured_execution", lambda attack, seen: fastest)
    attacked(module(tmp_path / "run"), victims)
    assert len(groups(tmp_path / "run")) == expected
    # a resumed run keeps to the choice, whatever it would measure now
    other = {"loop": "vmap", "vmap": "loop"}[fastest]
    monkeypatch.setattr(GradientMatching, "measured_execution", lambda attack, seen: other)
    again = attacked(module(tmp_path / "run"), victims)
    assert again.execution == fastest
    [note] = again.notes
    how = {"loop": "one by one", "vmap": "in groups of 8"}[fastest]
    assert f"computed {how}, as was measured to be faster" in note


def test_a_real_measurement_decides(victims: VictimDataModule, tmp_path: Path) -> None:
    done = attacked(module(tmp_path / "run"), victims)
    assert len(groups(tmp_path / "run")) == {"loop": 5, "vmap": 1}[str(done.execution)]


def test_together_and_one_by_one_agree(victims: VictimDataModule, tmp_path: Path) -> None:
    one = attacked(module(tmp_path / "one", clients_per_batch=1), victims)
    all_at_once = attacked(module(tmp_path / "all", clients_per_batch=5, execution="vmap"), victims)
    assert torch.allclose(images(one), images(all_at_once), atol=0.05)


def test_finished_victims_are_not_attacked_again(victims: VictimDataModule, tmp_path: Path) -> None:
    first = attacked(module(tmp_path / "run", clients_per_batch=2), victims)
    again = module(tmp_path / "run", clients_per_batch=2)
    again.attack.init = None  # type: ignore[method-assign,assignment]  # any attack would fail
    attacked(again, victims)
    assert torch.equal(images(again), images(first))
    assert again.metrics == first.metrics


@pytest.mark.parametrize("defense", [None, GaussianNoise(0.01)], ids=["plain", "noise"])
@pytest.mark.parametrize("at", [1, STEPS + 2, 4 * STEPS + 5])
def test_an_interrupted_run_ends_with_the_same_bits(
    at: int, defense: Defense | None, victims: VictimDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attacked(module(tmp_path / "whole", clients_per_batch=1, defense=defense), victims)
    step, taken = GradientMatching.step, 0

    def interrupting(attack: GradientMatching, state: MatchingState) -> None:
        nonlocal taken
        step(attack, state)
        taken += 1
        if taken == at:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(GradientMatching, "step", interrupting)
    with pytest.raises(Interrupted):
        attacked(module(tmp_path / "run", clients_per_batch=1, defense=defense), victims)
    assert len(list((tmp_path / "run").glob("*.pt"))) == 1
    resumed = attacked(module(tmp_path / "run", clients_per_batch=1, defense=defense), victims)
    assert taken == 5 * STEPS  # nothing is done twice
    assert torch.equal(images(resumed), images(whole))
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize("together", [1, 2])
def test_an_attack_from_outside_the_package_is_resumed_and_logged(
    together: int, victims: VictimDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attacked(module(tmp_path / "whole", together, attack=PixelDescent(STEPS)), victims)
    step, taken = PixelDescent.step, 0

    def interrupting(attack: PixelDescent, state: SimpleState) -> None:
        nonlocal taken
        step(attack, state)
        taken += 1
        if taken == STEPS + 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(PixelDescent, "step", interrupting)
    with pytest.raises(Interrupted):
        attacked(module(tmp_path / "run", together, attack=PixelDescent(STEPS)), victims)
    resumed = attacked(module(tmp_path / "run", together, attack=PixelDescent(STEPS)), victims)
    n_groups = {1: 5, 2: 3}[together]
    assert taken == n_groups * STEPS  # nothing is done twice
    assert torch.equal(images(resumed), images(whole))
    assert resumed.metrics == whole.metrics
    for part in resumed.scored:
        (curve,) = part.finished.curves
        assert curve["step"] == list(range(STEPS))
        assert curve["loss"][-1] < curve["loss"][0]
    with next((tmp_path / "whole").rglob("metrics.csv")).open() as file:
        logged = [row["loss"] for row in csv.DictReader(file) if row["loss"]]
    assert len(logged) == n_groups * STEPS


def test_an_attack_in_one_piece_takes_one_client_at_a_time(victims: VictimDataModule, tmp_path: Path) -> None:
    done = attacked(module(tmp_path / "run", 5, attack=Grey()), victims)
    assert len(groups(tmp_path / "run")) == len(done.scored) == 5
    assert done.execution is None


def test_recovered_features_are_kept_and_scored(victims: VictimDataModule, tmp_path: Path) -> None:
    running = module(tmp_path / "run", clients_per_batch=1, features=FeatureMatching())
    layer = WideFeatureLayer(16, n_neurons=1024, n_trained=0, activation="gelu")
    running.model = Backbone(running.model.trunk, 2, running.model.normalization, layer)
    done = attacked(running, victims)
    assert done.metrics["feature_error"] == pytest.approx(0, abs=1e-4)
    assert done.metrics["feature_cosine"] == pytest.approx(1, abs=1e-6)
    for part in load_finished(tmp_path / "run").values():
        assert part.reconstruction.features is not None
        assert part.reconstruction.features.shape == (2, 16)
        assert any("certificate" in note for note in part.reconstruction.notes)


def test_only_a_victim_data_module_will_do(tmp_path: Path, victims: VictimDataModule) -> None:
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [])
    with pytest.raises(ConfigError, match="VictimDataModule"):
        trainer.test(module(tmp_path / "run"), dataloaders=victims.test_dataloader(), verbose=False)


class Refusing(Attack):
    """Returns white images, and refuses updates with a first entry above a limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        if any(_first_entry(seen) > self.limit for seen in observations):
            raise UnsupportedModelError("too large")
        return [Reconstruction(torch.ones(2, *seen.image_shape), seen.labels, 0.0) for seen in observations]

    def execution_for(self, n_victims: int) -> Literal["loop"]:
        return "loop"


def _first_entry(seen: Observation) -> float:
    return float(next(iter(seen.update.values())).flatten()[0])


def test_a_guess_stands_in_for_refused_victims(victims: VictimDataModule, tmp_path: Path) -> None:
    sizes: list[float] = []
    spy = Refusing(math.inf)
    spy.check = lambda observations: sizes.extend(map(_first_entry, observations))  # type: ignore[method-assign]
    attacked(module(tmp_path / "all", attack=spy), victims)
    refused = int(np.argmax(sizes))
    picky = Refusing(sorted(sizes)[-2])
    done = attacked(module(tmp_path / "run", clients_per_batch=2, attack=picky), victims)
    assert [bool(part.finished.refused) for part in done.scored] == [index == refused for index in range(5)]
    # the other victim of its group is attacked
    mean = victims.public.pixels(torch.arange(len(victims.public))).mean(0)
    for part in done.scored:
        expected = mean if part.finished.refused else torch.ones_like(mean)
        torch.testing.assert_close(part.finished.reconstruction.images, expected.expand(2, -1, -1, -1))
    facts = run_facts(done.scored, "cpu")
    assert (facts["n_refused"], facts["refused_reason"]) == (2, "too large")
    assert "For 2 of 10 images the mean public image stands in: too large" in facts["notes"]  # type: ignore[operator]
    kept = load_finished(tmp_path / "run")
    assert [index for index, batch in kept.items() if batch.refused == "too large"] == [refused]
    assert "n_refused" not in run_facts([part for part in done.scored if not part.finished.refused], "cpu")


def test_an_attack_that_refuses_all_victims_raises_its_error(victims: VictimDataModule, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="too large"):
        attacked(module(tmp_path / "run", attack=Refusing(-math.inf)), victims)
    assert not groups(tmp_path / "run")
