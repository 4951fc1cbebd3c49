"""`reconn.py run` with `factors`: the cells of a study of factors, run and measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.released.diagnostics import FEWEST
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import settings_of, settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.pieces import Piece, metrics_in_words, settings_hash
from lit_recon.experiments.engine.runner import StudyRunner, refuse_other_data, refuse_other_lpips
from lit_recon.experiments.factors.measures import Measures, Transfer, files_of
from lit_recon.experiments.factors.page import csv_table, write_page
from lit_recon.experiments.factors.results import FactorStudy
from lit_recon.experiments.factors.settings import FactorCell, FactorGrid, FactorsSettings, TransferSettings, check_base
from lit_recon.experiments.released_attack.settings import RECONN, ReconnSettings, ShadowSettings
from lit_recon.io.files import write_text
from lit_recon.modules.loggers import finish, log_grid, log_table
from lit_recon.reporting.run_folder import RunFolder, marked
from lit_recon.training.trainer import check_trainer, configure_process

#: Names and keys of the metrics that are printed of a finished cell.
_SHOWN = (("MSE", "mse"), ("nearest other image", "oracle_mse"))

#: The command of a study, which alone knows `transfer`.
_STUDY = "reconn.py factors"
#: Splits by the settings that they are drawn from.
Splits = dict[str, InformedSplit]


@dataclass(frozen=True)
class FactorCellRun:
    """The work of a cell of a study."""

    study: FactorsSettings
    cell: FactorCell

    @property
    def piece(self) -> Piece:
        """The piece of the study."""
        results = ("metrics.json", *files_of(self.cell.measures))
        return Piece(self.cell.folder, self.cell.title, self, shares=self._stores(), results=results)

    def check(self, splits: Splits) -> None:
        """Raise ConfigError for a cell that cannot work; `splits` were drawn for other cells, and get this one's."""
        cell = self.cell
        try:
            base, shadows, drawn, transfer = self._built(splits)
            split = drawn if transfer is None else transfer.split
            assert len(split.unseen)  # for the accuracy
            plan = shadows.plan(split)
            base.access.describe(plan.network, drawn.shadow)
            plan.known.on("cpu")
            shadows.shadow_models(plan, split)
            if transfer is None:
                base.bind(plan, len(split.shadow))
            else:
                transfer.attack(plan)
            if "embedding" in cell.measures and len(split.targets) < FEWEST:
                raise ConfigError(f"embedding needs split.targets of at least {FEWEST}; got {len(split.targets)}")
        except LitReconError as error:
            raise ConfigError(f"{cell.title}: {error}") from error

    def split_hash(self, splits: Splits) -> str:
        """The hash of the images that are there now for this cell; `splits` as for `check`."""
        _, _, drawn, transfer = self._built(splits)
        return (drawn if transfer is None else transfer.split).hash

    def __call__(self, path: Path) -> str:
        """Run the cell in its folder, or resume it, and measure what is missing; its metrics in words."""
        folder, cell = RunFolder(path), self.cell
        base, shadows, drawn, transfer = self._built({})
        configure_process(shadows.trainer)
        if not folder.is_complete:
            if transfer is None:
                RECONN.run(cell.settings, path)
            else:
                whole = {**cell.settings, "name": path.name, "transfer": cell.transfer}
                RunFolder.open(path, marked(yaml.safe_dump(whole, sort_keys=False), RECONN.name, _STUDY))
                transfer.run(folder)
        split = drawn if transfer is None else transfer.split
        plan = shadows.plan(split, check_trainer(shadows.trainer, float64=True).device)
        Measures(self.study, base.access, plan, split, drawn.shadow, folder).take(cell.measures)
        return metrics_in_words(path, _SHOWN)

    def _built(self, splits: Splits) -> tuple[ReconnSettings, ShadowSettings, InformedSplit, Transfer | None]:
        """The cell's settings, the split of the base's data, and the transfer to another one."""
        settings = self.cell.settings
        built = RECONN.built(settings)
        base, shadows = settings_of(ReconnSettings, built), settings_of(ShadowSettings, built)
        start = settings["initialization"]
        own = [settings[name] for name in ("data", "shadow_data", "split")]
        key = json.dumps([*own, isinstance(start, dict) and start], sort_keys=True)
        if key not in splits:
            splits[key] = shadows.drawn()
        if self.cell.transfer is None:
            return base, shadows, splits[key], None
        return base, shadows, splits[key], Transfer(TransferSettings(**self.cell.transfer), base, shadows, splits[key])

    def _stores(self) -> dict[str, int]:
        """How many shadow models the cell needs, by a key of their store, which other cells may need, too."""
        own = {name: self.cell.settings.get(name) for name in ShadowSettings.__dataclass_fields__}
        split, transfer = self.cell.settings["split"], self.cell.transfer
        stores = {settings_hash({**own, "split": {**split, "shadow": 0}}): split["shadow"]}
        if transfer is None:
            return stores
        new = {settings_hash({**own, "transfer": True}): transfer["shadows"]}  # more shadow targets, another fixed set
        return {**stores, **new} if transfer["way"] == "adapted" else new


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    schemas = (FactorsSettings, ReconnSettings, ShadowSettings, ClusterSettings)
    return settings_parser(program, "Vary one factor of an attack on released models at a time.", *schemas)


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, run the cells without results, and write the page."""
    call = Call(arguments, values, "factors")
    factors, base = call.settings(FactorsSettings), call.settings(ReconnSettings)
    shadows, cluster = call.settings(ShadowSettings), call.settings(ClusterSettings)
    check_base(base, shadows)
    cluster.check(arguments.prog, shadows.trainer)
    folder, grid, splits = call.folder, FactorGrid(factors, call.own), Splits()
    if not base.overwrite:
        refuse_other_lpips(folder, {cell.folder: cell.settings for cell in grid.cells})
    runs = [FactorCellRun(factors, cell) for cell in grid.part(factors.only)]
    study = StudyRunner([run.piece for run in runs], folder.path)
    missing = [run for run, piece in zip(runs, study.pieces, strict=True) if not study.is_done(piece)]
    if missing and cluster.cluster is None:
        check_trainer(shadows.trainer, float64=True)
    if missing and not base.overwrite:
        refuse_other_data(folder, {run.cell.folder: run.split_hash(splits) for run in runs if run not in missing})
    for run in missing:
        run.check(splits)
    grows = ("factors", "only", "seeds", "cache", "shard_size")
    study.open(call.config, base.overwrite, grows)
    write_text(folder.factors, json.dumps(grid.description, indent=2) + "\n")
    print(f"study       {len(factors.factors)} factors, {study.progress()}")
    cluster.run(study, shadows.trainer)
    page = write_page(folder.path)
    found = FactorStudy.read(folder.path)
    loggers = call.loggers()
    log_table(loggers, "cells", *csv_table(found))
    for picture in sorted(folder.figures.glob("*.png")):
        log_grid(loggers, picture.stem, picture.read_bytes(), 0)
    finish(loggers)
    print("\n".join(found.findings()))
    print(f"report      {page}")
