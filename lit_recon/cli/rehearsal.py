"""The rehearsal of a grid: whatever cannot work is refused before the first cell runs, and nothing is trained."""

from __future__ import annotations

import json
from typing import Any

from lit_recon.cli.backbones import Target, find_target
from lit_recon.cli.cells import Cells
from lit_recon.cli.configuration import settings_of
from lit_recon.cli.grid import Cell
from lit_recon.cli.run import rehearse, sent_out, victim_data
from lit_recon.cli.settings import AttackSettings, BackboneSettings
from lit_recon.cli.training import prepare_training, training_data
from lit_recon.errors import LitReconError
from lit_recon.modules.data import VictimDataModule
from lit_recon.reporting.evaluation.judgement import NO_DEFENSE


class Rehearsal:
    """Sets up every training and every defense, and every attack at every batch size, on the first victims.

    An attack and a defense are each tried with all that matters to them, not with each other: a large grid would take
    long to try in full. Data are read once, and models built once, for all cells that share them.

    Args:
        cells: of the grid.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._victims: dict[str, VictimDataModule] = {}
        self._targets: dict[str, Target] = {}

    def check(self) -> None:
        """Go through the cells that are not done.

        Raises:
            LitReconError: about the first one that cannot work.
        """
        tried: set[tuple[str, ...]] = set()
        attacks = [cell for cell in self._cells.cells if cell.kind == "attack"]
        built = {cell.folder: self._cells.settings(cell) for cell in self._cells.cells}
        for cell in [cell for cell in attacks if not self._cells.is_done(cell)]:
            settings = AttackSettings(**built[cell.folder])
            try:
                self._try_attack(cell, settings, tried)
            except LitReconError as error:
                raise type(error)(f"{cell.describe()}: {error}") from error
        for cell in self._cells.cells:
            if cell.kind == "utility" and not self._cells.is_done(cell):
                try:
                    self._try_training(cell, built[cell.folder], built[attacks[0].folder])
                except LitReconError as error:
                    raise type(error)(f"{cell.describe()}: {error}") from error

    def _try_attack(self, cell: Cell, settings: AttackSettings, tried: set[tuple[str, ...]]) -> None:
        attack = ("attack", cell.attack, str(cell.batch_size))
        defense = ("defense", cell.defense, str(cell.strength))
        if {attack, defense} <= tried:
            return
        victims = self._victims_of(cell.settings, settings)
        key = _text([cell.settings[name] for name in ("data", "backbone", "seed")])
        if key not in self._targets:
            self._targets[key] = find_target(settings.backbone, victims, settings.seed)
        target = self._targets[key]
        if cell.defense != NO_DEFENSE:
            settings.client.client(sent_out(settings, target.model, victims), settings.defense)
        if attack not in tried:
            rehearse(settings, target, victims)
        tried |= {attack, defense}

    def _try_training(self, cell: Cell, built: dict[str, Any], attack: dict[str, Any]) -> None:
        backbone = settings_of(BackboneSettings, built)
        data = training_data(backbone, built["data"], built["seed"])
        first = next(c for c in self._cells.cells if c.kind == "attack")
        data.splits = self._victims_of(first.settings, AttackSettings(**attack)).splits  # read once
        prepare_training(backbone, data, built["seed"])

    def _victims_of(self, own: dict[str, Any], settings: AttackSettings) -> VictimDataModule:
        key = _text([own[name] for name in ("data", "victims")])
        if key not in self._victims:
            self._victims[key] = victim_data(settings)
        return self._victims[key]


def _text(settings: object) -> str:
    return json.dumps(settings, sort_keys=True, default=str)
