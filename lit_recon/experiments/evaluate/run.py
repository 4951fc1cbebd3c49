"""`attack.py evaluate`: every defense at every strength against every attack, and what each defense costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import MissingDataError
from lit_recon.experiments.configuration import SAME_RUN, instantiated, resolved, settings_parser
from lit_recon.experiments.engine.worker import Worker
from lit_recon.experiments.evaluate.bounds import write_bounds
from lit_recon.experiments.evaluate.cells import Cells
from lit_recon.experiments.evaluate.grid import build_cells, network_in_words
from lit_recon.experiments.evaluate.page import build_evaluation, gallery_grids, summary_lines
from lit_recon.experiments.evaluate.rehearsal import Rehearsal
from lit_recon.experiments.evaluate.results import Evaluation, LeakageMetric
from lit_recon.experiments.evaluate.settings import EvaluateSettings
from lit_recon.experiments.evaluate.tables import csv_table
from lit_recon.io.files import write_text
from lit_recon.metrics import Unavailable, load_lpips
from lit_recon.modules.loggers import build_loggers, finish, log_grid, log_table
from lit_recon.reporting.run_folder import GridFolder

#: What may change between two calls on one folder: cells that stay are kept, new ones are run.
_GROWS = ("attacks", "defenses", "batch_sizes", "utility", "max_accuracy_drops", "aware")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "CellEvaluator defenses by the strongest attack at equal utility.")
    settings.add_class_arguments(EvaluateSettings, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Refuse what cannot work, then run the cells that have not been run, and write the page about all of them."""
    worker = Worker.join()
    complete, config = resolved(arguments, values, "evaluate")
    settings = EvaluateSettings(**instantiated(arguments, complete))
    worker.refuse_more_devices(settings.trainer)
    settings.wandb.resolved_mode()
    folder = GridFolder(Path(complete.out))
    own = yaml.safe_load(config)
    cells = Cells(build_cells(settings, own), folder, settings.metric)
    if worker.rank == 0:
        _refuse_missing_lpips(settings)
        inapplicable = Rehearsal(cells, LeakageMetric(settings.metric)).check()
        unfinished = not all(cells.is_settled(cell) or cell.folder in inapplicable for cell in cells.cells)
        GridFolder.open(folder.path, config, settings.overwrite, (*SAME_RUN, *_GROWS), reopen=unfinished)
        write_text(folder.grid, json.dumps(_description(settings, cells, own), indent=2))
        for cell in cells.cells:
            if cell.folder in inapplicable:
                cells.set_aside(cell, inapplicable[cell.folder])
        _announce(cells)
    worker.leave()
    cells.run(wait=True, kinds=("generator",))
    cells.run(wait=False)
    if worker.rank != 0:
        return
    cells.run(wait=True)
    if not LeakageMetric(settings.metric).of_features:
        write_bounds(cells)
    build_evaluation(folder.path)
    evaluation = Evaluation.read(folder)
    _log(settings, evaluation, str(complete.name), yaml.safe_load(config))
    print("\n".join(summary_lines(evaluation)))
    print(f"report      {folder.run.report}")


def _refuse_missing_lpips(settings: EvaluateSettings) -> None:
    """An optional score is no option where attacks are judged by it."""
    if settings.metric != "lpips" or settings.lpips.network == "none":
        return
    found = load_lpips(settings.lpips.network, settings.lpips.weights, settings.lpips.download)
    if isinstance(found, Unavailable):
        raise MissingDataError(f"attacks are to be judged by LPIPS, which cannot be had: {found.reason}")


def _announce(cells: Cells) -> None:
    done = sum(map(cells.is_done, cells.cells))
    beside = sum(map(cells.is_settled, cells.cells)) - done
    print(f"grid        {len(cells.cells)} cells, {done} of them done" + f", {beside} not applicable" * (beside > 0))
    print(f"run folder  {cells.folder.path}", flush=True)


def _description(settings: EvaluateSettings, cells: Cells, own: Mapping[str, Any]) -> dict[str, Any]:
    """What the page cannot read off the cells' own folders."""
    return {
        "cells": [cell.entry() for cell in cells.cells],
        "attacks": {name: attack.title or name for name, attack in settings.attacks.items()},
        # named apart in every table and verdict: these attackers are not honest but curious
        "malicious": sorted({c.attack for c in cells.cells if c.settings.get("server")}),
        "defenses": {name: family.title or name for name, family in settings.defenses.items()},
        "networks": {
            cell.attack: network_in_words(cell.settings["backbone"])
            for cell in cells.cells
            if cell.kind == "attack" and cell.settings["backbone"] != own["backbone"]
        },
        "metric": settings.metric,
        "max_accuracy_drops": sorted(settings.max_accuracy_drops),
    }


def _log(settings: EvaluateSettings, evaluation: Evaluation, name: str, config: Mapping[str, Any]) -> None:
    """The tables and pictures on W&B."""
    loggers = build_loggers(evaluation.folder.run.logs, name, settings.wandb, dict(config))
    columns, rows = csv_table(evaluation)
    log_table(loggers, "cells", columns, rows)
    for title, grid in gallery_grids(evaluation).items():
        log_grid(loggers, f"gallery/{title}", grid, 0)
    log_grid(loggers, "utility_against_leakage", (evaluation.folder.figures / "scatter.png").read_bytes(), 0)
    finish(loggers)
