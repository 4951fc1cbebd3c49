"""`attack.py run`: attack the updates of simulated clients, and leave behind all that there is to know about it."""

from __future__ import annotations

from pathlib import Path

import lit_recon._torchvision

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import FirstApplicable, GenerativePrior, GradientMatching
from lit_recon.data.dataset import fingerprints
from lit_recon.errors import ConfigError
from lit_recon.experiments.configuration import SAME_RUN, instantiated, resolved, settings_parser
from lit_recon.experiments.settings import AttackSettings, LpipsSettings
from lit_recon.experiments.update_attack.score import all_scored, run_facts, show_outcome, write_outcome
from lit_recon.experiments.victim_model import VictimModel, find_target
from lit_recon.metrics import Lpips, Unavailable, load_lpips
from lit_recon.models import Backbone, BackboneCheckpoint
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.loggers import build_loggers, finish
from lit_recon.modules.update_attack import UpdateAttackModule
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar
from lit_recon.training.trainer import build_trainer, check_trainer, configure_process, is_first_process


def refuse_known_victims(attack: Attack, victims: VictimDataModule) -> None:
    """Compare the victims, image by image, with what the attack's generator was trained on.

    A user's own generator does not tell; its user has to know.

    Raises:
        ConfigError: the generator has seen a victim.
    """
    if isinstance(attack, FirstApplicable):
        for one in attack.attacks:
            refuse_known_victims(one, victims)
        return
    prior = attack.parametrization if isinstance(attack, GradientMatching) else None
    if not isinstance(prior, GenerativePrior) or prior.seen is None:
        return
    ids = torch.cat(victims.batches)
    known = ids[torch.isin(fingerprints(victims.test.subset(ids)), prior.seen)]
    if len(known):
        raise ConfigError(
            f"{prior.checkpoint} was trained on {len(known)} of the {len(ids)} victims (image {int(known[0])} of "
            f"{victims.test.name} for one), so it would remember instead of reconstruct: train a generator on the "
            "public images of the same split, or choose other victims by victims.seed"
        )


#: Public images that a malicious server measures.
_PUBLIC_FOR_SERVER = 4096


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Attack the updates of simulated clients.")
    settings.add_class_arguments(AttackSettings, as_group=False)
    settings.set_defaults(attack={"class_path": "lit_recon.attacks.updates.GradientMatching"})
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Refuse what cannot work, then train what has to be trained, attack, score and report."""
    complete, config = resolved(arguments, values, values.attack.class_path.rpartition(".")[2])
    settings = AttackSettings(**instantiated(arguments, complete))
    configure_process(settings.trainer)
    victims = victim_data(settings)
    lpips = _lpips(settings.lpips)
    target = find_target(settings.backbone, victims, settings.seed)
    rehearse(settings, target, victims)
    settings.wandb.resolved_mode()
    check_trainer(settings.trainer)
    folder = RunFolder(Path(complete.out))
    if is_first_process():
        RunFolder.open(folder.path, config, settings.overwrite, SAME_RUN)
        _announce(target, victims, folder)
    checkpoint = target.trained(settings.trainer)
    loggers = build_loggers(folder.logs, str(complete.name), settings.wandb, yaml.safe_load(config))
    module = UpdateAttackModule(
        settings.attack,
        sent_out(settings, checkpoint.model, victims),
        settings.client,
        settings.defense,
        settings.knowledge,
        folder.checkpoints,
        lpips,
        settings.clients_per_batch,
        settings.save_every_seconds,
    )
    trainer = build_trainer(settings.trainer, loggers)
    trainer.test(module, datamodule=victims, verbose=False)
    trainer.strategy.barrier("all victims are done")
    if is_first_process():
        scored = all_scored(module, victims, folder)
        facts = run_facts(scored, str(trainer.strategy.root_device))
        metrics = {**module.metrics, **facts, "seed": settings.seed, **_about(target, checkpoint, module)}
        show_outcome(loggers, scored)
        finish(loggers)
        write_outcome(folder, scored, metrics, victims.class_names)
        print(_summary(metrics))
        print(f"report      {folder.report}")


def victim_data(settings: AttackSettings) -> VictimDataModule:
    """The clients' images, and those that everybody has."""
    chosen = settings.victims
    return VictimDataModule(
        settings.data, chosen.n, chosen.batch_size, chosen.distinct_labels, chosen.seed, chosen.n_public
    )


def _lpips(settings: LpipsSettings) -> Lpips | Unavailable:
    if settings.network == "none":
        return Unavailable("switched off by lpips.network")
    return load_lpips(settings.network, settings.weights, settings.download)


def rehearse(settings: AttackSettings, target: VictimModel, victims: VictimDataModule) -> None:
    """Set the attack up on the first victim, so that what it cannot work on is refused before anything is trained.

    Raises:
        LitReconError: the model, the client, its defense and the attack do not go together.
    """
    refuse_known_victims(settings.attack, victims)
    ids = victims.batches[0]
    client = settings.client.client(sent_out(settings, target.model, victims), settings.defense)
    seen = client.observe(victims.test.pixels(ids), victims.test.labels[ids], settings.knowledge)
    settings.attack.check([seen])
    # an attack that may make way decides by the updates themselves, which those of an untrained model do not stand for
    attack = settings.attack.last if isinstance(settings.attack, FirstApplicable) else settings.attack
    if isinstance(attack, GradientMatching):
        attack.init([seen])


def sent_out(settings: AttackSettings, model: Backbone, victims: VictimDataModule) -> Backbone:
    """The model that the server sends to its clients: the trained one, or a modified copy."""
    if settings.server is None:
        return model
    public = victims.public
    chosen = torch.arange(min(len(public), _PUBLIC_FOR_SERVER))
    return settings.server.modify(model, public.pixels(chosen))


def _announce(target: VictimModel, victims: VictimDataModule, folder: RunFolder) -> None:
    """Say what is going to happen."""
    public, test = victims.splits
    sizes = sorted({len(ids) for ids in victims.batches})
    print(f"data        {public.name} ({len(public)} images), {test.name} ({len(test)} images)")
    print(f"victims     {len(victims.batches)} clients with {' or '.join(map(str, sizes))} image(s) each")
    if victims.n_left_over:
        print(f"            {victims.n_left_over} of {victims.n_victims} images fit into no further batch")
    if target.checkpoint is not None:
        print(f"backbone    {type(target.model.trunk).__name__} from {target.path}")
    elif target.training is not None:
        print(f"backbone    {type(target.model.trunk).__name__}, to be trained for {target.training.epochs} epoch(s)")
        print(f"            kept in {target.path} for later attacks; use your own with --backbone.checkpoint FILE")
    print(f"run folder  {folder.path}", flush=True)


def _about(target: VictimModel, checkpoint: BackboneCheckpoint, module: UpdateAttackModule) -> dict[str, Scalar]:
    """The model's and the module's entries in the record."""
    return {
        "backbone": str(target.path),
        "backbone_epochs": checkpoint.epoch,
        "backbone_accuracy": checkpoint.accuracy,
        "split_hash": checkpoint.split_hash,
        "execution": module.execution,
        "processes": module.trainer.world_size,
    }


def _summary(metrics: dict[str, Scalar]) -> str:
    """The figures that answer the first question."""
    ours, mean, nearest = (
        metrics.get(key) for key in ("rmse", "baseline_mean_image_rmse", "baseline_nearest_public_rmse")
    )
    return f"RMSE        {_number(ours)} (mean image {_number(mean)}, nearest public image {_number(nearest)})"


def _number(value: Scalar) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "n/a"
