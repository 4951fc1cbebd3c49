"""Bounds of a grid whose folder holds some already, or should: of killed processes and of earlier releases."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lit_recon.defenses import Chain, GaussianNoise, GradientPruning
from lit_recon.experiments.evaluate import bounds as command
from lit_recon.experiments.evaluate.grid import GridCell
from lit_recon.experiments.evaluate.page import build_evaluation
from lit_recon.experiments.settings import BoundSettings
from lit_recon.reporting.run_folder import RunFolder


def test_a_kill_loses_only_the_bound_at_hand(
    cell: GridCell, bounded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [replace(cell, folder=entry["folder"]) for entry in json.loads(bounded.grid.read_text())["cells"]]
    found, large = {"rmse": 0.2, "unbiased_rmse": 0.3}, BoundSettings()
    asked: list[str] = []

    def killed(one: GridCell, *_: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        asked.append(one.folder)
        return dict(found)

    monkeypatch.setattr(command, "_bound", killed)
    with pytest.raises(KeyboardInterrupt):
        command.write_bounds(cells, bounded, large)
    assert json.loads(bounded.bounds.read_text()) == {cells[0].folder: found}
    build_evaluation(bounded.path)  # by `attack.py report`: the grid counts as finished
    assert command.has_other_bounds(cells, bounded, large)
    monkeypatch.setattr(command, "_bound", lambda one, *_: asked.append(one.folder) or dict(found))
    command.write_bounds(cells, bounded, large)
    assert asked == [one.folder for one in cells]
    assert json.loads(bounded.bounds.read_text()) == {one.folder: found for one in cells}
    assert not command.has_other_bounds(cells, bounded, large)


def test_a_bound_is_kept_until_there_is_another(
    cell: GridCell, bounded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {cell.folder: {"not_computed": "it would take about 15 minutes"}, "cells/elsewhere": {"rmse": 0.2}}
    bounded.bounds.write_text(json.dumps(stored))

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_bound", killed)
    with pytest.raises(KeyboardInterrupt):
        command.write_bounds([cell, replace(cell, folder="cells/unfinished")], bounded)
    assert json.loads(bounded.bounds.read_text()) == stored


def test_bounds_of_earlier_releases_behind_masks_are_computed_anew(
    cell: GridCell, bounded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took an entry whose gradient is exactly 0 for a dropped one."""
    old = {"rmse": 0.2, "unbiased_rmse": 0.3}
    for stored, defense, other in (
        (old, Chain([GradientPruning(0.5), GaussianNoise(0.1)]), True),
        (old, GaussianNoise(0.1), False),
        ({**old, "notes": []}, Chain([GradientPruning(0.5), GaussianNoise(0.1)]), False),
    ):
        monkeypatch.setattr(command, "AttackSettings", lambda defense=defense, **_: SimpleNamespace(defense=defense))
        bounded.bounds.write_text(json.dumps({cell.folder: stored}))
        assert command.has_other_bounds([cell], bounded, BoundSettings()) == other
