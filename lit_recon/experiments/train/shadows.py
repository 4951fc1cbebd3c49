"""`train.py shadows`: train and store the shadow models of an adversary who knows all training data but one image."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.shadow import Plan, ShadowStore
from lit_recon.data import ImageSet
from lit_recon.data.splits import content_hash
from lit_recon.experiments.configuration import instantiated, settings_of, settings_parser
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.modules.shadows import train_store
from lit_recon.training.trainer import build_trainer, configure_process, is_first_process


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    return settings_parser(program, "Train shadow models, or resume their training.", ShadowSettings)


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, then train the models that are missing."""
    settings = settings_of(ShadowSettings, instantiated(arguments, values))
    configure_process(settings.trainer)
    split = settings.drawn()
    trainer = build_trainer(settings.trainer, loggers=[], float64=True)
    plan = settings.shadow_models(settings.plan(split, str(trainer.strategy.root_device)), split)
    folder = store_folder(settings, plan, split.shadow)
    if is_first_process():
        announce(folder, plan, len(split.shadow))
    store = train_store(trainer, plan, split.shadow, folder, settings.execution, settings.shard_size)
    if is_first_process():
        for note in plan.notes(folder, len(split.shadow)):
            print(f"note        {note}")
        print(f"done        {len(split.shadow)} shadow models in {store.folder}, trained by {store.execution}")


def store_folder(settings: ShadowSettings, plan: Plan, shadow: ImageSet) -> Path:
    """The folder of a plan's models of shadow images: the given one, or one in the cache named by a hash.

    The first shadow image is part of the hash: it does not depend on the number of shadow images, but on all else.
    """
    if settings.store is not None:
        return settings.store
    drawn = {"targets": settings.split.targets, "first": content_hash(shadow.subset(torch.tensor([0])))}
    key = hashlib.sha256(json.dumps({**plan.description, **drawn}, sort_keys=True).encode()).hexdigest()[:16]
    return settings.cache / key


def announce(folder: Path, plan: Plan, n: int) -> None:
    """Print how many models there are and how many have to be trained; errors as for `ShadowStore.open`."""
    store = ShadowStore.open(folder, plan.description)
    missing = n if store is None else sum(len(store.members(shard, n)) for shard in store.missing(n))
    print(f"fixed set   {len(plan.fixed)} images of {plan.fixed.name}")
    print(f"shadows     {n} models, {missing} of them to be trained, kept in {folder}", flush=True)
