"""`reconn.py run`: reconstruct the one unknown training image of each of many released models."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.shadow import ShadowStore, deltas, load_released
from lit_recon.errors import ConfigError
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import SAME_RUN, settings_parser
from lit_recon.experiments.released_attack.score import (
    classifier_of,
    model_facts,
    score_targets,
    shown_mse,
    write_reconn,
)
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.experiments.train.shadows import announce, store_folder
from lit_recon.modules.loggers import finish, log_numbers
from lit_recon.modules.shadows import train_store
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.stopwatch import Stopwatch
from lit_recon.reporting.writing import Scalar
from lit_recon.training.trainer import build_trainer, configure_process, is_first_process

#: Settings that change how a run is computed, not what it computes.
_SAME_RUN = (*SAME_RUN, "store", "cache", "shard_size", "classifier")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    purpose = "Reconstruct the one unknown training image of released models."
    return settings_parser(program, purpose, ReconnSettings, ShadowSettings)


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, train the missing models, attack, score and report."""
    call = Call(arguments, values, "reconn")
    settings, shadows, folder = call.settings(ReconnSettings), call.settings(ShadowSettings), call.folder
    configure_process(shadows.trainer)
    outside = [k for k in settings.curve if not 2 <= k <= shadows.split.shadow]
    if outside:
        most = shadows.split.shadow
        raise ConfigError(f"curve must hold numbers of shadow models from 2 to split.shadow={most}; got {outside}")
    split = shadows.drawn()
    trainer = build_trainer(shadows.trainer, loggers=[], float64=True)
    device = str(trainer.strategy.root_device)
    plan = shadows.plan(split, device)
    described, released = model_facts(settings, shadows, split, plan, split.shadow), None
    if settings.released is not None:
        steps = 1 + len(shadows.descent.snapshots)
        released = load_released(settings.released, plan.network, len(split.targets), steps)
    models = shadows.shadow_models(plan, split)
    stored = store_folder(shadows, models, split.shadow)
    settings = settings.bind(plan, len(split.shadow), folder.checkpoints / "reconstructor")
    classifier_of(settings.classifier, split.targets)
    begun = stored.exists()
    kept = ShadowStore.open(stored, models.description)
    if kept is not None:
        kept.check(split.shadow)
    if is_first_process():
        RunFolder.open(folder.path, call.config, settings.overwrite, _SAME_RUN)
        announce(stored, models, len(split.shadow))
        print(f"targets     {len(split.targets)} released models, each with one unknown image")
        print(f"run folder  {folder.path}", flush=True)
    elif not settings.overwrite:
        folder.refuse_finished()
    loggers = call.loggers()
    with Stopwatch(folder, is_first_process()) as watch:
        started = time.perf_counter()
        store = train_store(trainer, models, split.shadow, stored, shadows.execution, shadows.shard_size)
        trained = time.perf_counter() - started
        owners, there = plan.for_purpose("released"), folder.checkpoints / "released"
        observed = None if released is None else deltas(released, plan.reference())
        if observed is None:
            own = train_store(
                trainer, owners, split.targets, there, store.execution, store.shard_size, "released models"
            )
            observed = own.read(split.targets) if is_first_process() else torch.empty(0)
        if is_first_process():
            feature_map = settings.access.feature_map(plan, split.shadow)
            features = feature_map(observed)
            facts: dict[str, Scalar] = {
                **described,
                "execution": store.execution,
                "processes": trainer.world_size,
                "shadow_seconds": None if begun else trained,
                **({"shadow_seconds_reason": "shadow models of an earlier process were used"} if begun else {}),
                "n_features": features.shape[1],
            }
            outcome = score_targets(settings, split, store.read(split.shadow, feature_map), features)
            facts |= models.facts(stored, len(split.shadow))
            outcome.notes.extend(models.notes(stored, len(split.shadow)))
            log_numbers(loggers, outcome.metrics)
            finish(loggers)
            facts |= {"seconds": watch.seconds, **environment(device)}
            write_reconn(folder, split, outcome, facts)
            print(_summary(outcome.metrics))
            print(f"report      {folder.report}")


def _summary(metrics: Mapping[str, Scalar]) -> str:
    """The main metrics as one line."""
    shown = [shown_mse(metrics[key]) for key in ("mse", "oracle_mse", "baseline_mean_image_mse")]
    certified = metrics.get("certified_rate")
    told = f"; the attack certifies {certified:.1%}" if isinstance(certified, float) else ""
    return f"MSE         {shown[0]} (nearest of all other images {shown[1]}, mean image {shown[2]}){told}"
