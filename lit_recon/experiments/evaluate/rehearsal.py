"""Checks a grid before its first cell runs, without training anything."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_recon.clients import Client
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import settings_of
from lit_recon.experiments.engine.runner import refuse_other_data
from lit_recon.experiments.evaluate.grid import INAPPLICABLE, GridCell
from lit_recon.experiments.evaluate.results import LeakageMetric
from lit_recon.experiments.settings import AttackSettings, BackboneSettings
from lit_recon.experiments.update_attack.run import observed, refuse_known_victims, sent_out, victim_data
from lit_recon.experiments.victim_model import VictimModel, find_target, prepare_training
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, save_generator
from lit_recon.modules.data import VictimDataModule
from lit_recon.records import Observation
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.training.trainer import check_trainer

#: Updates that are kept at a time.
_KEPT = 8


class Rehearsal:
    """Checks the attack of every cell, and sets up every training, and every attack at every batch size, once.

    Attacks are set up on the first victims; if one refuses their update, that is left to the cell's own run, which has
    the trained model and all victims. An untrained generator takes the place of one that is still to be trained. Cells
    share data and models.
    """

    def __init__(self, cells: Sequence[GridCell], folder: Path, metric: LeakageMetric) -> None:
        self._cells, self._folder, self._metric = cells, folder, metric
        self._victims: dict[tuple[str, str], VictimDataModule] = {}  # by the settings of the data, and of the victims
        self._targets: dict[str, VictimModel] = {}
        self._sent: dict[str, nn.Module] = {}  # models that servers send to clients
        self._seen: dict[str, Observation] = {}  # updates of the last cells, which other attacks see, too
        self._inapplicable: dict[str, LitReconError] = {}  # by folder of the cell
        self._set_up: set[tuple[str, int]] = set()  # attacks, at a batch size

    def check(self) -> dict[str, str]:
        """By folder of a cell that is not done, why its attack is not applicable, or there is no such training.

        A LitReconError is about the first cell that cannot work for another reason, or says that no attack can.
        """
        with tempfile.TemporaryDirectory() as place:
            return self._check(Path(place))

    def _check(self, place: Path) -> dict[str, str]:
        untrained: dict[str, str] = {}
        attacks = [cell for cell in self._cells if cell.kind == "attack"]
        stand_ins = {
            cell.folder: self._stand_in(cell, place / f"{number}.safetensors")
            for number, cell in enumerate(self._cells)
            if cell.kind == "generator"
        }
        built = {cell.folder: cell.built(self._folder, stand_ins.get(cell.generator)) for cell in self._cells}
        left = [cell for cell in self._cells if not RunFolder(self._folder / cell.folder).is_complete]
        for cell in sorted(left, key=lambda cell: cell.kind):  # attacks before the trainings that measure utility
            try:
                if cell.kind == "attack":
                    self._try_attack(cell, AttackSettings(**built[cell.folder]))
                elif cell.kind == "utility":
                    same = [one for one in attacks if one.settings["data"] == cell.settings["data"]]
                    self._try_training(built[cell.folder], same[:1])
            except LitReconError as error:
                if cell.kind == "utility" and isinstance(error, INAPPLICABLE):
                    untrained[cell.folder] = str(error)
                    continue
                raise type(error)(f"{cell.describe()}: {error}") from error
        found = self._inapplicable
        if len(found) == len(attacks):
            first = found[attacks[0].folder]
            raise type(first)(f"{attacks[0].describe()}: {first}") from first
        return {folder: str(why) for folder, why in found.items()} | untrained

    def refuse_other_data(self, cells: Sequence[GridCell], bounded: Sequence[GridCell] = ()) -> None:
        """`refuse_other_data` of the engine, for all cells on data that the rehearsal has read, or that bounds read.

        Data that no cell is left to run on are not read otherwise; `bounded` are finished cells that get bounds.
        """
        for cell in bounded:
            self._victims_of(cell.settings, AttackSettings(**cell.built(self._folder)))
        now = {data: victims.split_hash for (data, _), victims in self._victims.items()}
        hashes = {cell.folder: now.get(_text(cell.settings["data"])) for cell in cells}
        refuse_other_data(RunFolder(self._folder), {place: own for place, own in hashes.items() if own is not None})

    def _stand_in(self, cell: GridCell, path: Path) -> Path:
        """An untrained generator as the cell's settings describe it."""
        built = cell.built(self._folder)
        shape = built["data"].load()[0].image_shape
        with torch.random.fork_rng(devices=[]):
            generator = ConvGenerator(shape, built["latent_size"], built["width"])
        seen = torch.zeros(0, dtype=torch.int64)
        save_generator(path, GeneratorCheckpoint(generator, data="", split_hash="", seen=seen, epoch=0))
        return path

    def _try_attack(self, cell: GridCell, settings: AttackSettings) -> None:
        victims = self._victims_of(cell.settings, settings)
        if cell.network not in self._targets:
            self._targets[cell.network] = find_target(settings.backbone, victims, settings.seed, settings.model)
        sent = json.dumps([cell.network, cell.settings.get("server")], default=str)
        if sent not in self._sent:
            self._sent[sent] = sent_out(settings, self._targets[cell.network].model, victims)
        client, attack = settings.client.client(self._sent[sent], settings.defense), settings.attack
        refuse_known_victims(attack, victims)
        if self._metric.of_features and not attack.recovers_features:
            self._inapplicable[cell.folder] = ConfigError(
                "it recovers no features, by which this grid judges attacks: give it `features`"
            )
            return
        try:
            seen = self._observed(cell, settings, client, victims)
            attack.check([seen])
        except INAPPLICABLE as error:
            self._inapplicable[cell.folder] = error
            return
        if (cell.attack, cell.batch_size) not in self._set_up:
            with contextlib.suppress(*INAPPLICABLE):  # of this update
                attack.rehearse([seen])
                self._set_up.add((cell.attack, cell.batch_size))

    def _observed(
        self, cell: GridCell, settings: AttackSettings, client: Client, victims: VictimDataModule
    ) -> Observation:
        """The first victim's update; the last few are kept, as some defenses take seconds for one."""
        depends = ("server", "data", "victims", "client", "defense", "knowledge", "seed")
        key = _text([cell.network, *map(cell.settings.get, depends)])
        if key not in self._seen:
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen[key] = observed(settings, client, victims, 0)
        return self._seen[key]

    def _try_training(self, built: dict[str, Any], same: Sequence[GridCell]) -> None:
        """Set up a training; an attack on the `same` data, if there is one, has read them."""
        read = [self._victims_of(one.settings, AttackSettings(**one.built(self._folder))) for one in same]
        splits = read[0].splits if read else None
        training = prepare_training(settings_of(BackboneSettings, built), built["data"], built["seed"], splits)
        check_trainer(built["trainer"], training.precision)

    def _victims_of(self, own: dict[str, Any], settings: AttackSettings) -> VictimDataModule:
        key = _text(own["data"]), _text(own["victims"])
        if key not in self._victims:
            self._victims[key] = victim_data(settings)
        return self._victims[key]


def _text(settings: Any) -> str:
    return json.dumps(settings, sort_keys=True, default=str)
