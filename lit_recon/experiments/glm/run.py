"""`reconn.py glm`: train a generalized linear model, and reconstruct each of several records from all others."""

from __future__ import annotations

import time

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.glm.training import Regression, attack_record
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import SAME_RUN, settings_parser
from lit_recon.experiments.glm.page import BESIDE
from lit_recon.experiments.glm.score import AttackedModel, write_glm
from lit_recon.experiments.glm.settings import GlmSettings
from lit_recon.modules.loggers import finish, log_numbers
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    return settings_parser(
        program, "Reconstruct records of generalized linear models by their closed form.", GlmSettings
    )


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Check the settings, then train, attack, score and report."""
    call = Call(arguments, values, "glm")
    settings = call.settings(GlmSettings)
    split = settings.split.drawn(settings.data)
    settings.check_classes(np.concatenate([settings.records(part)[1] for part in (split.targets, split.fixed)]))
    folder = RunFolder.open(call.folder.path, call.config, settings.overwrite, SAME_RUN, more=(BESIDE,))
    print(f"records     {settings.split.records} images of {split.targets.name.rsplit(' ', 1)[0]}")
    print(f"targets     {len(split.targets)} of them, each attacked by an adversary who knows all others")
    print(f"run folder  {folder.path}", flush=True)
    loggers = call.loggers()
    started = time.perf_counter()
    models, facts = {}, dict[str, Scalar]()
    for name, regression in settings.models.items():
        models[name], seconds = attacked(settings, split, regression)
        facts |= {f"{name}.{key}" if name else key: value for key, value in seconds.items()}
        print(_line(name or "attacked", models[name]), flush=True)
    facts |= {
        "split_hash": split.hash,
        "pool": settings.split.pool,
        "n_records": settings.split.records,
        "n_inputs": models[""].truth.shape[1],
        "seconds": time.perf_counter() - started,
        **environment(),
    }
    log_numbers(loggers, write_glm(folder, settings, split, models, facts))
    finish(loggers)
    print(f"report      {folder.report}")


def attacked(
    settings: GlmSettings, split: InformedSplit, regression: Regression
) -> tuple[AttackedModel, dict[str, float]]:
    """One model, trained on all records, with an attack on each target; and what both took."""
    own, targets = settings.records(split.targets)
    others, other_targets = settings.records(split.fixed)
    inputs, values = np.concatenate([own, others]), np.concatenate([targets, other_targets])
    clock = time.perf_counter()
    fitted = regression.fit(inputs, values)
    seconds = {"seconds_to_fit": time.perf_counter() - clock}
    attempts, total, n, clock = [], inputs.sum(axis=0), len(inputs), time.perf_counter()
    for index, target in enumerate(targets):
        known = np.arange(n) != index
        attempts.append(attack_record(fitted.released, inputs[known], values[known], float(target)))
    seconds["seconds_per_attack"] = (time.perf_counter() - clock) / len(targets)
    means = (total - own) / (n - 1)
    score = fitted.score(*settings.records(split.shadow))
    return AttackedModel(regression, fitted, attempts, own, targets, means, score), seconds


def _line(name: str, model: AttackedModel) -> str:
    """The errors in one line."""
    metrics = model.metrics()
    if metrics["refused"] == len(model.attempts):
        return f"{name:<11} refused for all targets: the model interpolates them"
    return (
        f"{name:<11} largest error of a pixel: median {metrics['max_error_median']:.1e}, "
        f"worst {metrics['max_error_worst']:.1e}; below 1e-6 for {metrics['exact_share']:.0%}"
    )
