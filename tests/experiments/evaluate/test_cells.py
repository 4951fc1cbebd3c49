"""Cells run once; one whose attack cannot work is set aside, one that failed is tried again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_recon.attacks.updates import GenerativePrior, GradientMatching
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.experiments.evaluate.cells import Cells
from lit_recon.experiments.evaluate.grid import Cell
from lit_recon.experiments.update_attack import run as run_command
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, save_generator
from lit_recon.modules.generator_training import GENERATOR_FILE
from lit_recon.reporting.run_folder import GridFolder

PRIOR: dict[str, Any] = {"class_path": "GenerativePrior", "init_args": {"checkpoint": "nowhere.safetensors"}}
ATTACK = {"class_path": "GradientMatching", "init_args": {"parametrization": PRIOR, "steps": 1}}
CELL = Cell("attack", "cells/none-some-b1-0123abcd", {"attack": ATTACK}, "none", None, "some", None, 1)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], list[str]]:
    """Makes `attack.py run` fail, and returns the list of the cells that tried."""

    def refuse(error: Exception) -> list[str]:
        tried: list[str] = []

        def execute(arguments: Any, values: Any) -> None:
            tried.append(str(values.name))
            raise error

        monkeypatch.setattr(run_command, "execute", execute)
        return tried

    return refuse


@pytest.mark.parametrize(
    ("error", "applicable"),
    [
        (ThreatModelError("a batch of one"), False),
        (UnsupportedModelError("no such layer"), False),
        (ConfigError("diverged"), True),
        (RuntimeError("out of memory"), True),
    ],
)
def test_a_failed_cell_is_tried_again_unless_its_attack_cannot_work(
    error: Exception,
    applicable: bool,
    tmp_path: Path,
    refusing: Callable[[Exception], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tried = refusing(error)
    for _ in range(2):  # two calls of the command
        Cells([CELL], GridFolder(tmp_path)).run(wait=False)
    assert len(tried) == (2 if applicable else 1)
    content = json.loads(GridFolder(tmp_path).failure(CELL.folder).read_text())
    assert (content["reason"], content["applicable"]) == (str(error), applicable)
    assert ("RuntimeError" in content["traceback"]) == isinstance(error, RuntimeError)
    assert f"none, some, batch 1: {'FAILED' if applicable else 'not applicable'}, {error}" in capsys.readouterr().out
    assert Cells([CELL], GridFolder(tmp_path)).is_settled(CELL) != applicable


def test_a_cell_that_is_set_aside_is_not_run(tmp_path: Path, refusing: Callable[[Exception], list[str]]) -> None:
    tried = refusing(RuntimeError("not expected"))
    cells = Cells([CELL], GridFolder(tmp_path))
    cells.set_aside(CELL, "it needs two images")
    cells.run(wait=True)
    assert tried == []
    assert not cells.is_done(CELL)


def test_only_the_kinds_that_are_asked_for_run(tmp_path: Path, refusing: Callable[[Exception], list[str]]) -> None:
    tried = refusing(RuntimeError("not expected"))
    Cells([CELL], GridFolder(tmp_path)).run(wait=True, kinds=("generator",))
    assert tried == []


def test_an_attack_draws_from_the_generator_of_its_grid(tmp_path: Path) -> None:
    folder = "generators/some-0123abcd"
    cell = Cell("attack", CELL.folder, CELL.settings, "none", None, "some", None, 1, generator=folder)
    cells = Cells([cell], GridFolder(tmp_path))
    made = GeneratorCheckpoint(ConvGenerator((1, 8, 8), 2, 1), "digits", "", torch.zeros(0, dtype=torch.int64), 1)
    trained, other = tmp_path / folder / GENERATOR_FILE, tmp_path / "stand_in.safetensors"
    for path in (trained, other):
        save_generator(path, made)
    for given, expected in ((None, trained), (other, other)):
        attack = cells.settings(cell, given)["attack"]
        assert isinstance(attack, GradientMatching)
        assert isinstance(attack.parametrization, GenerativePrior)
        assert attack.parametrization.checkpoint == expected
