"""Lower bounds on the error of attacks in the cells of a grid."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.bounds import GaussianPrior, autograd_jacobian, cramer_rao, van_trees
from lit_recon.bounds.fisher import check_size
from lit_recon.clients import Client
from lit_recon.clients.aggregate import one_client
from lit_recon.defenses import Batch, BatchGradient, Defense, Round, defended_gradient, simulated_gradient
from lit_recon.defenses.combined import AveragedDefense, seen_in_mean
from lit_recon.errors import ConfigError, LitReconError, TimeLimitError
from lit_recon.experiments.evaluate.grid import GridCell
from lit_recon.experiments.settings import AttackSettings, BoundSettings
from lit_recon.experiments.update_attack.bound import (
    MORE_THAN_THE_UPDATE,
    WITHOUT_NOISE,
    Jacobians,
    bound_facts,
    has_batch_norm,
    left_out,
    require_one_gradient,
    update_bound,
)
from lit_recon.experiments.update_attack.run import sent_out, victim_data
from lit_recon.experiments.victim_model import find_target
from lit_recon.io.files import write_text
from lit_recon.modules.data import VictimDataModule
from lit_recon.records import Differentiable, SimulatedDefense, Update, Weights
from lit_recon.reporting.provenance import find_setting
from lit_recon.reporting.record import read_json
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar

#: Variance that is added to every pixel of the prior, that of an error of 0.01.
_FLOOR = 1e-4


def write_bounds(cells: Sequence[GridCell], folder: RunFolder, large: BoundSettings | None = None) -> None:
    """Add the bounds of the finished cells that have none yet; `large`: how, where a Jacobian is too large to store.

    One Jacobian serves all cells that differ in nothing but the noise, and all attacks on the same model. The file is
    written after every cell. A bound that could not be computed, for lack of time or memory or by an unexpected error
    of PyTorch's, is tried again by the next call, and so is one of other clients than `large` asks for.
    """
    large = large or BoundSettings()
    known, outdated = _stored_bounds(folder), _outdated(cells, folder, large)
    # what the cells share, by everything that it depends on
    shared: dict[str, Any] = {}
    for cell in cells:
        if cell.folder in outdated:
            settings = AttackSettings(**cell.built(folder.path))
            try:
                known[cell.folder] = _bound(cell, settings, shared, large)
                if "clients" in known[cell.folder]:
                    known[cell.folder]["settings"] = asdict(large)
            except TimeLimitError as error:
                known[cell.folder] = {"not_computed": _line(error), "settings": asdict(large)}
            except (LitReconError, NotImplementedError) as error:  # PyTorch's: an operation has no third derivative
                known[cell.folder] = {"reason": _line(error)}
            except (MemoryError, RuntimeError) as error:  # on GPUs and CPUs PyTorch reports a lack of memory by either
                known[cell.folder] = {"not_computed": _line(error), "settings": asdict(large)}
            write_text(folder.bounds, json.dumps(known, indent=2))


def _stored_bounds(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """The bounds of cells by folder; those that depend on `BoundSettings` hold them under `settings`."""
    path = folder.bounds
    return read_json(path, "delete it, and the bounds are computed again") if path.is_file() else {}


def _outdated(cells: Sequence[GridCell], folder: RunFolder, large: BoundSettings) -> dict[str, dict[str, Any]]:
    """The stored bounds and reasons that no longer hold or are not the ones asked for, by the folder of their cell.

    Empty for finished attacks that have none, as after a process was killed.
    """
    stored, shared = _stored_bounds(folder), dict[str, Any]()
    found = {}
    for cell in cells:
        bound = stored.get(cell.folder, {})
        done = cell.kind == "attack" and RunFolder(folder.path / cell.folder).is_complete
        if done and (not bound or _is_other(bound, large) or _is_wrong(cell, bound, folder, shared)):
            found[cell.folder] = bound
    return found


def awaited(cells: Sequence[GridCell], folder: RunFolder, large: BoundSettings) -> list[GridCell]:
    """The finished cells for which `write_bounds` would compute bounds now."""
    outdated = _outdated(cells, folder, large)
    return [cell for cell in cells if cell.folder in outdated]


def _is_wrong(cell: GridCell, bound: Mapping[str, Any], folder: RunFolder, shared: dict[str, Any]) -> bool:
    """Whether an earlier release knew no bound behind the defense, or took masks from the zeros of a gradient.

    Or refused a network without BatchNorm, or did not refuse one with it.
    """
    reason = str(bound.get("reason", ""))
    unknown, refused = reason.startswith("no bound is known for"), reason == MORE_THAN_THE_UPDATE
    masked = "rmse" in bound and not {"clients", "notes"} & {*bound}
    informed = find_setting(cell.settings, "knowledge.batch_norm") == "batch" and (refused or "rmse" in bound)
    if not (unknown or masked or informed):
        return False
    settings = AttackSettings(**cell.built(folder.path))
    return (
        (unknown and _refusal(settings) != reason)
        or (masked and (settings.defense or Defense()).reads_zeros)
        or (informed and refused != _tells_statistics(cell, settings, shared))
    )


def _tells_statistics(cell: GridCell, settings: AttackSettings, shared: dict[str, Any]) -> bool:
    """Whether an attacker is given statistics of the batch, by a network that has any; `shared` keeps which ones do."""
    if find_setting(cell.settings, "knowledge.batch_norm") != "batch":
        return False
    if (key := f"BatchNorm {cell.network}") not in shared:
        target = find_target(settings.backbone, victim_data(settings), settings.seed, settings.model)
        shared[key] = has_batch_norm(target.model)
    told: bool = shared[key]
    return told


def _is_other(bound: Mapping[str, Any], large: BoundSettings) -> bool:
    """Whether a bound was not computed, or is of other clients than these settings ask for, if they ask for any.

    So are bounds of earlier releases over several clients, which averaged bounds instead of the information.
    """
    stated = bound.get("settings", bound)  # files of earlier releases hold the number of clients alone
    averaged = "applies_to" not in bound and bound.get("clients", 1) > 1
    other = large.clients and "clients" in bound and (averaged or stated["clients"] != large.clients)
    return "not_computed" in bound or bool(other)


def has_other_bounds(cells: Sequence[GridCell], folder: RunFolder, large: BoundSettings) -> bool:
    """Whether these settings may find bounds that a finished grid lacks, such as in more minutes, or other ones."""
    outdated = _outdated(cells, folder, large).values()
    return any("not_computed" not in bound or bound.get("settings") != asdict(large) for bound in outdated)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _bound(cell: GridCell, settings: AttackSettings, shared: dict[str, Any], large: BoundSettings) -> dict[str, Scalar]:
    """The record of one cell; a LitReconError says why there is no bound, a MemoryError why it is not computed."""
    defense = settings.defense or Defense()
    std = _equal_noise(seen_in_mean(defense, settings.client.n_clients), settings.victims.batch_size)
    if std == 0:
        raise ConfigError(WITHOUT_NOISE)
    if _tells_statistics(cell, settings, shared):
        raise ConfigError(MORE_THAN_THE_UPDATE)
    if defense.reads_zeros:  # an entry that is exactly 0 may have been kept: only the client's own masks tell
        std = None
    # everything that the Jacobian depends on: not the attack, not the size of the noise
    depends = [cell.network, *map(cell.settings.get, ("server", "victims", "client"))]
    victims = victim_data(settings)
    prior = GaussianPrior.fitted(victims.public.pixels(), _FLOOR)
    stored, own = (json.dumps([*depends, repr(part)], default=str) for part in (defense.without_noise(), defense))
    if (std is None or stored not in shared) and own not in shared:
        target = find_target(settings.backbone, victims, settings.seed, settings.model)
        too_large = _too_large(target.model, settings.victims.batch_size * math.prod(victims.image_shape))
        if too_large or std is None:
            require_one_gradient(settings)
            _require_closed_form(defense)
        if too_large and not large.clients:
            raise MemoryError(f"{too_large}; or set bound.clients: without a stored Jacobian it takes minutes")
        model = sent_out(settings, target.trained(settings.trainer).model, victims)
        client = settings.client.client(model, defense)
        if std is None and not too_large:  # as with noise of one size, all clients
            large = replace(large, clients=len(victims.batches))
        if too_large or std is None:
            jacobians = shared.setdefault(json.dumps(depends, default=str), {})
            shared[own] = _first_clients(settings, large, client, victims, prior, jacobians)
            if not too_large:
                del shared[own]["clients"]
        else:
            shared[stored] = _informations(settings, client, victims, defense)
    if std is not None and stored in shared:
        return noise_bounds(shared[stored], std, prior)
    found: dict[str, Scalar] = shared[own]
    return found


def _equal_noise(defense: Defense | AveragedDefense, n: int) -> float | None:
    """The standard deviation of normal noise, the same on all coordinates; None for noise of another kind."""
    try:
        return defense.released_std(n)
    except ConfigError:
        if isinstance(defense, AveragedDefense):
            raise
        return None


def _refusal(settings: AttackSettings) -> str:
    """Why the defense itself has no bound; empty if it may have one."""
    defense = settings.defense or Defense()
    try:
        _equal_noise(seen_in_mean(defense, settings.client.n_clients), settings.victims.batch_size)
        _require_closed_form(defense)
    except ConfigError as error:
        return _line(error)
    return ""


def _require_closed_form(defense: Defense) -> None:
    """Raise a `ConfigError` for a defense behind which no bound is known, tried on the squares of tiny images."""
    batch = Batch(torch.linspace(0.1, 0.9, 8).view(2, 1, 2, 2), torch.zeros(2, dtype=torch.long))
    jacobian = autograd_jacobian(lambda images: _squares(batch._replace(images=images)), batch.images)
    with suppress(ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):  # it needs a real network
        defense.linearized(jacobian, Round(batch, _squares), torch.Generator().manual_seed(0))


def _squares(batch: Batch, differentiable: Differentiable = "no") -> Update:
    """Stands for the gradient of a network."""
    return {"weight": batch.images.square().mean(dim=0)}


def _too_large(model: nn.Module, n_inputs: int) -> str:
    """Why the Jacobian of an update cannot be stored; empty if it can."""
    try:
        check_size(sum(value.numel() for value in model.parameters()), n_inputs)
    except ConfigError as error:
        return str(error)
    return ""


def _first_clients(
    settings: AttackSettings,
    large: BoundSettings,
    client: Client,
    victims: VictimDataModule,
    prior: GaussianPrior,
    jacobians: Jacobians,
) -> dict[str, Scalar]:
    """Bounds as those of `noise_bounds`, over the first clients alone; `jacobians` serve other strengths of noise."""
    found: dict[int, dict[str, Scalar]] = {}
    total = torch.zeros(())
    for number in range(min(large.clients, len(victims.batches))):
        ids = victims.batches[number]
        batch = Batch(victims.test.pixels(ids), victims.test.labels[ids])
        found[number], own = update_bound(settings, large, client, batch, number, prior, jacobians)
        total = own if number == 0 else total + own
    every = van_trees(total / len(found), prior)
    unbiased = bound_facts(found)["bound_rmse"]
    return {
        "rmse": every.rmse,
        "applies_to": every.applies_to,
        "unbiased_rmse": unbiased,
        "clients": len(found),
        "notes": left_out(found.values()),
    }


def noise_bounds(squares: Sequence[Tensor], std: float, prior: GaussianPrior) -> dict[str, Scalar]:
    """Bounds from `J^T J` of every batch, whose release has noise of standard deviation `std` on every coordinate."""
    found = [value / std**2 for value in squares]
    every = van_trees(torch.stack(found).mean(dim=0), prior)
    unbiased = sum(cramer_rao(value).mse for value in found) / len(found)
    return {
        "rmse": every.rmse,
        "applies_to": every.applies_to,
        "unbiased_rmse": math.sqrt(unbiased) if math.isfinite(unbiased) else None,
        "notes": [],
    }


def _informations(
    settings: AttackSettings, client: Client, victims: VictimDataModule, defense: Defense
) -> list[Tensor]:
    """`J^T J` of every victim batch, `J` the Jacobian of the mean of the release with respect to all its pixels."""
    found = []
    for index, ids in enumerate(victims.batches):
        images, labels = victims.test.pixels(ids), victims.test.labels[ids]
        seen = client.observe(images, labels, generator=settings.client.generator(index))
        exact = _double(seen.weights)
        own, clients = one_client(seen.operator)
        gradient, batch = partial(own, exact), Batch(images.double(), labels)
        drawn = settings.client.generator(index)
        kept = defended_gradient(defense.without_noise(), client.model, gradient, batch, drawn, clients=clients)
        mean = partial(_mean, client.simulated_defense, gradient, labels, kept, clients)
        found.append(autograd_jacobian(mean, batch.images).gram())
    return found


def _double(weights: Weights) -> Weights:
    """The weights in double precision."""
    parts = ({name: value.detach() for name, value in part.items()} for part in weights)
    return Weights(*({name: v.double() if v.is_floating_point() else v for name, v in part.items()} for part in parts))


def _mean(
    defense: SimulatedDefense, gradient: BatchGradient, labels: Tensor, kept: Update, clients: int, pixels: Tensor
) -> Update:
    return simulated_gradient(defense, gradient, Batch(pixels, labels), kept, "functional", clients)
