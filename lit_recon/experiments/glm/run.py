"""`reconn.py glm`: train a generalized linear model, and reconstruct each of several records from all others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import lit_recon._torchvision

import numpy as np
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.glm.training import Regression, attack_record
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.experiments.configuration import (
    SAME_RUN,
    instantiated,
    resolved,
    settings_of,
    settings_parser,
)
from lit_recon.experiments.glm.page import BESIDE
from lit_recon.experiments.glm.score import AttackedModel, write_glm
from lit_recon.experiments.glm.settings import GlmSettings
from lit_recon.modules.loggers import build_loggers, finish
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Reconstruct records of generalized linear models by their closed form.")
    settings.add_class_arguments(GlmSettings, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Check the settings, then train, attack, score and report."""
    complete, config = resolved(arguments, values, "glm")
    settings = settings_of(GlmSettings, instantiated(arguments, complete))
    split = settings.split.drawn(settings.data)
    settings.check_classes(np.concatenate([settings.records(part)[1] for part in (split.targets, split.fixed)]))
    settings.wandb.resolved_mode()
    folder = RunFolder.open(Path(complete.out), config, settings.overwrite, SAME_RUN, more=(BESIDE,))
    print(f"records     {settings.split.records} images of {split.targets.name.rsplit(' ', 1)[0]}")
    print(f"targets     {len(split.targets)} of them, each attacked by an adversary who knows all others")
    print(f"run folder  {folder.path}", flush=True)
    loggers = build_loggers(folder.logs, str(complete.name), settings.wandb, yaml.safe_load(config))
    started = time.perf_counter()
    models, facts = {}, dict[str, Scalar]()
    for name, regression in settings.models.items():
        prefix = f"{name}." if name else ""
        models[name] = attacked(settings, split, regression, facts, prefix)
        print(_line(name or "attacked", models[name]), flush=True)
    facts |= {
        "split_hash": split.hash,
        "n_records": settings.split.records,
        "n_inputs": models[""].truth.shape[1],
        "seconds": time.perf_counter() - started,
        **environment(),
    }
    metrics = write_glm(folder, settings, split, models, facts)
    numbers = {key: value for key, value in metrics.items() if isinstance(value, float)}
    for logger in loggers:
        logger.log_metrics(numbers, 0)
    finish(loggers)
    print(f"report      {folder.report}")


def attacked(
    settings: GlmSettings, split: InformedSplit, regression: Regression, facts: dict[str, Scalar], prefix: str
) -> AttackedModel:
    """Train one model on all records and attack each target; the times are added to `facts`."""
    own, targets = settings.records(split.targets)
    others, other_targets = settings.records(split.fixed)
    inputs, values = np.concatenate([own, others]), np.concatenate([targets, other_targets])
    clock = time.perf_counter()
    fitted = regression.fit(inputs, values)
    facts[f"{prefix}seconds_to_fit"] = time.perf_counter() - clock
    attempts, total, n, clock = [], inputs.sum(axis=0), len(inputs), time.perf_counter()
    for index, target in enumerate(targets):
        known = np.arange(n) != index
        attempts.append(attack_record(fitted.released, inputs[known], values[known], float(target)))
    facts[f"{prefix}seconds_per_attack"] = (time.perf_counter() - clock) / len(targets)
    means = (total - own) / (n - 1)
    score = fitted.score(*settings.records(split.shadow))
    return AttackedModel(regression, fitted, attempts, own, targets, means, score)


def _line(name: str, model: AttackedModel) -> str:
    """The errors in one line."""
    metrics: Mapping[str, Scalar] = model.metrics()
    if metrics["refused"] == len(model.attempts):
        return f"{name:<11} refused for all targets: the model interpolates them"
    return (
        f"{name:<11} largest error of a pixel: median {metrics['max_error_median']:.1e}, "
        f"worst {metrics['max_error_worst']:.1e}; below 1e-6 for {metrics['exact_share']:.0%}"
    )
