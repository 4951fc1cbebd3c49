"""Classes that a grid names by their full import path, in the package or out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_recon.defenses import Defense, GradientPruning
from lit_recon.experiments.configuration import instantiated, resolved, settings_of
from lit_recon.experiments.evaluate.grid import GridCell, build_cells
from lit_recon.experiments.evaluate.run import parser
from lit_recon.experiments.evaluate.settings import EvaluateSettings
from lit_recon.records import Update


class Quantize(Defense):
    """A defense of the user's own, whose arguments all have defaults."""

    def __init__(self, levels: float = 8, early: bool = False) -> None:
        self.levels, self.early = levels, early

    def transform_update(self, update: Update, round_: Any, generator: torch.Generator) -> Update:
        return {name: (value * self.levels).round() / self.levels for name, value in update.items()}


def cells(folder: Path, strength: str, class_path: str, **others: Any) -> list[GridCell]:
    """The cells of a grid in a file; `others` are further arguments of the defense."""
    attack = folder / "attack.yaml"
    attack.write_text(yaml.safe_dump({"attack": {"class_path": "GradientMatching", "init_args": {"steps": 3}}}))
    matching = {"class_path": "lit_recon.attacks.updates.GradientMatching"}
    defense = {"class_path": class_path, **({"init_args": others} if others else {})}
    content = {
        "attacks": {"some": {"config": str(attack), "settings": {"attack": matching}}},
        "defenses": {"own": {"strength": strength, "values": [0.5], "settings": {"defense": defense}}},
        "utility": {"trunk": {"class_path": "lit_recon.models.ConvNet"}, "epochs": 1},
    }
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump(content))
    command = parser("attack.py evaluate")
    complete, text = resolved(command, command.parse_args(["--config", str(file)]), "nameless")
    settings = settings_of(EvaluateSettings, instantiated(command, complete))
    return build_cells(settings, yaml.safe_load(text))


@pytest.mark.parametrize("others", [{}, {"early": True}])
def test_a_defense_of_the_users_own_has_the_strengths_of_its_grid(others: dict[str, Any], tmp_path: Path) -> None:
    found = cells(tmp_path, "defense.init_args.levels", f"{__name__}.Quantize", **others)
    defended = [cell.built(tmp_path)["defense"] for cell in found if cell.defense == "own"]
    assert len(defended) == 2  # the training that measures utility, and the attack
    for defense in defended:
        assert isinstance(defense, Quantize)
        assert (defense.levels, defense.early) == (0.5, bool(others))


def test_a_defense_of_the_package_may_be_named_by_its_path(tmp_path: Path) -> None:
    found = cells(tmp_path, "defense.init_args.fraction", "lit_recon.defenses.GradientPruning")
    (cell,) = (cell for cell in found if (cell.defense, cell.kind) == ("own", "attack"))
    defense = cell.built(tmp_path)["defense"]
    assert isinstance(defense, GradientPruning)
    assert defense.fraction == 0.5


def test_settings_that_name_a_class_are_plain_mappings(tmp_path: Path) -> None:
    """Those of an attack and of trainings, too: cells are described, hashed and merged as mappings."""
    found = cells(tmp_path, "defense.init_args.levels", f"{__name__}.Quantize")
    for cell in found:
        assert yaml.safe_load(yaml.safe_dump(cell.settings)) == cell.settings
