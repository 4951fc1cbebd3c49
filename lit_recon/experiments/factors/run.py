"""`reconn.py factors`: vary one factor of the attack on released models at a time.

`reconn.py run` comes here too where its configuration has `factors`.
"""

from __future__ import annotations

import json
from pathlib import Path

import lit_recon._torchvision

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.experiments.configuration import instantiated, resolved, settings_of, settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.runner import StudyRunner, refuse_several_processes
from lit_recon.experiments.factors.cells import RECONN, FactorCellRun, Splits
from lit_recon.experiments.factors.grid import build_grid
from lit_recon.experiments.factors.page import csv_table, write_page
from lit_recon.experiments.factors.results import FactorStudy
from lit_recon.experiments.factors.settings import FactorsSettings, check_base
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.io.files import write_text
from lit_recon.modules.loggers import build_loggers, finish, log_grid, log_table

#: Settings that may change between two calls on one folder: finished cells are kept, new ones are run.
_GROWS = ("factors", "seeds", "cache", "shard_size")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Vary one factor of an attack on released models at a time.")
    for schema in (FactorsSettings, ReconnSettings, ShadowSettings, ClusterSettings):
        settings.add_class_arguments(schema, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Refuse what cannot work, then run the cells that have not been run, and write the page about all of them."""
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
