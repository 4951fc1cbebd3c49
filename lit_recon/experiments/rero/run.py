"""`reconn.py rero`: how far differential privacy protects from reconstruction, and how far attacks really come."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import lit_recon._torchvision

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.released.base import Background
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import SAME_RUN, instantiated, resolved, settings_of, settings_parser
from lit_recon.experiments.released_attack import run as reconn_run
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.rero.cells import rero_cells, run_cell
from lit_recon.experiments.rero.page import write_page
from lit_recon.experiments.rero.panels import RECORD, TABLE
from lit_recon.experiments.rero.score import CellEvaluator, figures, write_record
from lit_recon.experiments.rero.settings import ReroSettings
from lit_recon.modules.loggers import build_loggers, finish
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import duration
from lit_recon.reporting.writing import Scalar, write_metrics
from lit_recon.training.trainer import build_trainer, configure_process

#: What may change between two calls on one folder: finished cells are kept, new ones are run.
_GROWS = ("budget.epsilons", "budget.without", "prior", "sampled", "test_images", "cache", "shard_size")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Bounds on reconstruction under differential privacy, and attacks beside them.")
    settings.add_class_arguments(ReroSettings, as_group=False)
    settings.add_class_arguments(ShadowSettings, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Refuse what cannot work, then run the cells that have not been run, and write the page about all of them."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("reconn.py rero runs in one process; start it without torchrun")
    complete, config = resolved(arguments, values, "rero")
    built = instantiated(arguments, complete)
    settings, shadows = settings_of(ReroSettings, built), settings_of(ShadowSettings, built)
    configure_process(shadows.trainer)
    settings.check_shadows(shadows)
    settings.wandb.resolved_mode()
    split, own = shadows.drawn(), yaml.safe_load(config)
    cells, attack = rero_cells(settings.budget, own), reconn_run.parser("reconn.py run")
    planned = [cell.shadows(attack) for cell in cells]
    for cell, each in zip(cells, planned, strict=True):
        try:
            settings.reconstructor.bind(Background(each.plan(split)))
        except LitReconError as error:
            raise ConfigError(f"{cell.title}: {error}") from error
    path = Path(complete.out)
    unfinished = not all(RunFolder(path / cell.folder).is_complete for cell in cells)
    ignored = (*SAME_RUN, *_GROWS)
    folder = RunFolder.open(path, config, settings.overwrite, ignored, unfinished, ("cells", RECORD, TABLE))
    done = sum(RunFolder(path / cell.folder).is_complete for cell in cells)
    print(f"cells       {len(cells)}, {done} of them done; {shadows.split.shadow} shadow models in each")
    print(f"run folder  {folder.path}", flush=True)
    started = time.perf_counter()
    trainer = build_trainer(shadows.trainer, loggers=[])
    judge = CellEvaluator(settings, shadows, split, folder)
    for caveat in sorted({prior.baseline.caveat for prior in judge.priors} - {""}):
        print(f"caveat      {caveat}")
    measured = []
    for number, (cell, plan) in enumerate(zip(cells, planned, strict=True), start=1):
        clock = time.perf_counter()
        found = judge.measure(cell, plan, run_cell(cell, attack, folder), trainer)
        measured.append(found)
        print(f"[{number}/{len(cells)}] {_line(found)} ({duration(time.perf_counter() - clock)})", flush=True)
    record = judge.record(measured)
    write_record(folder, record)
    metrics = figures(record)
    loggers = build_loggers(folder.logs, str(complete.name), settings.wandb, own)
    for logger in loggers:
        logger.log_metrics({key: value for key, value in metrics.items() if isinstance(value, float)}, 0)
    finish(loggers)
    facts: dict[str, Scalar] = {"split_hash": split.hash, "n_fixed": len(split.fixed), "n_shadow": len(split.shadow)}
    write_metrics(folder, {**metrics, **facts, "seconds": time.perf_counter() - started, **environment()})
    write_page(folder.path)
    print(
        f"bounds      attack below the bound in {metrics['comparisons_below']} of {metrics['comparisons']} comparisons"
    )
    print(f"report      {folder.report}")


def _line(found: dict[str, object]) -> str:
    """The figures of one cell."""
    mse, mean, accuracy = (found[key] for key in ("mse", "baseline_mean_image_mse", "accuracy"))
    if not isinstance(mse, float) or not isinstance(mean, float) or not isinstance(accuracy, float):
        mse = mean = accuracy = math.nan
    return f"{found['title']}: MSE {mse:.4f} (mean image {mean:.4f}), accuracy {accuracy:.1%}"
