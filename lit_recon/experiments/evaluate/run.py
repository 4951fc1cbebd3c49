"""`attack.py evaluate`: defenses, strengths and attacks as a grid."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import MissingDataError
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import allow_class_path, settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.runner import StudyRunner, refuse_other_lpips
from lit_recon.experiments.evaluate.bounds import awaited, has_other_bounds, write_bounds
from lit_recon.experiments.evaluate.galleries import gallery_panels
from lit_recon.experiments.evaluate.grid import GridCell, build_cells, own_network, part_of
from lit_recon.experiments.evaluate.page import summary_lines, write_evaluation
from lit_recon.experiments.evaluate.rehearsal import Rehearsal
from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.experiments.evaluate.settings import EvaluateSettings
from lit_recon.experiments.evaluate.tables import comparisons, csv_table
from lit_recon.io.files import write_text
from lit_recon.metrics import PerceptualDistance, metrics_of
from lit_recon.modules.loggers import finish, log_grid, log_table
from lit_recon.reporting.provenance import differences, find_setting, flatten, is_below, read_settings
from lit_recon.reporting.run_folder import RunFolder

#: Settings of the comparison and of its trainings: with others, the page of a finished grid is written anew.
_COMPARED = ("utility", "utility_seeds", "max_accuracy_drops", "without")
#: Settings of the comparison, of its trainings and of bounds; they may change between two calls on one folder.
_OF_PAGE = (*_COMPARED, "bound")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    purpose = "Compare defenses by the strongest attack at equal utility."
    settings = settings_parser(program, purpose, EvaluateSettings, ClusterSettings)
    allow_class_path(settings, "--model")
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, run the cells without results, and write the page."""
    call = Call(arguments, values, "evaluate")
    settings, cluster = call.settings(EvaluateSettings), call.settings(ClusterSettings)
    path, own, metric = call.folder.path, call.own, settings.ranking
    bounded = not metric.of_features
    cluster.check(arguments.prog, settings.trainer)
    cells = build_cells(settings, own)
    part = part_of(cells, settings.only)
    if not settings.overwrite:
        refuse_other_lpips(call.folder, {cell.folder: cell.settings for cell in cells})
    print("rehearsal   of every attack, defense and training, on the first victims", flush=True)  # takes up to minutes
    rehearsal = Rehearsal(part, path, metric)
    inapplicable = rehearsal.check()
    if not settings.overwrite:
        rehearsal.refuse_other_data(cells, awaited(part, call.folder, settings.bound) if bounded else ())
    _refuse_unavailable(settings)
    study = StudyRunner([cell.piece(path, metric.key) for cell in part], path)
    grows = ("attacks", "defenses", "only", "batch_sizes", "aware", *_OF_PAGE)
    reopen = not settings.overwrite and (
        _has_other_page(study.folder, own) or (bounded and has_other_bounds(part, study.folder, settings.bound))
    )
    study.open(call.config, settings.overwrite, grows, inapplicable, reopen)
    write_text(study.folder.grid, json.dumps(_description(settings, cells, own), indent=2))
    print(f"grid        {study.progress()}")
    cluster.run(study, settings.trainer)
    if bounded:
        write_bounds(part, study.folder, settings.bound)
    evaluation = Evaluation.read(study.folder)
    compared, galleries = comparisons(evaluation), gallery_panels(evaluation)
    write_evaluation(evaluation, compared, galleries)
    loggers = call.loggers()
    log_table(loggers, "cells", *csv_table(evaluation))
    for panel in galleries:
        for picture in panel.pictures:
            log_grid(loggers, f"gallery/{panel.title}", picture.content, 0)
    log_grid(loggers, "utility_against_leakage", (study.folder.figures / "scatter.png").read_bytes(), 0)
    finish(loggers)
    print("\n".join(summary_lines(evaluation, compared)))
    print(f"report      {study.folder.report}")


def _has_other_page(folder: RunFolder, own: Mapping[str, Any]) -> bool:
    """Whether the grid in this folder has a page with other comparisons than the settings `own` ask for."""
    there = read_settings(folder.config) if folder.is_run else own
    return any(is_below(found.key, _COMPARED) for found in differences(there, own))


def _refuse_unavailable(settings: EvaluateSettings) -> None:
    lpips = PerceptualDistance(settings.lpips.network, settings.lpips.weights, settings.lpips.download)
    reason = metrics_of([settings.metric], [lpips])[-1].unavailable()
    if reason:
        raise MissingDataError(f"metric is {settings.metric}, which cannot be loaded: {reason}")


def _knows_statistics(settings: Mapping[str, Any]) -> bool:
    """Whether an attack is given BatchNorm statistics of the batch; a trunk without `norm` counts as having some."""
    norm = find_setting(settings, "backbone.trunk.norm")
    return find_setting(settings, "knowledge.batch_norm") == "batch" and norm in (None, "batch")


def _description(settings: EvaluateSettings, cells: Sequence[GridCell], own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "cells": [cell.entry() for cell in cells],
        "attacks": {name: attack.title or name for name, attack in settings.attacks.items()},
        # marked in every table and verdict: these servers are malicious, not honest but curious
        "malicious": sorted({c.attack for c in cells if c.settings.get("server")}),
        "batch_statistics": sorted({c.attack for c in cells if _knows_statistics(c.settings)}),
        "defenses": {name: family.title or name for name, family in settings.defenses.items()},
        "networks": {
            cell.attack: network
            for cell in cells
            if cell.kind == "attack" and (network := own_network(cell, own)) is not None
        },
        "trainings": {
            name: ", ".join(f"{key} {value}" for key, value in flatten(family.utility).items())
            for name, family in settings.defenses.items()
            if family.utility
        },
        "metric": settings.ranking.key,
        "of": settings.ranking.of,
        "max_accuracy_drops": sorted(settings.max_accuracy_drops),
        "without": settings.without,
    }
