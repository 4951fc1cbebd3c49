"""`attack.py run`: attack the updates of simulated clients, score the images, and write them down."""

from __future__ import annotations

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import nn

from lit_recon.attacks.base import Attack
from lit_recon.clients import Client
from lit_recon.errors import UnsupportedModelError
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import SAME_RUN, allow_class_path, settings_parser
from lit_recon.experiments.settings import AttackSettings
from lit_recon.experiments.update_attack.score import (
    BOUNDS,
    AttackResult,
    all_scored,
    frozen_notes,
    refuse_training_images,
    run_facts,
)
from lit_recon.experiments.victim_model import VictimModel, find_target
from lit_recon.metrics import PerceptualDistance, metrics_of
from lit_recon.modules.attack_state import run_identity
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.loggers import finish, log_table
from lit_recon.modules.update_attack import UpdateAttackModule
from lit_recon.records import Observation
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import MISSING, format_score
from lit_recon.reporting.writing import Scalar
from lit_recon.training.trainer import build_trainer, check_trainer, configure_process, is_first_process


def refuse_known_victims(attack: Attack, victims: VictimDataModule) -> None:
    """Refuse an attack one of whose own models lists a target image among its training images, by a ConfigError."""
    ids = torch.cat(victims.batches)
    remedy = "train a generator on the public images of the same split, or choose other victims by victims.seed"
    refuse_training_images(attack, victims.test.images[ids], ids, victims.test.name, remedy)


def copies_notes(victims: VictimDataModule) -> list[str]:
    """A note for the record where target images are public, too; data sets have such copies, so no error."""
    if not len(copies := victims.public_victims):
        return []
    n, equal = sum(map(len, victims.batches)), "equals a public image" if len(copies) == 1 else "equal public images"
    note = (
        f"{len(copies)} of {n} target images (image {int(copies[0])} of {victims.test.name} is one) {equal} of "
        f"{victims.splits[0].name}: the nearest public image may be exact there, and the victim model and attacks that "
        "use public images may know it. Choose other victims by victims.seed, or take the copies out of the data."
    )
    return [note]


#: Public images that a malicious server measures.
_PUBLIC_FOR_SERVER = 4096


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Attack the updates of simulated clients.", AttackSettings)
    allow_class_path(settings, "--model")
    settings.set_defaults(attack={"class_path": "lit_recon.attacks.updates.GradientMatching"})
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, train the victim model where needed, attack, score and report."""
    call = Call(arguments, values, values.attack.class_path.rpartition(".")[2])
    settings, folder = call.settings(AttackSettings), call.folder
    configure_process(settings.trainer)
    victims = victim_data(settings)
    lpips = PerceptualDistance(settings.lpips.network, settings.lpips.weights, settings.lpips.download)
    metrics = metrics_of(settings.metrics, [lpips])
    processes = check_trainer(settings.trainer).processes
    target = find_target(settings.backbone, victims, settings.seed, settings.model, processes)
    rehearse(settings, target, victims)
    if is_first_process():
        RunFolder.open(folder.path, call.config, settings.overwrite, SAME_RUN)
        _announce(target, victims, folder)
    elif not settings.overwrite:
        folder.refuse_finished()
    checkpoint = target.trained(settings.trainer)
    loggers = call.loggers()
    module = UpdateAttackModule(
        settings.attack,
        sent_out(settings, checkpoint.model, victims),
        settings.client,
        settings.defense,
        settings.knowledge,
        folder.checkpoints,
        metrics,
        settings.clients_per_batch,
        settings.save_every_seconds,
        run_identity(call.identity, checkpoint.model, victims.split_hash),
    )
    trainer = build_trainer(settings.trainer, loggers)
    trainer.test(module, datamodule=victims, verbose=False)
    trainer.strategy.barrier("all victims are done")
    if is_first_process():
        scored = all_scored(module, victims, folder)
        device = trainer.strategy.root_device
        bounds, bound_facts, bound_notes = _bounds(settings, module.model, victims, folder, device)
        frozen = frozen_notes(checkpoint.model, settings.defense)
        notes = [*target.notes, *frozen, *copies_notes(victims), *module.notes, *bound_notes]
        facts = run_facts(scored, str(device), notes) | bound_facts
        facts |= {"seed": settings.seed, "pool": settings.victims.pool, "split_hash": victims.split_hash}
        record = {**module.metrics, **facts, **target.facts(checkpoint)}
        record |= {"execution": module.execution, "together": module.together, "processes": trainer.world_size}
        result = AttackResult(scored, record, module.measures, victims.class_names, bounds=bounds)
        rows = result.rows()
        identity = ("batch", "id", "label", "recovered_label", "certified", "loss")
        columns = [*identity, *rows[0].scores]
        cells = [[*(getattr(row, name) for name in identity), *row.scores.values()] for row in rows]
        log_table(loggers, "victims", columns, cells)
        finish(loggers)
        result.write(folder)
        keys = ("rmse", "baseline_mean_image_rmse", "baseline_nearest_public_rmse")
        errors = [value if isinstance(value := record.get(key), float) else None for key in keys]
        ours, mean, nearest = (format_score("rmse", error) for error in errors)
        print(f"RMSE        {ours} (mean image {mean}, nearest public image {nearest})")
        if bounds:
            told = [format_score("rmse", v) if isinstance(v := record[key], float) else MISSING for key in BOUNDS]
            print(f"lower bound {told[0]} (unbiased), {told[1]} (independent pixels), {told[2]} (like public images)")
        if "n_certified" in record:
            print(f"certified   {record['n_certified']} of {record['n']} images")
        if "n_refused" in record:
            print(f"refused     {record['n_refused']} of {record['n']} images: {record['refused_reason']}")
        print(f"report      {folder.report}")


def _bounds(
    settings: AttackSettings, model: nn.Module, victims: VictimDataModule, folder: RunFolder, device: torch.device
) -> tuple[dict[int, dict[str, Scalar]], dict[str, Scalar], list[str]]:
    """Bounds on the error by client, and what the record and the notes say of them; all empty unless asked for."""
    if not settings.bound.clients:
        return {}, {}, []
    # the modules of bounds are loaded by runs that ask for some
    from lit_recon.experiments.update_attack import bound

    found = bound.victim_bounds(settings, model, victims, folder, device)
    return found, bound.bound_facts(found), bound.bound_notes(found)


def victim_data(settings: AttackSettings) -> VictimDataModule:
    """The clients' images, and the public images."""
    chosen = settings.victims
    return VictimDataModule(
        settings.data,
        chosen.n,
        chosen.batch_size,
        chosen.distinct_labels,
        chosen.seed,
        chosen.n_public,
        chosen.pool,
    )


def rehearse(settings: AttackSettings, target: VictimModel, victims: VictimDataModule) -> None:
    """Check the attack and set it up: a LitReconError before any training says what does not go together.

    An UnsupportedModelError of the set-up is about one update. It is raised if all victims' updates are refused by it
    and their model is not still to be trained.
    """
    refuse_known_victims(settings.attack, victims)
    client = settings.client.client(sent_out(settings, target.model, victims), settings.defense)
    settings.attack.check([first := observed(settings, client, victims, 0)])
    refused: list[UnsupportedModelError] = []
    for number in range(len(victims.batches)):
        try:
            return settings.attack.rehearse([first if number == 0 else observed(settings, client, victims, number)])
        except UnsupportedModelError as error:
            if target.is_untrained:
                return None
            refused.append(error)
    raise refused[0]


def observed(settings: AttackSettings, client: Client, victims: VictimDataModule, number: int) -> Observation:
    """The update of the victim with this number, as the attacker sees it."""
    images, labels = victims.test.pixels(victims.batches[number]), victims.test.labels[victims.batches[number]]
    return client.observe(images, labels, settings.knowledge, settings.client.generator(number))


def sent_out(settings: AttackSettings, model: nn.Module, victims: VictimDataModule) -> nn.Module:
    """The model that the server sends to its clients: the trained one, or a modified copy."""
    if settings.server is None:
        return model
    chosen = torch.arange(min(len(victims.public), _PUBLIC_FOR_SERVER))
    return settings.server.modify(model, victims.public.pixels(chosen))


def _announce(target: VictimModel, victims: VictimDataModule, folder: RunFolder) -> None:
    public, test = victims.splits
    sizes = sorted({len(ids) for ids in victims.batches})
    print(f"data        {public.name} ({len(public)} images), {test.name} ({len(test)} images)")
    print(f"victims     {len(victims.batches)} clients with {' or '.join(map(str, sizes))} image(s) each")
    if victims.n_left_over:
        print(f"            {victims.n_left_over} of {victims.n_victims} images fit into no further batch")
    print("\n".join([*target.announcement(), *(f"note        {note}" for note in copies_notes(victims))]))
    print(f"run folder  {folder.path}", flush=True)
