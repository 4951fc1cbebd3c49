"""The bounds of an evaluation's cells: how close any attack could have come to the same images, where that is known."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import cast

import torch
from torch import Tensor

from lit_recon.bounds import GaussianPrior, autograd_jacobian, cramer_rao, van_trees
from lit_recon.bounds.fisher import check_size
from lit_recon.defenses import (
    DPSGD,
    Batch,
    BatchGradient,
    Defense,
    at_weights,
    defended_gradient,
    simulated_gradient,
)
from lit_recon.errors import LitReconError
from lit_recon.experiments.defended_bound import acting, quiet, released_std
from lit_recon.experiments.evaluate.cells import Cells
from lit_recon.experiments.evaluate.grid import Cell
from lit_recon.experiments.settings import AttackSettings
from lit_recon.experiments.update_attack.run import sent_out, victim_data
from lit_recon.experiments.victim_model import find_target
from lit_recon.io.files import write_text
from lit_recon.models import Backbone
from lit_recon.records import Update
from lit_recon.reporting.writing import Scalar

#: Variance that is added to every pixel of the prior, that of an error of 0.01.
_FLOOR = 1e-4


def write_bounds(cells: Cells) -> None:
    """Add the bounds of the cells that are done and have none; those of other cells stay.

    One Jacobian serves all cells whose noise alone differs, and all attacks on the same model.
    """
    path = cells.folder.bounds
    known: dict[str, dict[str, Scalar]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    information: dict[str, list[Tensor]] = {}
    for cell in cells.cells:
        if cell.kind == "attack" and cells.is_done(cell) and cell.folder not in known:
            settings = AttackSettings(**cells.settings(cell))
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
    std = released_std(defense, settings.victims.batch_size)
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
        network, random = cast(Backbone, client.model), settings.client.generator(index)
        kept = defended_gradient(quiet(defense), network, gradient, batch, random)
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
    bounds = [part.bound for part in acting(defense) if isinstance(part, DPSGD)]
    return json.dumps([[cell.settings.get(name) for name in names], repr(quiet(defense)), bounds], default=str)
