"""`reconn.py membership`: infer which of two candidates each of many released models was trained on."""

from __future__ import annotations

import dataclasses
from typing import get_args

from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.membership import MembershipGames
from lit_recon.attacks.shadow import Initialization
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import SAME_RUN, settings_parser
from lit_recon.experiments.membership.page import FILES
from lit_recon.experiments.membership.score import MembershipExperiment, write_membership
from lit_recon.experiments.membership.settings import MembershipSettings
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.modules.loggers import finish, log_numbers
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.stopwatch import Stopwatch
from lit_recon.reporting.writing import Scalar
from lit_recon.training.trainer import build_trainer, configure_process, is_first_process

#: Settings of shadow models that this command sets itself: it plays both kinds of initial weights with exact models,
#: kept in the run folder.
_NOT_SET = {"initialization", "store", "cache", "shadows", "linear"}


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(
        program, "Infer which of two candidates a released model was trained on.", MembershipSettings
    )
    settings.add_class_arguments(ShadowSettings, as_group=False, skip=_NOT_SET)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, then train the models that are missing, score all attacks and report."""
    call = Call(arguments, values, "membership")
    settings, shadows, folder = call.settings(MembershipSettings), call.settings(ShadowSettings), call.folder
    configure_process(shadows.trainer)
    shadows.check_final_models("reconn.py membership")
    split = shadows.drawn()
    games = MembershipGames.draw(split.targets, shadows.split.seed)
    settings.check_games(games.bits.tolist())
    trainer = build_trainer(shadows.trainer, loggers=[], float64=True)
    device = str(trainer.strategy.root_device)
    plan = shadows.plan(split, device)
    plans = {kind: dataclasses.replace(plan, initialization=kind) for kind in get_args(Initialization)}
    experiment = MembershipExperiment(trainer, settings, shadows, split, games, folder)
    for each in plans.values():
        experiment.reconstructor(each)
    if is_first_process():
        RunFolder.open(folder.path, call.config, settings.overwrite, (*SAME_RUN, "shard_size"), more=FILES)
        print(f"games       {len(games.bits)} released models, each trained on one of two candidates")
        print(f"run folder  {folder.path}", flush=True)
    elif not settings.overwrite:
        folder.refuse_finished()
    loggers = call.loggers()
    with Stopwatch(folder, is_first_process()) as watch:
        played = {kind: found for kind, each in plans.items() if (found := experiment.play(each)) is not None}
        if is_first_process():
            facts: dict[str, Scalar] = {**shadows.facts(split), **shadows.privacy(), "processes": trainer.world_size}
            facts |= {"seconds": watch.seconds, **environment(device)}
            metrics = write_membership(folder, settings, split, games, played, shadows.descent, facts)
            log_numbers(loggers, metrics)
            finish(loggers)
            for kind, one in played.items():
                shown = ", ".join(f"{name} {metrics[f'{kind}.{name}.auc']:.3f}" for name in one.scores)
                print(f"{kind:<11} AUC: {shown}")
            print(f"report      {folder.report}")
