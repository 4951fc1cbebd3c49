"""`reconn.py rero`: bounds on reconstruction under differential privacy, and attacks compared with them."""

from __future__ import annotations

import time
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.released.base import Background
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import instantiated, resolved, settings_of, settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.runner import StudyRunner, refuse_several_processes
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.rero.page import write_page
from lit_recon.experiments.rero.score import CellEvaluator, figures, write_record
from lit_recon.experiments.rero.settings import ReroSettings, rero_cells
from lit_recon.modules.loggers import build_loggers, finish
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar, write_metrics
from lit_recon.training.trainer import build_trainer, configure_process

#: Settings that may change between two calls on one folder: finished cells are kept, new ones are run.
_GROWS = ("budget.epsilons", "budget.without", "prior", "sampled", "test_images", "cache", "shard_size")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Bounds on reconstruction under differential privacy, and attacks beside them.")
    settings.add_class_arguments(ReroSettings, as_group=False)
    settings.add_class_arguments(ShadowSettings, as_group=False)
    settings.add_class_arguments(ClusterSettings, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, run the cells without results, and write the page."""
    complete, config = resolved(arguments, values, "rero")
    built = instantiated(arguments, complete)
    settings, shadows = settings_of(ReroSettings, built), settings_of(ShadowSettings, built)
    cluster = settings_of(ClusterSettings, built)
    configure_process(shadows.trainer)
    settings.check_shadows(shadows)
    refuse_several_processes(arguments.prog, shadows.trainer)
    cluster.check()
    settings.wandb.resolved_mode()
    split, own, path = shadows.drawn(), yaml.safe_load(config), Path(complete.out)
    cells = rero_cells(settings.budget, own)
    planned = [cell.shadows() for cell in cells]
    for cell, each in zip(cells, planned, strict=True):
        try:
            settings.reconstructor.bind(Background(each.plan(split)))
        except LitReconError as error:
            raise ConfigError(f"{cell.title}: {error}") from error
    study = StudyRunner([cell.piece for cell in cells], path)
    study.open(config, settings.overwrite, _GROWS)
    folder = study.folder
    print(f"study       {study.progress()}; {shadows.split.shadow} shadow models in each")
    print(f"run folder  {path}", flush=True)
    started = time.perf_counter()
    with cluster.executor(folder, shadows.trainer.threads, shadows.trainer.accelerator) as executor:
        study.require(study.run(executor))
    trainer = build_trainer(shadows.trainer, loggers=[])
    judge = CellEvaluator(settings, shadows, split, folder)
    for caveat in sorted({prior.baseline.caveat for prior in judge.priors} - {""}):
        print(f"caveat      {caveat}")
    measured = [
        judge.measure(cell, plan, RunFolder(path / cell.folder), trainer)
        for cell, plan in zip(cells, planned, strict=True)
    ]
    record = judge.record(measured)
    write_record(folder, record)
    metrics = figures(record)
    loggers = build_loggers(folder.logs, str(complete.name), settings.wandb, own)
    for logger in loggers:
        logger.log_metrics({key: value for key, value in metrics.items() if isinstance(value, float)}, 0)
    finish(loggers)
    facts: dict[str, Scalar] = {"split_hash": split.hash, "n_fixed": len(split.fixed), "n_shadow": len(split.shadow)}
    write_metrics(folder, {**metrics, **facts, "seconds": time.perf_counter() - started, **environment()})
    write_page(path)
    print(
        f"bounds      attack below the bound in {metrics['comparisons_below']} of {metrics['comparisons']} comparisons"
    )
    print(f"report      {folder.report}")
