"""Success rates of each cell of a study of reconstruction robustness, beside the bounds that apply to them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import lit_recon._torchvision

import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from lit_recon.attacks.released.diagnostics import identified
from lit_recon.attacks.shadow import ShadowPlan
from lit_recon.attacks.shadow.training import unflatten
from lit_recon.data import ImageSet
from lit_recon.data.dataset import seeded_generator
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.experiments.released_attack.score import released_store
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.rero.bounds import (
    Bounds,
    PriorSpec,
    bounds,
    equivalence_row,
    full_batch,
    priors,
    sampled_rows,
)
from lit_recon.experiments.rero.page import RECORD, TABLE, verdicts
from lit_recon.experiments.rero.settings import ReroCell, ReroSettings
from lit_recon.io.files import write_text
from lit_recon.measures import MEASURES, Measure
from lit_recon.metrics.membership import area_under_roc, binomial_rate
from lit_recon.modules.shadows import train_store
from lit_recon.reporting.record import read_metrics, read_victims
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar, csv_text

#: Released models that are tried on test images.
_TRIED = 20
_BOUNDS = tuple(field.name for field in dataclasses.fields(Bounds))


class CellEvaluator:
    """Measures the cells of a study, whose targets and priors are the same; `shadows` leaves the privacy open."""

    def __init__(
        self, settings: ReroSettings, shadows: ShadowSettings, split: InformedSplit, folder: RunFolder
    ) -> None:
        self.settings, self.shadows, self.split, self.folder = settings, shadows, split, folder
        self.test = split.unseen.subset(torch.arange(min(settings.test_images, len(split.unseen))))
        images = [split.targets.pixels()]
        missing = settings.prior.samples - len(split.targets)
        if missing > 0 and split.rest is not None:
            images.append(split.rest.subset(torch.arange(min(missing, len(split.rest)))).pixels())
        self.samples = torch.cat(images)[: settings.prior.samples].flatten(1).double().numpy()
        self.priors = priors(settings.prior, self.samples)

    def measure(self, cell: ReroCell, own: ShadowSettings, done: RunFolder, trainer: Trainer) -> dict[str, Any]:
        """The metrics of a cell, as JSON content, from its finished run `done`; `own` are its shadow models."""
        plan = own.plan(self.split, str(trainer.strategy.root_device))
        observed = released_store(plan, done).read(self.split.targets)
        correct = accuracies(plan, (plan.reference() + observed[:_TRIED]).float(), self.test)
        metrics = read_metrics(done.metrics)
        found: dict[str, Any] = {
            "name": cell.name,
            "title": cell.title,
            "folder": cell.folder,
            "epsilon": cell.epsilon,
            "n": len(observed),
            **{key: metrics[key] for key in ("mse", "mse_std", "baseline_mean_image_mse", "oracle_mse", "seconds")},
            "accuracy": float(correct.mean()),
            "accuracy_std": float(correct.std()) if len(correct) > 1 else 0.0,
        }
        limits: list[Bounds | None] = [None] * len(self.priors)
        if cell.epsilon is not None:
            budget = self.settings.budget
            training = full_batch(budget, cell.epsilon, own.descent.steps)
            epsilon = training.epsilon(budget.delta)
            limits = [bounds(training, epsilon, budget.delta, prior.baseline.log_kappa) for prior in self.priors]
            found["noise_multiplier"] = training.noise_multiplier
            found["equivalence"] = equivalence_row(training, cell.epsilon)
        errors = torch.tensor([row.scores["mse"] for row in read_victims(done.victims)], dtype=torch.float64)
        expected = self._expected(plan, trainer) if own.descent.dp is not None else None
        found["comparisons"] = [
            comparison(prior, self._won(prior, errors, observed, expected), limit)
            for prior, limit in zip(self.priors, limits, strict=True)
        ]
        return found

    def _won(self, prior: PriorSpec, errors: Tensor, observed: Tensor, expected: Tensor | None) -> Tensor | None:
        if not prior.is_drawn_from:
            return None
        if prior.threshold is not None:
            return errors <= prior.threshold
        if expected is None or prior.candidates is None:
            return None
        generator = seeded_generator(self.shadows.seed, "candidates", prior.candidates)
        return identified(observed, expected, prior.candidates, generator)

    def _expected(self, plan: ShadowPlan, trainer: Trainer) -> Tensor:
        """The targets' models under the same clipping, without noise; trained once for all budgets."""
        quiet = plan.without_noise.for_purpose("candidate")
        there, targets, shadows = self.folder.checkpoints / "candidates", self.split.targets, self.shadows
        what = "candidates' models"
        return train_store(trainer, quiet, targets, there, shadows.execution, shadows.shard_size, what).read(targets)

    def record(self, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Everything that the page shows."""
        budget, sampled, steps = self.settings.budget, self.settings.sampled, self.shadows.descent.steps
        curve = [
            {"epsilon": epsilon, "mu": math.sqrt(steps) / full_batch(budget, epsilon, steps).noise_multiplier}
            for epsilon in _grid(budget.epsilons)
        ]
        return {
            "cells": list(cells),
            "priors": [{"name": prior.name, **prior.description} for prior in self.priors],
            "curve": curve,
            "sampled": [] if sampled is None else sampled_rows(sampled, budget, steps, self.shadows.seed),
            "n_prior_samples": len(self.samples),
            "n_test_images": len(self.test),
            "steps": steps,
        }


def accuracies(plan: ShadowPlan, weights: Tensor, images: ImageSet) -> Tensor:
    """Share of images that each model classifies correctly, `(m,)`, of weights `(m, p)`."""
    right = [(logits.argmax(1) == images.labels).double().mean() for logits in _logits(plan, weights, images)]
    return torch.stack(right)


def losses(plan: ShadowPlan, weights: Tensor, images: ImageSet) -> Tensor:
    """Cross-entropy of each model on every image in nats, `(m, n)`, of weights `(m, p)`."""
    found = [F.cross_entropy(logits, images.labels, reduction="none") for logits in _logits(plan, weights, images)]
    return torch.stack(found)


def membership_auc(plan: ShadowPlan, weights: Tensor, known: ImageSet, others: ImageSet) -> float:
    """Area under the ROC of a threshold on an image's loss, mean over models `(m, p)`; Balle et al. 2022, table IX."""
    scores = -torch.cat([losses(plan, weights, images) for images in (known, others)], dim=1).double()
    members = torch.arange(scores.shape[1]) < len(known)
    return fmean(area_under_roc(own.numpy(), members.double().numpy()).value for own in scores)


@torch.no_grad()
def _logits(plan: ShadowPlan, weights: Tensor, images: ImageSet) -> list[Tensor]:
    """Of each model, `(n, k)`."""
    pixels = images.pixels()
    return [functional_call(plan.network, unflatten(plan.network, own), pixels) for own in weights]


def comparison(prior: PriorSpec, won: Tensor | None, limits: Bounds | None) -> dict[str, Any]:
    """A cell's success rate `(m,)` with its 95 % interval, beside the bounds, as JSON content; None where not known.

    `below` is false where the whole interval lies above a certified bound.
    """
    found: dict[str, Any] = {"prior": prior.name, **prior.description}
    found |= dict.fromkeys((*_BOUNDS, "n", "success_rate", "low", "high", "below"))
    if limits is not None:
        found |= dataclasses.asdict(limits)
    if won is not None:
        successes, n = int(won.sum()), len(won)
        rate = binomial_rate(successes, n)
        found |= {"n": n, "success_rate": rate.value, "low": rate.low, "high": rate.high}
        if limits is not None and prior.is_certified:
            found["below"] = rate.low <= limits.tight
    return found


def _grid(epsilons: Sequence[float]) -> list[float]:
    """Epsilons of a curve, eight per decade, including the given ones."""
    low, high = math.floor(math.log10(min(epsilons))), math.ceil(math.log10(max(epsilons)))
    if low == high:  # a single budget, at a power of ten
        low, high = low - 1, high + 1
    drawn = [10 ** (index / 8) for index in range(8 * low, 8 * high + 1)]
    return sorted({*drawn, *epsilons})


def write_record(folder: RunFolder, record: Mapping[str, Any]) -> None:
    """Write the record and its table, one row per cell and prior."""
    write_text(folder.path / RECORD, json.dumps(record, indent=1) + "\n")
    of_cell = ["epsilon", "noise_multiplier", "mse", "accuracy"]
    of_prior = ["prior", "threshold", "candidates", "log10_kappa", *_BOUNDS, "success_rate", "low", "high", "n"]
    of_prior += ["below", "caveat"]
    rows = (
        [cell["name"], *map(cell.get, of_cell), *map(row.get, of_prior)]
        for cell in record["cells"]
        for row in cell["comparisons"]
    )
    write_text(folder.path / TABLE, csv_text(["cell", *of_cell, *of_prior], rows))


def study_metrics(record: Mapping[str, Any]) -> dict[str, Scalar]:
    """Scalar metrics of the study under flat keys."""
    cells = record["cells"]
    found: dict[str, Scalar] = {}
    for cell in cells:
        keys = ["mse", "mse_std", "accuracy", "accuracy_std"]
        keys += [] if cell["epsilon"] is None else ["noise_multiplier"]
        found |= {f"{cell['name']}.{key}": cell[key] for key in keys}
        found |= {
            f"{cell['name']}.success_rate_{_criterion(row)}": row["success_rate"]
            for row in cell["comparisons"]
            if row["success_rate"] is not None
        }
    found |= {key: cells[0][key] for key in ("n", "baseline_mean_image_mse", "oracle_mse")}
    compared, idle = verdicts(record)
    return {**found, "comparisons": len(compared), "comparisons_below": sum(compared), "comparisons_idle": idle}


def measures(record: Mapping[str, Any]) -> list[Measure]:
    """How to print the errors, accuracies and success rates among these metrics."""
    found = []
    for cell in record["cells"]:
        name, of = cell["name"], f", {cell['title']}"
        found.append(dataclasses.replace(MEASURES["mse"], key=f"{name}.mse", name=f"MSE{of}"))
        rates = {"accuracy": "Accuracy"}
        for row in cell["comparisons"]:
            if row["success_rate"] is not None:
                rates[f"success_rate_{_criterion(row)}"] = f"Success, {_criterion(row).replace('_', ' ')}"
        found += [
            Measure(f"{name}.{key}", words + of, key == "accuracy" or None, 1, "%") for key, words in rates.items()
        ]
    return found


def _criterion(row: Mapping[str, Any]) -> str:
    """The criterion of success, as part of a key."""
    return f"of_{row['candidates']}" if row["threshold"] is None else f"mse_{row['threshold']:g}"
