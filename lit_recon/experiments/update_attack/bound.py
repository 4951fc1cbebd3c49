"""Lower bounds on the error of attacks on the first clients' updates, from the Fisher information in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_recon.bounds import (
    GaussianPrior,
    NetworkJacobian,
    Rounding,
    cramer_rao,
    remaining,
    unknown_basis,
    van_trees,
)
from lit_recon.bounds.fisher import ReleasedInformation
from lit_recon.bounds.network import doubled
from lit_recon.clients import Client, GradientOperator
from lit_recon.clients.gradient import pure_copy
from lit_recon.defenses import Batch, Defense, Round, Stage
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.settings import AttackSettings, BoundSettings
from lit_recon.experiments.update_attack.score import BOUNDS
from lit_recon.io.files import write_text
from lit_recon.modules.data import VictimDataModule
from lit_recon.records import Loss, Weights
from lit_recon.reporting.record import read_json
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import duration
from lit_recon.reporting.writing import Scalar
from lit_recon.training.progress import Progress

#: Variance of a pixel under the prior of independent pixels, a standard deviation of 0.25.
PIXEL_VARIANCE = 0.0625
#: Variance that is added to every pixel of the prior fitted to public images, that of an error of 0.01.
_FLOOR = 1e-4
#: Why there is no bound above 0 behind defenses without noise.
WITHOUT_NOISE = "without noise an update may determine its images exactly: the only bound is 0"
#: Why there is no bound for attackers who are given the statistics of the batch.
MORE_THAN_THE_UPDATE = (
    "the attacker also knows the exact BatchNorm statistics of the client's batch, which the information in the update "
    "leaves out: he may come below a bound from it"
)
#: What is said of bounds behind noise for directions of which rounding hides how much the update tells.
_HIDDEN = (
    "rounding hides what the update tells of {} directions of a client's images, which count as told as well as it "
    "allows: the bounds may be too low"
)
#: Entries of a Jacobian up to which double precision costs little.
_SMALL = 1e9


def victim_bounds(
    settings: AttackSettings, model: nn.Module, victims: VictimDataModule, folder: RunFolder, device: torch.device
) -> dict[int, dict[str, Scalar]]:
    """The bounds of the first `settings.bound.clients` clients by number, also in `bounds.json`, or `reason`s.

    `model` is the one that the server sends, `device` where the information is computed. Bounds that the file holds
    already are not computed again.
    """
    path = folder.bounds
    stored = read_json(path, "delete it, and the bounds are computed again") if path.is_file() else {}
    known: dict[int, dict[str, Scalar]] = {int(number): bound for number, bound in stored.items()}
    asked = range(min(settings.bound.clients, len(victims.batches)))
    if not asked:
        return {}
    client = settings.client.client(model, settings.defense).to(device)
    prior = GaussianPrior.fitted(victims.public.pixels(), _FLOOR)
    for number in asked:
        if number not in known:
            ids = victims.batches[number]
            batch = Batch(victims.test.pixels(ids).to(device), victims.test.labels[ids].to(device))
            try:
                known[number], _ = update_bound(settings, settings.bound, client, batch, number, prior, {})
            except LitReconError as error:
                known[number] = {"reason": " ".join(str(error).split())}
            except (ArithmeticError, MemoryError, RuntimeError) as error:  # the attack's own results must not be lost
                known[number] = {"reason": " ".join(f"not computed: {str(error) or type(error).__name__}".split())}
            write_text(path, json.dumps(known, indent=2))
    return {number: known[number] for number in asked}


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model has BatchNorm layers, whose statistics an attacker may be given."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def require_one_gradient(settings: AttackSettings) -> None:
    """Raise a `ConfigError` for clients whose updates are more than a gradient, or are seen in a mean."""
    if settings.client.local_steps is not None or settings.client.n_clients > 1:
        raise ConfigError("the information is computed for clients that release one gradient each")


#: Jacobians of clients' updates, by the client's number, whether gradients are summed, and whether nothing is random in
#: the defense but noise of one size.
Jacobians = dict[tuple[int, bool, bool], NetworkJacobian]


def update_bound(
    settings: AttackSettings,
    bound: BoundSettings,
    client: Client,
    batch: Batch,
    number: int,
    prior: GaussianPrior,
    jacobians: Jacobians,
) -> tuple[dict[str, Scalar], Tensor]:
    """Bounds on the root mean squared error of a pixel of a client's batch, and the information that they are from.

    The information `(q, q)` is that at the client's own images. `jacobians` are taken and kept, for other defenses of
    the same client. A LitReconError says why there are no bounds.
    """
    require_one_gradient(settings)
    if settings.knowledge.batch_norm == "batch" and has_batch_norm(client.model):
        raise ConfigError(MORE_THAN_THE_UPDATE)
    defense = settings.defense or Defense()
    std = _known_std(defense, len(batch.images))
    # the closed form for clipped examples is that of a sum of gradients
    # random masks and directions are those of the update, which is in single precision
    key = number, Stage.PER_EXAMPLE in defense.stages, bool(std) and not defense.reads_zeros
    if key not in jacobians:
        jacobians[key] = _jacobian(bound, client, batch, *key)
    jacobian = jacobians[key]
    operator = GradientOperator(client.model, client.batch_norm, client.loss)
    round_ = Round(jacobian.batch, partial(operator, jacobian.weights))
    released = defense.released_information(jacobian, round_, std or 1.0, settings.client.generator(number))
    found = _rmses(jacobian, released, std, prior)
    hidden = found["unknown_directions"] if found[BOUNDS[0]] is not None else 0
    notes = [*released.notes, *([_HIDDEN.format(hidden)] if hidden else [])]
    return {**found, "notes": notes}, released.information


def _jacobian(
    bound: BoundSettings, client: Client, batch: Batch, number: int, summed: bool, noisy: bool
) -> NetworkJacobian:
    """The Jacobian of a client's mean or `summed` gradient; if `noisy`, in double precision where that costs little."""
    network, weights = pure_copy(client.model, client.batch_norm), Weights.of(client.model)
    if noisy and batch.images.numel() * sum(value.numel() for value in weights.parameters.values()) <= _SMALL:
        weights, batch = Weights(*map(doubled, weights)), Batch(batch.images.double(), batch.labels)
    return NetworkJacobian(
        network,
        weights,
        batch,
        partial(_sum_loss, client.loss, len(batch.images)) if summed else client.loss,
        chunk=bound.chunk,
        limit=60 * bound.minutes,
        progress=_Shown(f"bound of client {number + 1}"),
        memory=1e9 * bound.gigabytes,
    )


def _known_std(defense: Defense, n: int) -> float | None:
    """The noise of a release; None where it differs between coordinates or is not normal."""
    try:
        return defense.released_std(n)
    except ConfigError:
        return None


def _sum_loss(loss: Loss, n: int, logits: Tensor, labels: Tensor) -> Tensor:
    return n * loss(logits, labels)


class _Shown:
    """Shows the progress of a bound, and at first how long it will take."""

    def __init__(self, label: str) -> None:
        self._label, self._progress = label, Progress(100, label, "percent")

    def __call__(self, share: float, seconds: float) -> None:
        if not self._progress.done:
            self._progress.write(f"{self._label}: about {duration(seconds)}")
        self._progress.advance(round(100 * share) - self._progress.done)
        if share >= 1:
            self._progress.close()


def _rmses(
    jacobian: NetworkJacobian, released: ReleasedInformation, std: float | None, prior: GaussianPrior
) -> dict[str, Scalar]:
    """Bounds in words of `bounds.json`, for noise of `std`: None, if the information has it already; 0, without."""
    information, gram, errors = released.information, jacobian.computed, jacobian.rounding()
    rounding = Rounding.of(gram, errors)
    told = float(information.trace())
    size = rounding.size / float(gram.trace()) * told if told else 0.0  # a defense may release nothing
    unknown = unknown_basis(information, size)
    independent = GaussianPrior.isotropic(len(prior.covariance), PIXEL_VARIANCE)
    found: dict[str, Scalar] = {"unknown_directions": unknown.shape[1], "relative_error": _finite(rounding.relative)}
    if std == 0:
        # what the update does not tell remains as it is under the prior
        values = [math.inf if unknown.numel() else 0.0, *(remaining(unknown, p).rmse for p in (independent, prior))]
    else:
        every = (van_trees(information, p, size) for p in (independent, prior))
        values = [cramer_rao(information, size).rmse, *(bound.rmse for bound in every)]
    return found | {key: _finite(value) for key, value in zip(BOUNDS, values, strict=True)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def bound_facts(bounds: Mapping[int, Mapping[str, Scalar]]) -> dict[str, Scalar]:
    """Entries of `metrics.json`: roots of the mean squares over the clients, or why there are none; and notes."""
    if not bounds:
        return {}
    facts: dict[str, Scalar] = {"bound_clients": len(bounds)}
    reasons = list(dict.fromkeys(str(bound["reason"]) for bound in bounds.values() if "reason" in bound))
    unknown = [number for bound in bounds.values() if isinstance(number := bound.get("unknown_directions"), int)]
    if any(unknown):
        reasons.append(f"the update does not determine up to {max(unknown)} directions of a client's images")
    for key in BOUNDS:
        values = [value for bound in bounds.values() if isinstance(value := bound.get(key), float)]
        complete = len(values) == len(bounds)
        facts[key] = math.sqrt(sum(value**2 for value in values) / len(values)) if complete else None
        if not complete:
            facts[f"{key}_reason"] = "; ".join(reasons)
    errors = [bound.get("relative_error") for bound in bounds.values() if "reason" not in bound]
    numbers = [error for error in errors if isinstance(error, float)]
    facts["bound_relative_error"] = max(numbers) if numbers and len(numbers) == len(errors) else None
    facts["bound_unknown_directions"] = max(unknown, default=None)
    return facts


def left_out(bounds: Iterable[Mapping[str, Scalar]]) -> list[str]:
    """The notes of bounds on what they leave out, each once."""
    parts: list[Sequence[str]] = [notes for bound in bounds if isinstance(notes := bound.get("notes"), list)]
    return list(dict.fromkeys(note for part in parts for note in part))


def bound_notes(bounds: Mapping[int, Mapping[str, Scalar]]) -> list[str]:
    """What the bounds leave out, as sentences."""
    return [f"Lower bounds: {note}." for note in left_out(bounds.values())]
