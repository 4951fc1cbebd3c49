"""Lower bounds on the error of any attack in an evaluation's cells, where they are known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lit_recon.bounds import GaussianPrior, autograd_jacobian, cramer_rao, van_trees
from lit_recon.bounds.fisher import check_size
from lit_recon.defenses import Batch, BatchGradient, Defense, at_weights, defended_gradient, simulated_gradient
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.evaluate.grid import Cell
from lit_recon.experiments.settings import AttackSettings
from lit_recon.experiments.update_attack.run import sent_out, victim_data
from lit_recon.experiments.victim_model import find_target
from lit_recon.io.files import write_text
from lit_recon.records import Update
from lit_recon.reporting.run_folder import RunFolder, StudyFolder
from lit_recon.reporting.writing import Scalar

#: Variance that is added to every pixel of the prior, that of an error of 0.01.
_FLOOR = 1e-4


def write_bounds(cells: Sequence[Cell], folder: StudyFolder) -> None:
    """Add the bounds of the finished cells that have none yet.

    One Jacobian serves all cells that differ in nothing but the noise, and all attacks on the same model.
    """
    path = folder.bounds
    known: dict[str, dict[str, Scalar]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    information: dict[str, list[Tensor]] = {}
    for cell in cells:
        done = RunFolder(folder.path / cell.folder).is_complete
        if cell.kind == "attack" and done and cell.folder not in known:
            settings = AttackSettings(**cell.built(folder.path))
            try:
                known[cell.folder] = _bound(cell, settings, information)
            except (LitReconError, RuntimeError) as error:  # PyTorch's where an operation has no third derivative
                known[cell.folder] = {"reason": " ".join(str(error).split())}
    write_text(path, json.dumps(known, indent=2))


def _bound(cell: Cell, settings: AttackSettings, information: dict[str, list[Tensor]]) -> dict[str, Scalar]:
    """The record of one cell.

    Raises:
        LitReconError: there is no bound; the message says why.
    """
    defense = settings.defense or Defense()
    std = defense.released_std(settings.victims.batch_size)
    if std == 0:
        raise ConfigError("without noise an update may give its images away exactly: the only bound is 0")
    key = _identity(cell, defense)
    victims = victim_data(settings)
    if key not in information:
        information[key] = _informations(settings, defense)
    found = [value / std**2 for value in information[key]]
    prior = GaussianPrior.fitted(victims.public.pixels(), _FLOOR)
    every = van_trees(torch.stack(found).mean(dim=0), prior)
    unbiased = sum(cramer_rao(value).mse for value in found) / len(found)
    return {
        "rmse": every.rmse,
        "applies_to": every.applies_to,
        "unbiased_rmse": math.sqrt(unbiased) if math.isfinite(unbiased) else None,
    }


def _informations(settings: AttackSettings, defense: Defense) -> list[Tensor]:
    """`J^T J` of every victim batch, `J` the Jacobian of the mean of the release with respect to all its pixels."""
    victims = victim_data(settings)
    target = find_target(settings.backbone, victims, settings.seed)
    size = sum(value.numel() for value in target.model.parameters())
    check_size(size, settings.victims.batch_size * math.prod(victims.image_shape))
    model = sent_out(settings, target.trained(settings.trainer).model, victims)
    client = settings.client.client(model, defense)
    found = []
    for index, ids in enumerate(victims.batches):
        images, labels = victims.test.pixels(ids), victims.test.labels[ids]
        seen = client.observe(images, labels, generator=settings.client.generator(index))
        exact = [{name: _double(v) for name, v in part.items()} for part in (seen.parameters, seen.buffers)]
        gradient, batch = at_weights(seen.operator, *exact), Batch(images.double(), labels)
        kept = defended_gradient(
            defense.without_noise(), client.model, gradient, batch, settings.client.generator(index)
        )
        mean = partial(_mean, defense, gradient, labels, kept)
        found.append(autograd_jacobian(mean, batch.images).gram())
    return found


def _mean(defense: Defense, gradient: BatchGradient, labels: Tensor, kept: Update, pixels: Tensor) -> Update:
    return simulated_gradient(defense, gradient, Batch(pixels, labels), kept, functional=True)


def _double(value: Tensor) -> Tensor:
    return value.detach().double() if value.is_floating_point() else value


def _identity(cell: Cell, defense: Defense) -> str:
    """Everything that the Jacobian depends on: not the attack, not the size of the noise."""
    names = ("data", "backbone", "seed", "server", "victims", "client")
    return json.dumps([[cell.settings.get(name) for name in names], repr(defense.without_noise())], default=str)
