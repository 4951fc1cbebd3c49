"""`attack.py bounds`: attacks on two-layer networks, compared with lower bounds on the error of any attack."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from jsonargparse import ArgumentParser, Namespace

from lit_recon import bounds as theory
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.pieces import Piece
from lit_recon.experiments.engine.runner import StudyRunner
from lit_recon.experiments.two_layer.cell import drawn_instance, measured, require_bounds
from lit_recon.experiments.two_layer.page import write_page
from lit_recon.experiments.two_layer.results import Study
from lit_recon.experiments.two_layer.settings import TwoLayerCell, TwoLayerSettings, build_cells
from lit_recon.io.files import write_text
from lit_recon.modules.loggers import finish, log_grid, log_numbers
from lit_recon.noisy_release import norm_of
from lit_recon.privacy import gaussian_mu
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.writing import write_metrics
from lit_recon.training.trainer import TrainerSettings

#: Name of a cell's file in its folder.
_CELL = "cell.json"


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    purpose = "Compare attacks on two-layer networks with bounds on the error of any attack."
    return settings_parser(program, purpose, TwoLayerSettings, ClusterSettings)


@dataclass(frozen=True)
class TwoLayerCellRun:
    """The work of a cell of a study."""

    settings: TwoLayerSettings
    cell: TwoLayerCell

    @property
    def piece(self) -> Piece:
        """The piece of the study."""
        return Piece(f"cells/{self.cell.name}", self.cell.describe(), self, results=(_CELL,))

    def __call__(self, folder: Path) -> str:
        """Measure the cell; the largest bound that holds for unbiased attacks in words."""
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        found = measured(self.settings, self.cell)
        write_text(folder / _CELL, json.dumps(found, indent=2))
        return f"bound {fmean(found['bounds']['exact']):.3g}"


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Run the cells without results, and write the page."""
    call = Call(arguments, values, "bounds")
    settings, cluster = call.settings(TwoLayerSettings), call.settings(ClusterSettings)
    cluster.check(arguments.prog)
    require_bounds(settings)
    path, cells = call.folder.path, build_cells(settings, call.own)
    study = StudyRunner([TwoLayerCellRun(settings, cell).piece for cell in cells], path)
    grows = ("sweeps", "defenses", "epsilons", "delta", "threads")
    study.open(call.config, settings.overwrite, grows)
    print(f"study       {study.progress()}; {settings.repeats} draws in each")
    study.require(cluster.run(study, TrainerSettings("cpu", threads=settings.threads)))
    write_text(path / "study.json", json.dumps(_description(settings, cells), indent=2))
    found, page = Study.read(path), write_page(path)
    record, loggers = found.record(), call.loggers()
    log_numbers(loggers, record)
    log_grid(loggers, "rates", (study.folder.figures / "rates.png").read_bytes(), 0)
    finish(loggers)
    write_metrics(study.folder, {**record, **environment()})
    print("\n".join(found.summary()))
    print(f"report      {page}")


def _description(settings: TwoLayerSettings, cells: Sequence[TwoLayerCell]) -> dict[str, object]:
    """Information for the page beyond the cells."""
    return {
        "cells": [f"{cell.name}/{_CELL}" for cell in cells],
        "base": cells[0].identity(),
        "attacks": {name: attack.title or name for name, attack in settings.attacks.items()},
        "moments": [name for name, attack in settings.attacks.items() if attack.recovery.by_moments],
        "defenses": {
            name: {"title": family.title or name, "rate": family.rate, "at": family.at}
            for name, family in settings.defenses.items()
        },
        "privacy": _privacy(settings, cells[0]),
        "delta": settings.delta,
    }


def _privacy(settings: TwoLayerSettings, base: TwoLayerCell) -> list[dict[str, float]]:
    """Noise that makes the base network's gradient differentially private, and bounds under it; squared loss only."""
    if settings.loss != "squared":
        return []
    instance = drawn_instance(settings, base, torch.Generator().manual_seed(settings.seed))
    # GELU's slope is at most 1.129, all other activations' at most 1
    sensitivity = theory.replacement_sensitivity(instance.net, 1.13 if settings.activation == "gelu" else 1.0)
    jacobian = theory.TwoLayerJacobian(instance.net, instance.inputs, instance.targets)
    norm, size = float(norm_of(jacobian.update)), sum(value.numel() for value in jacobian.update.values())
    rows = []
    for epsilon in settings.epsilons:
        noise = sensitivity / gaussian_mu(epsilon, settings.delta)
        found = theory.cramer_rao(theory.fisher_information(jacobian, theory.NoisyRelease(noise)))
        rows.append(
            {
                "epsilon": epsilon,
                "sensitivity": sensitivity,
                "noise_moments": theory.moments_noise(sensitivity, epsilon, settings.delta),
                "noise": noise,
                "noise_over_gradient": noise * size**0.5 / norm,
                "bound": (found.squared / base.sizes.batch) ** 0.5,
            }
        )
    return rows
