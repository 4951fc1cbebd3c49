"""What a grid finds out before its first cell runs, where only some of its cells are left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_recon.errors import ThreatModelError
from lit_recon.experiments.evaluate.grid import GridCell, build_cells, part_of
from lit_recon.experiments.evaluate.rehearsal import Rehearsal
from lit_recon.experiments.evaluate.results import LeakageMetric
from lit_recon.experiments.evaluate.settings import DefenseFamily, EvaluateSettings, GridAttack
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


def family(name: str, *values: float) -> DefenseFamily:
    return DefenseFamily({"defense": {"class_path": name}}, "defense.init_args.std", [*values])


@pytest.fixture
def cells(tmp_path: Path) -> list[GridCell]:
    """An attack on any update, and one that needs a noise of known density, which the first defense does not have."""
    attacks = {}
    for name, objective in (("any", "GlobalCosine"), ("dense", "Likelihood")):
        own = {"objective": {"class_path": f"lit_recon.attacks.updates.{objective}"}, "steps": 1}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"attack": {"class_path": "GradientMatching", "init_args": own}}))
        attacks[name] = GridAttack(path)
    defenses = {"optimal": family("OptimalGradientNoise", 0.01, 0.1), "noise": family("GaussianNoise", 0.01, 0.1)}
    return build_cells(EvaluateSettings(attacks=attacks, defenses=defenses, utility=None), COMMON)


def inapplicable(cells: list[GridCell], folder: Path) -> list[tuple[str, float | None, str]]:
    by_folder = {cell.folder: cell for cell in cells}
    found = [by_folder[place] for place in Rehearsal(cells, folder, LeakageMetric()).check()]
    return [(cell.defense, cell.strength, cell.attack) for cell in found]


def test_an_attack_that_one_defense_rules_out_is_tried_behind_the_others(cells: list[GridCell], tmp_path: Path) -> None:
    """No undefended cell is left to try it on: all are done, or others are asked for."""
    expected = [("optimal", 0.01, "dense"), ("optimal", 0.1, "dense")]
    assert inapplicable(part_of(cells, ["optimal", "noise"]), tmp_path) == expected
    for cell in part_of(cells, ["none"]):
        write_metrics(RunFolder.open(tmp_path / cell.folder, "seed: 0"), {"rmse": 0.1})
    assert inapplicable(cells, tmp_path) == expected


def test_an_attack_that_is_not_applicable_without_a_defense_is_applicable_nowhere(
    cells: list[GridCell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refusing(settings: Any, *_: Any) -> None:
        tried.append(repr(settings.attack.objective))
        if "Likelihood" in tried[-1]:
            raise ThreatModelError("not such a network")

    monkeypatch.setattr("lit_recon.experiments.evaluate.rehearsal.rehearse", refusing)
    assert len(inapplicable(cells, tmp_path)) == 5
    assert len(tried) == 2


def test_a_part_without_an_applicable_attack_is_refused(cells: list[GridCell], tmp_path: Path) -> None:
    alone = [cell for cell in part_of(cells, ["optimal"]) if cell.attack == "dense"]
    with pytest.raises(ThreatModelError, match=r"optimal 0\.01, dense, batch 1: the update has no known density"):
        Rehearsal(alone, tmp_path, LeakageMetric()).check()
