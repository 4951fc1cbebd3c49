"""Score an attack on updates from Python, without Trainer, data module or configuration files."""

from __future__ import annotations

import dataclasses
import inspect
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lit_recon.attacks.base import Attack
from lit_recon.clients import Client, LocalTraining
from lit_recon.clients.aggregate import one_client
from lit_recon.data.dataset import seeded_generator
from lit_recon.data.splits import VictimBatch
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError, ShapeError, check_kind
from lit_recon.experiments.update_attack.score import AttackResult, frozen_notes, refuse_training_images, run_facts
from lit_recon.metrics import DEFAULT_METRICS, Metric, metrics_of
from lit_recon.metrics.registry import unit_images
from lit_recon.modules.attack_state import finished_batches, run_attack
from lit_recon.modules.scoring import RunScores, feature_scores, score_batches
from lit_recon.records import Knowledge, Observation
from lit_recon.reporting.writing import Scalar

_NO_PUBLIC = "No public images were given, so that there are no baselines to compare with."


def evaluate(
    attack: Attack,
    client: Client,
    images: Tensor,
    labels: Tensor,
    metrics: Sequence[str | Metric | type[Metric]] = DEFAULT_METRICS,
    public: Tensor | None = None,
    knowledge: Knowledge | None = None,
    batch_size: int = 1,
    seed: int = 0,
    device: torch.device | str | None = None,
    class_names: Sequence[str] = (),
) -> AttackResult:
    """Attack the updates of simulated clients with `batch_size` images each, and score the reconstructions.

    Args:
        attack: on updates.
        client: computes every update; its defense draws random numbers of its own for every batch.
        images: targets `(n, c, h, w)`, bytes or floats in [0, 1]; cut into batches in order.
        labels: their classes `(n,)`, int64.
        metrics: names, `Metric` subclasses or their import paths, or metrics; `rmse` is always measured.
        public: images `(N, c, h, w)` that the attacker may have seen, none of them a target, for the baselines: their
            mean, and the nearest of them to each target. Default: no baselines.
        knowledge: the attacker's knowledge besides model and update; default: none.
        batch_size: images per client; must divide n.
        seed: of the defense's random numbers.
        device: device of the attack; default: that of the client's model.
        class_names: of the classes in order, for the page.

    Returns:
        Images, scores with intervals, and baselines; print it, or write a run folder by its `save`.

    Raises:
        LitReconError: the attack, the client, the images and the metrics do not fit together, or a generator of the
            attack was trained on one of the images.
    """
    check_kind("attack", attack, Attack)
    check_kind("client", client, Client)
    check_kind("images", images, Tensor)
    check_kind("labels", labels, Tensor)
    chosen, knowledge = metrics_of(metrics), knowledge or Knowledge()
    targets = unit_images(images).float()
    if labels.shape != (len(targets),) or not len(targets):
        raise ShapeError(
            f"one label per image is needed, and an image; got {len(targets)} images, {len(labels)} labels"
        )
    if batch_size < 1 or len(targets) % batch_size:
        raise ConfigError(f"batch_size must divide the number of images, {len(targets)}; got {batch_size}")
    if public is not None and public.shape[1:] != targets.shape[1:]:
        shapes = tuple(targets.shape[1:]), tuple(public.shape[1:])
        raise ShapeError(f"public images must have the shape of the targets, {shapes[0]}; got {shapes[1]}")
    # generators are trained on bytes, which are known again as floats
    pixels, remedy = (255 * targets).round().byte().cpu(), "train a generator on other images, or attack others"
    refuse_training_images(attack, pixels, torch.arange(len(targets)), "those given", remedy)
    client = client if device is None else client.to(device)
    where = next(iter(client.model.parameters())).device
    positions = torch.arange(len(targets)).split(batch_size)
    batches = [VictimBatch(i, targets[ids].to(where), labels[ids].to(where), ids) for i, ids in enumerate(positions)]
    first = client.observe(batches[0].images, batches[0].labels, knowledge, seeded_generator(seed, "defense", 0))
    attack.check([first])
    scores = RunScores(chosen, baselines=public is not None)
    scores.rehearse(batches[0].images)
    finished = []
    # the defense draws its random numbers as in `attack.py run`
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches:
            seen = client.observe(batch.images, batch.labels, knowledge, seeded_generator(seed, "defense", batch.index))
            outcome = run_attack(attack, [seen], Path(folder) / "state.pt", math.inf, None, lambda state, new: None)
            found = outcome.reconstructions[0]
            features = feature_scores(scores.metrics, seen, found, batch.images, client)
            finished += finished_batches([batch.index], outcome, [features])
    public = None if public is None else public.cpu()
    scored = score_batches(finished, batches, public, scores.metrics)
    scores.update(scored)
    notes = [*frozen_notes(client.model, client.defense), *([_NO_PUBLIC] if public is None else [])]
    facts = run_facts(scored, str(where), notes)
    record: dict[str, Scalar] = {**scores.record(), **facts, "seed": seed}
    lost: list[str] = []
    settings: dict[str, object] = {
        "attack": described(attack, lost),
        "client": _described_client(client, first, seed),
        "defense": None if type(client.defense) is Defense else described(client.defense, lost),
        "knowledge": dataclasses.asdict(knowledge),
        "victims": {"n": len(targets), "batch_size": batch_size},
        "metrics": [
            m.measure.key if type(m).__module__.startswith("lit_recon.metrics.") else described(m, lost) for m in chosen
        ],
    }
    return AttackResult(scored, record, scores.measures(record), class_names, settings, lost)


def described(value: object, lost: list[str]) -> object:
    """A value as in configuration files: objects by class path and the arguments that they keep as attributes.

    `lost` is extended by the names of arguments that an object does not keep, such as `LBFGS.line_search`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(item, lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item, lost) for item in value]
    if isinstance(value, Tensor | torch.nn.Module | Path) or not hasattr(value, "__dict__") or inspect.isroutine(value):
        return str(value) if isinstance(value, Path) else type(value).__qualname__
    own, names = vars(value), inspect.signature(type(value)).parameters
    lost += [f"{type(value).__qualname__}.{name}" for name in names if name not in own]
    arguments = {name: described(own[name], lost) for name in names if name in own}
    path = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"class_path": path, **({"init_args": arguments} if arguments else {})}


def _described_client(client: Client, seen: Observation, seed: int) -> dict[str, object]:
    one, clients = one_client(seen.operator)
    settings: dict[str, object] = {"batch_norm": client.batch_norm, "seed": seed}
    settings["n_clients"] = clients
    if hasattr(one, "steps"):
        names = [field.name for field in dataclasses.fields(LocalTraining) if hasattr(one, field.name)]
        settings["local_steps"] = {name: described(getattr(one, name), []) for name in names}
    return settings
