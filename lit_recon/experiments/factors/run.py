"""`reconn.py factors`: what helps and what hinders the attack on released models, one factor at a time.

`reconn.py run` leads here too where its configuration has `factors`.
"""

from __future__ import annotations

import json
from pathlib import Path

import lit_recon._torchvision

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.experiments.configuration import SAME_RUN, instantiated, resolved, settings_of, settings_parser
from lit_recon.experiments.engine.worker import Worker
from lit_recon.experiments.factors.cells import FactorCells, RunParser
from lit_recon.experiments.factors.grid import build_grid
from lit_recon.experiments.factors.page import csv_table, write_page
from lit_recon.experiments.factors.results import FactorStudy
from lit_recon.experiments.factors.settings import FactorsSettings, check_base
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.io.files import write_text
from lit_recon.modules.loggers import build_loggers, finish, log_grid, log_table
from lit_recon.reporting.run_folder import GridFolder

#: What may change between two calls on one folder: cells that stay are kept, new ones are run.
_GROWS = ("factors", "seeds", "cache", "shard_size")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Vary one factor of an attack on released models at a time.")
    for schema in (FactorsSettings, ReconnSettings, ShadowSettings):
        settings.add_class_arguments(schema, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Refuse what cannot work, then run the cells that have not been run, and write the page about all of them."""
    worker = Worker.join()
    complete, config = resolved(arguments, values, "factors")
    built = instantiated(arguments, complete)
    study, base = settings_of(FactorsSettings, built), settings_of(ReconnSettings, built)
    shadows = settings_of(ShadowSettings, built)
    check_base(base, shadows)
    worker.refuse_more_devices(shadows.trainer)
    base.wandb.resolved_mode()
    own, runs = yaml.safe_load(config), RunParser()
    grid, folder = build_grid(study, own, runs.canonical), GridFolder(Path(complete.out))
    cells = FactorCells(study, grid.cells, folder, runs)
    if worker.rank == 0:
        cells.check()
        unfinished = not all(map(cells.is_done, cells.cells))
        GridFolder.open(folder.path, config, base.overwrite, (*SAME_RUN, *_GROWS), reopen=unfinished)
        write_text(folder.factors, json.dumps(grid.description, indent=2) + "\n")
        done = sum(map(cells.is_done, cells.cells))
        print(f"study       {len(study.factors)} factors, {len(cells.cells)} cells, {done} of them done")
        print(f"run folder  {folder.path}", flush=True)
    worker.leave()
    cells.run(wait=False)
    if worker.rank != 0:
        return
    cells.run(wait=True)
    page = write_page(folder.path)
    found = FactorStudy.read(folder.path)
    loggers = build_loggers(folder.run.logs, str(complete.name), base.wandb, own)
    log_table(loggers, "cells", *csv_table(found))
    for picture in sorted(folder.figures.glob("*.png")):
        log_grid(loggers, picture.stem, picture.read_bytes(), 0)
    finish(loggers)
    print("\n".join(found.findings()))
    print(f"report      {page}")
