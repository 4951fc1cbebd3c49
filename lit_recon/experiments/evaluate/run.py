"""`attack.py evaluate`: every defense at every strength against every attack, and what each defense costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import MissingDataError
from lit_recon.experiments.configuration import instantiated, resolved, settings_of, settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.runner import StudyRunner, refuse_several_processes
from lit_recon.experiments.evaluate.bounds import write_bounds
from lit_recon.experiments.evaluate.grid import Cell, build_cells, network_in_words
from lit_recon.experiments.evaluate.page import build_evaluation, gallery_grids, summary_lines
from lit_recon.experiments.evaluate.rehearsal import Rehearsal
from lit_recon.experiments.evaluate.results import Evaluation, LeakageMetric
from lit_recon.experiments.evaluate.settings import EvaluateSettings
from lit_recon.experiments.evaluate.tables import csv_table
from lit_recon.io.files import write_text
from lit_recon.metrics import Unavailable, load_lpips
from lit_recon.modules.loggers import build_loggers, finish, log_grid, log_table

#: Settings that may change between two calls on one folder: finished cells are kept, new ones are run.
_GROWS = ("attacks", "defenses", "batch_sizes", "utility", "max_accuracy_drops", "aware")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Compare defenses by the strongest attack at equal utility.")
    settings.add_class_arguments(EvaluateSettings, as_group=False)
    settings.add_class_arguments(ClusterSettings, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Refuse what cannot work, then run the cells that have not been run, and write the page about all of them."""
    complete, config = resolved(arguments, values, "evaluate")
    built = instantiated(arguments, complete)
    settings, cluster = settings_of(EvaluateSettings, built), settings_of(ClusterSettings, built)
    refuse_several_processes(arguments.prog, settings.trainer)
    cluster.check()
    settings.wandb.resolved_mode()
    path, own, metric = Path(complete.out), yaml.safe_load(config), LeakageMetric(settings.metric)
    cells = build_cells(settings, own)
    inapplicable = Rehearsal(cells, path, metric).check()
    _refuse_missing_lpips(settings)
    study = StudyRunner([cell.piece(path, settings.metric) for cell in cells], path)
    study.open(config, settings.overwrite, _GROWS, inapplicable)
    write_text(study.folder.grid, json.dumps(_description(settings, cells, own), indent=2))
    print(f"grid        {study.progress()}")
    print(f"run folder  {path}", flush=True)
    with cluster.executor(study.folder, settings.trainer.threads, settings.trainer.accelerator) as executor:
        study.run(executor)
    if not metric.of_features:
        write_bounds(cells, study.folder)
    build_evaluation(path)
    evaluation = Evaluation.read(study.folder)
    _log(settings, evaluation, str(complete.name), own)
    print("\n".join(summary_lines(evaluation)))
    print(f"report      {study.folder.report}")


def _refuse_missing_lpips(settings: EvaluateSettings) -> None:
    """Refuse LPIPS that cannot be loaded, where attacks are judged by it."""
    if settings.metric != "lpips" or settings.lpips.network == "none":
        return
    found = load_lpips(settings.lpips.network, settings.lpips.weights, settings.lpips.download)
    if isinstance(found, Unavailable):
        raise MissingDataError(f"metric is lpips, which cannot be loaded: {found.reason}")


def _description(settings: EvaluateSettings, cells: Sequence[Cell], own: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs to know beyond the cells' own folders."""
    return {
        "cells": [cell.entry() for cell in cells],
        "attacks": {name: attack.title or name for name, attack in settings.attacks.items()},
        # marked in every table and verdict: these servers are malicious, not honest but curious
        "malicious": sorted({c.attack for c in cells if c.settings.get("server")}),
        "defenses": {name: family.title or name for name, family in settings.defenses.items()},
        "networks": {
            cell.attack: network_in_words(cell.settings["backbone"])
            for cell in cells
            if cell.kind == "attack" and cell.settings["backbone"] != own["backbone"]
        },
        "metric": settings.metric,
        "max_accuracy_drops": sorted(settings.max_accuracy_drops),
    }


def _log(settings: EvaluateSettings, evaluation: Evaluation, name: str, config: Mapping[str, Any]) -> None:
    """The tables and pictures on W&B."""
    loggers = build_loggers(evaluation.folder.logs, name, settings.wandb, dict(config))
    columns, rows = csv_table(evaluation)
    log_table(loggers, "cells", columns, rows)
    for title, grid in gallery_grids(evaluation).items():
        log_grid(loggers, f"gallery/{title}", grid, 0)
    log_grid(loggers, "utility_against_leakage", (evaluation.folder.figures / "scatter.png").read_bytes(), 0)
    finish(loggers)
