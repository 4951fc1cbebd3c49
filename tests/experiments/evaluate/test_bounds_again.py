"""Bounds of a grid whose folder holds some already, or should: of killed processes and of earlier releases."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lit_recon.clients import ClientSettings
from lit_recon.defenses import Chain, Defense, GaussianNoise, GradientPruning, LaplaceNoise, MixUp
from lit_recon.errors import ConfigError
from lit_recon.experiments.evaluate import bounds as command
from lit_recon.experiments.evaluate.grid import GridCell
from lit_recon.experiments.evaluate.page import build_evaluation
from lit_recon.experiments.settings import BoundSettings, VictimSettings
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


@pytest.mark.parametrize(
    ("defense", "n_clients", "reason", "found"),
    [
        (LaplaceNoise(0.1), 1, f"no bound is known for {LaplaceNoise(0.1)}: its noise is not Gaussian", 0.25),
        (LaplaceNoise(0.1), 2, f"no bound is known for {LaplaceNoise(0.1)}: its noise is not Gaussian", None),
        (MixUp(1.0), 1, f"no bound is known for {MixUp(1.0)}", None),
        (MixUp(1.0), 1, "no bound is known for MixUp()", f"no bound is known for {MixUp(1.0)}"),  # as it was named
    ],
    ids=["known", "mean", "unknown", "renamed"],
)
def test_a_bound_that_was_not_known_is_asked_for_again(
    defense: Defense,
    n_clients: int,
    reason: str,
    found: float | str | None,
    cell: GridCell,
    bounded: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the defense; a grid whose reason still holds is left alone."""
    client, victims = ClientSettings(n_clients=n_clients), VictimSettings(n=4, batch_size=2)
    settings = SimpleNamespace(defense=defense, client=client, victims=victims)
    monkeypatch.setattr(command, "AttackSettings", lambda **_: settings)
    asked: list[GridCell] = []

    def again(one: GridCell, *_: Any) -> Any:
        asked.append(one)
        if isinstance(found, str):
            raise ConfigError(found)
        return {"rmse": found, "notes": []}

    monkeypatch.setattr(command, "_bound", again)
    bounded.bounds.write_text(json.dumps({cell.folder: {"reason": reason}}))
    for number in range(2):
        assert command.has_other_bounds([cell], bounded, BoundSettings()) == (found is not None and number == 0)
        command.write_bounds([cell], bounded)
    assert len(asked) == (found is not None)
