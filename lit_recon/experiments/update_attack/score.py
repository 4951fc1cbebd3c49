"""A scored attack on updates: images, scores and notes, and their files in a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor, nn

from lit_recon.attacks.base import Attack
from lit_recon.data.batches import VictimBatches
from lit_recon.data.dataset import fingerprints
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError
from lit_recon.measures import Measure
from lit_recon.metrics.aggregate import recorded_error
from lit_recon.metrics.scores import certified_entries
from lit_recon.models import WideFeatureLayer
from lit_recon.modules.attack_state import load_finished
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.scoring import ScoredBatch, score_batches
from lit_recon.modules.update_attack import UpdateAttackModule
from lit_recon.reporting.pages import build_report
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder, marked
from lit_recon.reporting.wording import MISSING, format_interval, format_score, percent
from lit_recon.reporting.writing import (
    LossCurve,
    Scalar,
    VictimRow,
    write_losses,
    write_metrics,
    write_tensors,
    write_victims,
)

#: Bounds of a client: for unbiased attacks, with independent pixels, and with pixels as in public images.
BOUNDS = ("bound_rmse", "bound_independent_rmse", "bound_public_rmse")
_BASELINES = {"mean_image": "mean public image", "nearest_public": "nearest public image"}


def refuse_training_images(attack: Attack, pixels: Tensor, numbers: Tensor, source: str, remedy: str) -> None:
    """Refuse an attack one of whose own models lists a target image among its training images, by a ConfigError.

    Targets are bytes `(n, c, h, w)`; `numbers` `(n,)` are those of the images in their `source`.
    """
    for checkpoint, seen in attack.training_images.items():
        known = numbers[torch.isin(fingerprints(pixels), seen)]
        if len(known):
            raise ConfigError(
                f"{checkpoint} was trained on {len(known)} of the {len(numbers)} victims (image {int(known[0])} of "
                f"{source} is one), so it may return memorized images: {remedy}"
            )


def frozen_notes(model: nn.Module, defense: Defense | None) -> list[str]:
    """A note for the record where the update tells of parameters that a client who freezes them would not send.

    The random neurons of a wide layer are frozen, and their gradient is sent all the same.
    """
    wide = [layer for layer in model.modules() if isinstance(layer, WideFeatureLayer)]
    sent = {id(value) for layer in wide for value in layer.parameters()}
    withheld = (defense or Defense()).withholds
    parameters = dict(model.named_parameters())
    frozen = [
        name for name, value in parameters.items() if not (value.requires_grad or id(value) in sent or withheld(name))
    ]
    if not frozen:
        return []
    shown = frozen[0] if len(frozen) == 1 else f"{frozen[0]} is the first"
    note = (
        f"{len(frozen)} of {len(parameters)} parameters do not require a gradient ({shown}), but their gradient is in "
        "the update that was attacked. Where clients freeze them and send nothing of them, name them in the defense "
        "ExcludedVariables."
    )
    return [note]


class Mean(NamedTuple):
    """Mean of a metric over all images, with its standard deviation over images and its 95 % confidence interval.

    The interval and the standard error `error` of the mean assume two or more independent batches, whose images may
    depend. Values that cannot be computed are None; `reason` says why there is no mean.
    """

    value: float | None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    error: float | None = None


@dataclass(frozen=True, repr=False)
class AttackResult:
    """A scored attack on updates. Printing it shows a table; `save` writes the run folder of `attack.py run`.

    Attributes:
        batches: all batches of clients in order, with their reconstructions and scores.
        record, measures: entries of `metrics.json`, and how to print the metrics among them.
        class_names: for the page; empty where classes have numbers only.
        settings, unknown: configuration of the run as far as it is known, for `save`, and settings that are not.
        bounds: lower bounds on the error of any attack, or why there are none, by the number of the client.
    """

    batches: Sequence[ScoredBatch]
    record: Mapping[str, Scalar]
    measures: Sequence[Measure]
    class_names: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    unknown: Sequence[str] = ()
    bounds: Mapping[int, Mapping[str, Scalar]] = field(default_factory=dict)

    @cached_property
    def images(self) -> Tensor:
        """Reconstructed images `(n, c, h, w)` in [0, 1], each at the place of the target that it was matched with."""
        return torch.cat([part.scores.reconstructions for part in self.batches])

    @cached_property
    def targets(self) -> Tensor:
        """True images `(n, c, h, w)` in [0, 1]."""
        return torch.cat([part.batch.images.cpu() for part in self.batches])

    @cached_property
    def labels(self) -> Tensor:
        """True labels `(n,)`."""
        return torch.cat([part.batch.labels.cpu() for part in self.batches])

    @cached_property
    def recovered_labels(self) -> Tensor:
        """Labels `(n,)` that the attack recovered or was given, in the order of `images`."""
        return torch.cat([part.scores.recovered_labels for part in self.batches])

    @property
    def certified(self) -> list[bool | None]:
        """Whether the attack knows that an image of `images` is the true one; None where it gives no certificate."""
        return [own for part in self.batches for own in part.certified]

    @cached_property
    def nearest_public(self) -> Tensor | None:
        """The public image nearest to each target, `(n, c, h, w)`; None without public images."""
        found = [part.nearest_public for part in self.batches if part.nearest_public is not None]
        return torch.cat(found) if found else None

    @property
    def scores(self) -> dict[str, Tensor]:
        """Scores `(n,)` float64 of every image by metric; metrics that lack a value for some image are left out."""
        parts = [part.per_image for part in self.batches]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0] if all(key in part for part in parts)}

    @property
    def means(self) -> dict[str, Mean]:
        """Means over all images by metric."""
        return {measure.key: self._mean(measure.key) for measure in self.measures}

    @property
    def baselines(self) -> dict[str, dict[str, float | None]]:
        """Mean scores of guesses without the update, by guess and metric; empty without public images."""
        found = {}
        for name in (name for name in _BASELINES if f"baseline_{name}_rmse" in self.record):
            keys = {measure.key: f"baseline_{name}_{measure.key}" for measure in self.measures}
            found[name] = {short: self._number(key) for short, key in keys.items() if key in self.record}
        return found

    @property
    def notes(self) -> list[str]:
        notes = self.record.get("notes")
        return list(notes) if isinstance(notes, list) else []

    @property
    def curves(self) -> list[LossCurve]:
        """The loss of every batch and restart over the steps."""
        found = [(part.batch.index, enumerate(part.finished.curves)) for part in self.batches]
        return [LossCurve(index, restart, curve) for index, curves in found for restart, curve in curves if curve]

    def save(self, folder: Path | str, overwrite: bool = False) -> Path:
        """Write a run folder as `attack.py run` does, into a new or empty folder; returns the path of its page.

        Errors as for `RunFolder.open`: the folder holds a run, without `overwrite`, or other files.
        """
        unknown = ", ".join(("the images", "the model", *self.unknown))
        config = f"# Scored from Python. Not in this file, so that the command takes its defaults: {unknown}.\n"
        config += yaml.safe_dump(dict(self.settings), sort_keys=False)
        opened = RunFolder.open(folder, marked(config, "attack.py run"), overwrite)
        self.write(opened)
        return opened.report

    def write(self, folder: RunFolder) -> None:
        """Write all files. `metrics.json` is the last and marks the run as complete; the page is built from them."""
        write_tensors(
            folder,
            reconstructions=self.images,
            targets=self.targets,
            nearest_public=self.nearest_public,
            labels=self.labels,
            recovered_labels=self.recovered_labels,
            class_names=self.class_names,
            **_features(self.batches),
        )
        write_victims(folder, self.rows())
        write_losses(folder, self.curves)
        write_metrics(folder, self.record, self.measures)
        build_report(folder.path)

    def rows(self) -> list[VictimRow]:
        known = {key for part in self.batches for key in part.per_image}
        keys = [m.key for m in self.measures if m.key in known or self.record.get(m.key) is None]
        return [row for part in self.batches for row in _rows(part, keys, self._bound(part.batch.index))]

    def _bound(self, client: int) -> dict[str, float | None]:
        """Columns of a client's bounds; none where no client has any."""
        own = self.bounds.get(client, {})
        return {key: value if isinstance(value := own.get(key), float) else None for key in BOUNDS if self.bounds}

    def __str__(self) -> str:
        """A table of the metrics beside the baselines, and the notes."""
        baselines, scores = self.baselines, {key: values.tolist() for key, values in self.scores.items()}
        lines = [["", "mean", "95 % interval", *(_BASELINES[name] for name in baselines)]]
        for measure in self.measures:
            mean = self._mean(measure.key)
            interval = format_interval(measure, mean.low, mean.high, scores.get(measure.key, ()))
            guesses = [own.get(measure.key) for own in baselines.values()]
            shown = ["" if guess is None else format_score(measure, guess) for guess in guesses]
            text = f"{MISSING} ({mean.reason})" if mean.value is None else format_score(measure, mean.value)
            lines.append([f"{measure.name} {measure.better}".strip(), text, interval, *shown])
        widths = [max(len(line[column]) for line in lines if MISSING not in line[1]) for column in range(len(lines[0]))]
        sized = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        n, clients = len(self.labels), len(self.batches)
        title = f"{n} image{'s' * (n > 1)} of {clients} client{'s' * (clients > 1)}"
        if "n_certified" in self.record:
            title += f", {self.record['n_certified']} certified"
        alone = ["A single client gives no interval: the error of the means is unknown."] if clients == 1 else []
        return "\n".join([title, *sized, *(f"note: {note}" for note in (*alone, *self.notes))])

    __repr__ = __str__

    def _mean(self, key: str) -> Mean:
        std, low, high = (self._number(f"{key}_{end}") for end in ("std", "low", "high"))
        reason = str(self.record.get(f"{key}_reason") or "")
        return Mean(self._number(key), std, low, high, reason, recorded_error(self.record, key))

    def _number(self, key: str) -> float | None:
        value = self.record.get(key)
        return float(value) if isinstance(value, int | float) else None


def all_scored(module: UpdateAttackModule, victims: VictimDataModule, folder: RunFolder) -> list[ScoredBatch]:
    """Every batch of the run in order; those of other processes are read from their files and scored here."""
    own = {scored.batch.index: scored for scored in module.scored}
    others = [batch for batch in VictimBatches(victims.test, victims.batches) if batch.index not in own]
    if others:
        done = load_finished(folder.checkpoints)
        finished = [done[batch.index] for batch in others]
        scored = score_batches(finished, others, victims.public.images, module.scores.metrics)
        own |= {part.batch.index: part for part in scored}
    return [own[index] for index in sorted(own)]


def run_facts(scored: Sequence[ScoredBatch], device: str, notes: Sequence[str] = ()) -> dict[str, Scalar]:
    """Size, cost, machine and notes of a run, for its record; those in `notes` come first."""
    timed = sum(part.finished.timed_steps for part in scored)
    seconds = sum(part.finished.timed_seconds for part in scored)
    found = [note for part in scored for note in part.finished.reconstruction.notes]
    facts: dict[str, Scalar] = {
        "n": sum(len(part.batch.labels) for part in scored),
        "n_batches": len(scored),
        "seconds": sum(part.finished.seconds for part in scored),
        "seconds_per_iteration": seconds / timed if timed else None,
    }
    certified = [own for part in scored for own in part.certified]
    notes = list(notes)
    if any(own is not None for own in certified):
        errors = torch.cat([part.per_image["rmse"] for part in scored])
        facts |= certified_entries(torch.tensor([own is True for own in certified]), errors, "rmse")
        notes.append(_told(facts))
    if refused := [part for part in scored if part.finished.refused]:
        n, reasons = sum(len(part.batch.labels) for part in refused), {part.finished.refused: None for part in refused}
        facts |= {"n_refused": n, "refused_reason": "; ".join(reasons)}
        notes.append(f"For {n} of {facts['n']} images the mean public image stands in: {facts['refused_reason']}")
    if not timed:
        facts["seconds_per_iteration_reason"] = "the attack took a single step"
    return {**facts, "notes": list(dict.fromkeys([*notes, *found])), **environment(device)}


def _told(facts: Mapping[str, Scalar]) -> str:
    """A note on the certified images."""
    names = ("certified_rate", "certified_rmse", "certified_rmse_max")
    share, mean, largest = (value if isinstance(value := facts[name], float) else None for name in names)
    told = f"{percent(share)} of the reconstructions are certified: they passed the attack's own test"
    if mean is None:
        return f"{told}."
    return f"{told}. Their mean RMSE is {format_score('rmse', mean)}, the largest {format_score('rmse', largest)}."


def _features(scored: Sequence[ScoredBatch]) -> dict[str, torch.Tensor]:
    """Recovered features of all batches and the batch that each is of; empty where none were recovered."""
    found = [(part.batch.index, part.finished.reconstruction.features) for part in scored]
    rows = [(index, features) for index, features in found if features is not None]
    if not rows:
        return {}
    owners = [torch.full((len(features),), index) for index, features in rows]
    return {"features": torch.cat([features for _, features in rows]), "feature_batches": torch.cat(owners)}


def _rows(part: ScoredBatch, keys: Sequence[str], bound: dict[str, float | None]) -> list[VictimRow]:
    """One row per image of a batch, with these scores, the RMSE of the baselines, and the bounds of the batch."""
    own, batch = part.per_image, part.batch
    columns = {key: own.get(key) for key in keys} | {f"{name}_rmse": v["rmse"] for name, v in part.baselines.items()}
    recovered, loss, certified = part.scores.recovered_labels, part.finished.reconstruction.loss, part.certified
    rows = []
    for i, (identity, label) in enumerate(zip(batch.ids.tolist(), batch.labels.tolist(), strict=True)):
        scores = {name: None if values is None else float(values[i]) for name, values in columns.items()} | bound
        rows.append(VictimRow(batch.index, identity, label, int(recovered[i]), loss, scores, certified[i]))
    return rows
