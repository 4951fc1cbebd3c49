"""What a grid finds out before its first cell runs, where only some of its cells are left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from lit_recon import cli
from lit_recon.attacks.base import Attack
from lit_recon.defenses import OptimalGradientNoise
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.experiments.evaluate.grid import GridCell, build_cells, part_of
from lit_recon.experiments.evaluate.rehearsal import Rehearsal
from lit_recon.experiments.evaluate.results import LeakageMetric
from lit_recon.experiments.evaluate.settings import DefenseFamily, EvaluateSettings, GridAttack
from lit_recon.experiments.settings import AttackSettings
from lit_recon.experiments.update_attack.run import observed, rehearse, victim_data
from lit_recon.experiments.victim_model import find_target
from lit_recon.records import Observation, Reconstruction
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_metrics

COMMON: dict[str, Any] = {
    "data": {"class_path": "Digits"},
    "backbone": {"trunk": {"class_path": "MLP", "init_args": {"hidden": [4]}}, "epochs": 0},
    "client": {},
    "victims": {"n": 1},
    "trainer": {"accelerator": "cpu", "threads": 1},
    "lpips": {"network": "none"},
    "seed": 0,
}
QUIET = ["--wandb.mode", "disabled"]


def family(name: str, *values: float) -> DefenseFamily:
    return DefenseFamily({"defense": {"class_path": name}}, "defense.init_args.std", [*values])


@pytest.fixture
def cells(tmp_path: Path) -> list[GridCell]:
    """An attack on any update, and one that needs a noise of known density, which the first defense does not have."""
    attacks = {}
    matching = {"class_path": "GradientMatching", "init_args": {"steps": 1}}
    for name, attack in (("any", matching), ("dense", {"class_path": f"{__name__}.Needy"})):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"attack": attack}))
        attacks[name] = GridAttack(path)
    defenses = {"optimal": family("OptimalGradientNoise", 0.01, 0.1), "noise": family("GaussianNoise", 0.01, 0.1)}
    return build_cells(EvaluateSettings(attacks=attacks, defenses=defenses, utility=None), COMMON)


def inapplicable(cells: list[GridCell], folder: Path) -> list[tuple[str, float | None, str]]:
    by_folder = {cell.folder: cell for cell in cells}
    found = [by_folder[place] for place in Rehearsal(cells, folder, LeakageMetric()).check()]
    return [(cell.defense, cell.strength, cell.attack) for cell in found]


class Needy(Attack):
    """Needs noise whose density is known, and refuses the updates of these victims, by number."""

    def __init__(self, refused: list[int] | None = None) -> None:
        self.refused, self.seen = refused or [], 0

    def check(self, observations: Sequence[Observation]) -> None:
        super().check(observations)
        if isinstance(observations[0].defense, OptimalGradientNoise):
            raise ThreatModelError("the update has no known density")

    def rehearse(self, observations: Sequence[Observation]) -> None:
        self.check(observations)
        self.seen += 1
        if self.seen - 1 in self.refused:
            raise UnsupportedModelError("nothing is left of the maps")

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        raise AssertionError("a rehearsal attacks nothing")


def test_an_attack_is_checked_behind_every_defense(cells: list[GridCell], tmp_path: Path) -> None:
    """Also where no undefended cell is left: all are done, or others are asked for."""
    expected = [("optimal", 0.01, "dense"), ("optimal", 0.1, "dense")]
    assert inapplicable(cells, tmp_path) == expected
    assert inapplicable(part_of(cells, ["optimal", "noise"]), tmp_path) == expected
    for cell in part_of(cells, ["none"]):
        write_metrics(RunFolder.open(tmp_path / cell.folder, "seed: 0"), {"rmse": 0.1})
    assert inapplicable(cells, tmp_path) == expected


def test_attacks_that_know_the_same_see_one_update(
    cells: list[GridCell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []

    def counting(settings: AttackSettings, *rest: Any) -> Observation:
        computed.append(settings.defense)
        return observed(settings, *rest)

    monkeypatch.setattr("lit_recon.experiments.evaluate.rehearsal.observed", counting)
    inapplicable(cells, tmp_path)
    assert len(computed) == len({(cell.defense, cell.strength) for cell in cells}) == 5


def test_an_attack_that_is_refused_without_a_defense_may_be_applicable_behind_one(
    cells: list[GridCell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: Needy, observations: Sequence[Observation]) -> None:
        if observations[0].defense is None:
            raise UnsupportedModelError("there is no noise to hide the maps")

    monkeypatch.setattr(Needy, "check", check)
    assert inapplicable(cells, tmp_path) == [("none", None, "dense")]


def test_what_an_attack_refuses_of_an_update_is_left_to_the_cells_own_run(
    cells: list[GridCell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(self: Needy, observations: Sequence[Observation]) -> None:
        raise UnsupportedModelError("nothing is left of the maps")

    monkeypatch.setattr(Needy, "rehearse", refusing)
    assert inapplicable(part_of(cells, ["none", "noise"]), tmp_path) == []


@pytest.mark.parametrize(
    ("refused", "untrained", "raises"), [([0], False, False), ([0, 1], False, True), ([0, 1], True, False)]
)
def test_a_run_ends_before_its_training_only_where_all_updates_that_it_attacks_are_refused(
    cells: list[GridCell], tmp_path: Path, refused: list[int], untrained: bool, raises: bool
) -> None:
    settings = AttackSettings(**cells[0].built(tmp_path))
    settings = replace(settings, attack=Needy(refused), victims=replace(settings.victims, n=2))
    settings = replace(settings, backbone=replace(settings.backbone, epochs=int(untrained), cache=tmp_path))
    victims = victim_data(settings)
    target = find_target(settings.backbone, victims, 0)
    with pytest.raises(UnsupportedModelError, match="nothing is left") if raises else nullcontext():
        rehearse(settings, target, victims)


def test_a_part_without_an_applicable_attack_is_refused(cells: list[GridCell], tmp_path: Path) -> None:
    alone = [cell for cell in part_of(cells, ["optimal"]) if cell.attack == "dense"]
    with pytest.raises(ThreatModelError, match=r"optimal 0\.01, dense, batch 1: the update has no known density"):
        Rehearsal(alone, tmp_path, LeakageMetric()).check()


def test_trainings_are_set_up_on_the_data_of_the_grid(tmp_path: Path) -> None:
    """Whatever images the first attack has on a network of its own: there are fewer of these."""
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump({"attack": {"class_path": "GradientMatching", "init_args": {"steps": 1}}}))
    own = {"backbone": {"head_bias": False}, "data": {"class_path": "Photos"}}
    attacks = {"own": GridAttack(path, own), "any": GridAttack(path)}
    utility = {"epochs": 1, "n_train": 1200}
    grid = build_cells(EvaluateSettings(attacks=attacks, defenses={}, utility=utility), COMMON)
    assert Rehearsal(grid, tmp_path, LeakageMetric()).check() == {}


def test_a_grid_of_any_ranking_keeps_the_network_of_lpips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rehearse(cells: list[GridCell], path: Path, metric: LeakageMetric) -> None:
        for cell in cells:
            run = RunFolder.open(path / cell.folder, yaml.safe_dump(cell.settings))
            write_metrics(run, {"rmse": 0.2, "lpips": 0.1})
        raise ConfigError("killed after its first cells")

    monkeypatch.setattr("lit_recon.experiments.evaluate.run.Rehearsal", rehearse)
    (tmp_path / "any.yaml").write_text("attack: {class_path: GradientMatching}")
    settings = {**COMMON, "lpips": {"network": "alex"}, "attacks": {"any": {"config": str(tmp_path / "any.yaml")}}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({**settings, "defenses": {}, "utility": None}))
    command = ["evaluate", "--config", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "grid"), *QUIET]
    for others, words in (
        ([], "killed after its first cells"),
        (["--victims.n", "2"], "killed after its first cells"),  # other cells
        (["--lpips.network", "vgg"], "holds cells with another LPIPS (lpips.network: 'alex' there, 'vgg' now)"),
    ):
        assert cli.attack([*command, *others]) == 2
        assert words in capsys.readouterr().err


def test_a_grid_does_not_go_on_with_other_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def draw(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for place in (tmp_path / "images" / name for name in "ab"):
            place.mkdir(parents=True, exist_ok=True)
            for number in range(3):
                pixels = generator.integers(0, 256, (4, 6), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")

    draw(0)
    (tmp_path / "any.yaml").write_text(
        yaml.safe_dump({"attack": {"class_path": "GradientMatching", "init_args": {"steps": 1}}})
    )
    settings = {
        **COMMON,
        "data": {"class_path": "ImageFolder", "init_args": {"root": str(tmp_path / "images"), "grayscale": True}},
        "backbone": {**COMMON["backbone"], "cache": str(tmp_path / "backbones")},
        "attacks": {"any": {"config": str(tmp_path / "any.yaml")}},
        "defenses": {"noise": {"strength": "defense.init_args.std", "values": [0.1]}},
        "utility": None,
    }
    settings["defenses"]["noise"]["settings"] = {"defense": {"class_path": "GaussianNoise"}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(settings))
    command = ["evaluate", "--config", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "grid"), *QUIET]
    more = [*command, "--defenses.noise.values", "[0.1, 1.0]"]
    assert cli.attack(command) == 0
    draw(1)
    assert cli.attack(more) == 2
    assert "holds cells on other images" in capsys.readouterr().err
    # all cells are done, but a bound for one of them would be on other images, and on a model trained on them
    (folder := RunFolder(tmp_path / "grid")).bounds.unlink()
    assert cli.attack(command) == 2
    assert "holds cells on other images" in capsys.readouterr().err
    assert folder.is_complete
    draw(0)
    assert cli.attack(more) == 0
