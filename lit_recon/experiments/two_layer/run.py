"""`attack.py bounds`: attacks on two-layer networks against the bounds that no attack can beat, and their rates."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import lit_recon._torchvision

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.updates.features import MomentRecovery
from lit_recon.bounds import (
    GaussianRelease,
    TwoLayerJacobian,
    cramer_rao,
    fisher_information,
    moments_noise,
)
from lit_recon.bounds.two_layer import replacement_sensitivity
from lit_recon.experiments.configuration import SAME_RUN, instantiated, resolved, settings_parser
from lit_recon.experiments.engine.pieces import alone
from lit_recon.experiments.two_layer.cell import drawn_instance, measured
from lit_recon.experiments.two_layer.page import write_page
from lit_recon.experiments.two_layer.results import Study
from lit_recon.experiments.two_layer.settings import TwoLayerCell, TwoLayerSettings, build_cells
from lit_recon.io.files import write_text
from lit_recon.modules.loggers import build_loggers, finish, log_grid
from lit_recon.privacy import gaussian_mu
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import GridFolder
from lit_recon.reporting.wording import duration
from lit_recon.reporting.writing import write_metrics

#: What may change between two calls on one folder: cells that stay are kept, new ones are run.
_GROWS = ("sweeps", "defenses", "epsilons", "delta", "threads")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Hold attacks on two-layer networks against the bounds for them.")
    settings.add_class_arguments(TwoLayerSettings, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Run the cells that have not been run, and write the page about all of them."""
    complete, config = resolved(arguments, values, "bounds")
    settings = TwoLayerSettings(**instantiated(arguments, complete))
    settings.wandb.resolved_mode()
    own = yaml.safe_load(config)
    cells = build_cells(settings, own)
    folder = GridFolder(Path(complete.out))
    unfinished = any(not _path(folder, cell).is_file() for cell in cells)
    GridFolder.open(folder.path, config, settings.overwrite, (*SAME_RUN, *_GROWS), reopen=unfinished)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    done = sum(_path(folder, cell).is_file() for cell in cells)
    print(f"study       {len(cells)} cells of {settings.repeats} draws, {done} cells done")
    print(f"run folder  {folder.path}", flush=True)
    for wait in (False, True):
        _run(settings, cells, folder, wait)
    write_text(folder.path / "study.json", json.dumps(_description(settings, cells), indent=2))
    study, page = Study.read(folder.path), write_page(folder.path)
    record = study.record()
    loggers = build_loggers(folder.run.logs, str(complete.name), settings.wandb, own)
    for logger in loggers:
        logger.log_metrics({key: value for key, value in record.items() if isinstance(value, float)}, 0)
    log_grid(loggers, "rates", (folder.figures / "rates.png").read_bytes(), 0)
    finish(loggers)
    write_metrics(folder.run, {**record, **environment()})
    print("\n".join(study.summary()))
    print(f"report      {page}")


def _path(folder: GridFolder, cell: TwoLayerCell) -> Path:
    return folder.path / "cells" / f"{cell.name}.json"


def _run(settings: TwoLayerSettings, cells: Sequence[TwoLayerCell], folder: GridFolder, wait: bool) -> None:
    """Every cell that has no file, each by one process at a time; `wait` for those that another one is running."""
    for number, cell in enumerate(cells, start=1):
        path = _path(folder, cell)
        if path.is_file():
            continue

        def work(cell: TwoLayerCell = cell, path: Path = path, title: str = f"[{number}/{len(cells)}]") -> None:
            if path.is_file():
                return
            clock = time.perf_counter()
            write_text(path, json.dumps(measured(settings, cell), indent=2))
            print(f"{title} {cell.describe()} ({duration(time.perf_counter() - clock)})", flush=True)

        alone(folder.lock(cell.name), wait, work)


def _description(settings: TwoLayerSettings, cells: Sequence[TwoLayerCell]) -> dict[str, object]:
    """What the page cannot read off the cells."""
    return {
        "cells": [f"{cell.name}.json" for cell in cells],
        "base": cells[0].identity(),
        "attacks": {name: attack.title or name for name, attack in settings.attacks.items()},
        "moments": [name for name, attack in settings.attacks.items() if isinstance(attack.recovery, MomentRecovery)],
        "defenses": {
            name: {"title": family.title or name, "rate": family.rate, "at": family.at}
            for name, family in settings.defenses.items()
        },
        "privacy": _privacy(settings, cells[0]),
        "delta": settings.delta,
    }


def _privacy(settings: TwoLayerSettings, base: TwoLayerCell) -> list[dict[str, float]]:
    """The noise that hides one example of the base network's batch, and what is left then; squared loss only."""
    if settings.loss != "squared":
        return []
    instance = drawn_instance(settings, base, torch.Generator().manual_seed(settings.seed))
    # GELU's slope is at most 1.129, all other activations' at most 1
    sensitivity = replacement_sensitivity(instance.net, 1.13 if settings.activation == "gelu" else 1.0)
    jacobian = TwoLayerJacobian(instance.net, instance.inputs, instance.targets)
    norm = sum(float(value.square().sum()) for value in jacobian.update.values()) ** 0.5
    size = sum(value.numel() for value in jacobian.update.values())
    rows = []
    for epsilon in settings.epsilons:
        noise = sensitivity / gaussian_mu(epsilon, settings.delta)
        found = cramer_rao(fisher_information(jacobian, GaussianRelease(noise)))
        rows.append(
            {
                "epsilon": epsilon,
                "sensitivity": sensitivity,
                "noise_moments": moments_noise(sensitivity, epsilon, settings.delta),
                "noise": noise,
                "noise_over_gradient": noise * size**0.5 / norm,
                "bound": (found.squared / base.sizes.batch) ** 0.5,
            }
        )
    return rows
