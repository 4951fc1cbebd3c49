"""`reconn.py run` with `factors`: the cells of a study of factors, run and measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import lit_recon._torchvision

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.released.diagnostics import FEWEST
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import instantiated, resolved, settings_of, settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.pieces import Piece, Subcommand, metrics_in_words, settings_hash
from lit_recon.experiments.engine.runner import StudyRunner, refuse_several_processes
from lit_recon.experiments.factors.grid import FactorCell, build_grid
from lit_recon.experiments.factors.measures import Measures, Transfer, file_of, kinds_of
from lit_recon.experiments.factors.page import csv_table, write_page
from lit_recon.experiments.factors.results import FactorStudy
from lit_recon.experiments.factors.settings import FactorsSettings, TransferSettings, check_base
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.io.files import write_text
from lit_recon.modules.loggers import build_loggers, finish, log_grid, log_table
from lit_recon.reporting.run_folder import RunFolder, marked
from lit_recon.training.trainer import check_trainer, configure_process

RECONN = Subcommand("reconn.py run", "lit_recon.experiments.released_attack.run")
#: Names and keys of the metrics that are printed of a finished cell.
_SHOWN = (("MSE", "mse"), ("nearest other image", "oracle_mse"))

#: Splits by the settings that they are drawn from.
Splits = dict[str, InformedSplit]


@dataclass(frozen=True)
class FactorCellRun:
    """The work of a cell.

    Attributes:
        study: settings of the study.
        cell: to be run.
    """

    study: FactorsSettings
    cell: FactorCell

    @property
    def piece(self) -> Piece:
        """The piece of the study."""
        return Piece(
            folder=self.cell.folder,
            title=self.cell.title,
            work=self,
            shares=self._store_key(),
            results=("metrics.json", *map(file_of, kinds_of(self.cell.measures))),
        )

    def check(self, splits: Splits) -> None:
        """Set the cell up, without training anything.

        Args:
            splits: that were drawn for other cells; what is drawn for this one is added.

        Raises:
            ConfigError: the cell cannot work.
        """
        cell = self.cell
        try:
            base, shadows = self._built()
            drawn = self._drawn(shadows, splits)
            split = self._split(base, shadows, drawn)
            plan = shadows.plan(split)
            base.access.describe(plan.network, drawn.shadow)
            plan.known.on("cpu")
            shadows.shadow_models(plan, split)
            if cell.transfer is None:
                base.bind(plan)
            else:
                self._transfer(base, shadows, drawn).attack(plan)
            if "embedding" in cell.measures and len(split.targets) < FEWEST:
                raise ConfigError(f"embedding needs split.targets of at least {FEWEST}; got {len(split.targets)}")
        except LitReconError as error:
            raise ConfigError(f"{cell.title}: {error}") from error

    def __call__(self, path: Path) -> str:
        """Run the cell in its folder, or resume it, and measure what is missing; its metrics in words."""
        folder, cell = RunFolder(path), self.cell
        base, shadows = self._built()
        configure_process(shadows.trainer)
        drawn = self._drawn(shadows, {})
        if not folder.is_complete:
            if cell.transfer is None:
                RECONN.run(cell.settings, path)
            else:
                whole = {**cell.settings, "name": path.name, "transfer": cell.transfer}
                RunFolder.open(path, marked(yaml.safe_dump(whole, sort_keys=False), RECONN.name))
                self._transfer(base, shadows, drawn).run(folder)
        split = self._split(base, shadows, drawn)
        plan = shadows.plan(split, check_trainer(shadows.trainer).device)
        Measures(self.study, base.access, plan, split, drawn.shadow, folder).take(cell.measures)
        return metrics_in_words(path, _SHOWN)

    def _built(self) -> tuple[ReconnSettings, ShadowSettings]:
        built = RECONN.built(self.cell.settings)
        return settings_of(ReconnSettings, built), settings_of(ShadowSettings, built)

    def _split(self, base: ReconnSettings, shadows: ShadowSettings, drawn: InformedSplit) -> InformedSplit:
        return drawn if self.cell.transfer is None else self._transfer(base, shadows, drawn).split

    def _transfer(self, base: ReconnSettings, shadows: ShadowSettings, drawn: InformedSplit) -> Transfer:
        return Transfer(TransferSettings(**(self.cell.transfer or {})), base, shadows, drawn)

    def _drawn(self, shadows: ShadowSettings, splits: Splits) -> InformedSplit:
        start = self.cell.settings["initialization"]
        own = [self.cell.settings[name] for name in ("data", "shadow_data", "split")]
        key = json.dumps([*own, isinstance(start, dict) and start], sort_keys=True)
        if key not in splits:
            splits[key] = shadows.drawn()
        return splits[key]

    def _store_key(self) -> str:
        """Cells with the same key train the same shadow models, or more of them."""
        own = {name: self.cell.settings.get(name) for name in ShadowSettings.__dataclass_fields__}
        return settings_hash({**own, "split": {**(own["split"] or {}), "shadow": 0}})


#: Settings that may change between two calls on one folder: finished cells are kept, new ones are run.
_GROWS = ("factors", "seeds", "cache", "shard_size")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Vary one factor of an attack on released models at a time.")
    for schema in (FactorsSettings, ReconnSettings, ShadowSettings, ClusterSettings):
        settings.add_class_arguments(schema, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, run the cells without results, and write the page."""
    complete, config = resolved(arguments, values, "factors")
    built = instantiated(arguments, complete)
    factors, base = settings_of(FactorsSettings, built), settings_of(ReconnSettings, built)
    shadows, cluster = settings_of(ShadowSettings, built), settings_of(ClusterSettings, built)
    check_base(base, shadows)
    refuse_several_processes(arguments.prog, shadows.trainer)
    cluster.check()
    base.wandb.resolved_mode()
    path, own = Path(complete.out), yaml.safe_load(config)
    grid, splits = build_grid(factors, own, RECONN.canonical), Splits()
    runs = [FactorCellRun(factors, cell) for cell in grid.cells]
    study = StudyRunner([run.piece for run in runs], path)
    for run, piece in zip(runs, study.pieces, strict=True):
        if not study.is_done(piece):
            run.check(splits)
    study.open(config, base.overwrite, _GROWS)
    write_text(study.folder.factors, json.dumps(grid.description, indent=2) + "\n")
    print(f"study       {len(factors.factors)} factors, {study.progress()}")
    print(f"run folder  {path}", flush=True)
    with cluster.executor(study.folder, shadows.trainer.threads, shadows.trainer.accelerator) as executor:
        study.run(executor)
    page = write_page(path)
    found = FactorStudy.read(path)
    loggers = build_loggers(study.folder.logs, str(complete.name), base.wandb, own)
    log_table(loggers, "cells", *csv_table(found))
    for picture in sorted(study.folder.figures.glob("*.png")):
        log_grid(loggers, picture.stem, picture.read_bytes(), 0)
    finish(loggers)
    print("\n".join(found.findings()))
    print(f"report      {page}")
