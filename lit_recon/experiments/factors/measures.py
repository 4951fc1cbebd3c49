"""Measures of a factor study besides the attack's scores: accuracy, gradients, embeddings, transfer to other data."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lit_recon._torchvision

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from lit_recon.attacks.released.access import FeatureExtractor, ModelAccess
from lit_recon.attacks.released.diagnostics import along_training, embedded, neighbor_agreement
from lit_recon.attacks.released.ensemble import Adapted
from lit_recon.attacks.shadow import Plan, ShadowPlan, ShadowStore
from lit_recon.attacks.shadow.engine import execution_of
from lit_recon.bounds import gaussian_bound
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import ConfigError
from lit_recon.experiments.factors.settings import FactorsSettings, Measure, TransferSettings
from lit_recon.experiments.released_attack.score import model_facts, released_store, score_targets, write_reconn
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.experiments.rero.score import accuracies, membership_auc
from lit_recon.experiments.train.shadows import store_folder
from lit_recon.io.files import write_text
from lit_recon.modules.shadows import train_store
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.stopwatch import Stopwatch
from lit_recon.training.trainer import build_trainer


@dataclass(frozen=True)
class Measures:
    """The measures of a finished cell; `public` are the images that the adversary holds besides the fixed set."""

    study: FactorsSettings
    access: ModelAccess
    plan: ShadowPlan
    split: InformedSplit
    public: ImageSet
    folder: RunFolder

    def take(self, wanted: Iterable[Measure]) -> None:
        """Take the requested measures that are missing."""
        take = {"models": self._models, "gradients": self._gradients, "embedding": self._embedding}
        for name in files_of(wanted):
            path = self.folder.path / name
            if not path.is_file():
                write_text(path, json.dumps(take[path.stem]()) + "\n")

    @property
    def _released(self) -> ShadowStore:
        return released_store(self.plan, self.folder)

    def _models(self) -> dict[str, Any]:
        """Accuracy and privacy of the released models."""
        plan, descent = self.plan, self.plan.descent
        tried = _first(self.split.targets, self.study.tried)
        own = plan.known.n_parameters
        weights = (plan.reference() + self._released.read(tried)).float()[:, -own:]  # the last of several snapshots
        others = self.split.unseen
        # the last ones: more shadow targets take away the first
        test = others.subset(torch.arange(max(0, len(others) - self.study.test_images), len(others)))
        right, learned = accuracies(plan, weights, test), accuracies(plan, weights, self.split.fixed)
        found: dict[str, Any] = {"n_parameters": own, "n_tried": len(tried), "n_test_images": len(test)}
        for name, values in (("accuracy", right), ("train_accuracy", learned)):
            found |= {name: float(values.mean()), f"{name}_std": float(values.std()) if len(values) > 1 else 0.0}
        found["membership_auc"] = membership_auc(plan, weights, self.split.fixed, test)
        noise = 0.0 if descent.dp is None else descent.dp.noise(descent.steps)
        if descent.dp is not None and noise:
            mu = math.sqrt(descent.steps) / noise
            found |= {"epsilon": descent.dp.epsilon(descent.steps), "noise_multiplier": noise}
            found["bounds"] = [gaussian_bound(math.log(kappa), mu) for kappa in self.study.kappas]
        return found

    def _gradients(self) -> dict[str, Any]:
        """The gradients of the unknown images along training."""
        chosen = _first(self.split.targets, self.study.gradient_targets)
        owners = self.plan.for_purpose("released")
        found = along_training(owners, chosen, self.study.gradient_steps, execution_of(self._released.execution))
        return {
            "steps": found.steps,
            "norms": found.norms.tolist(),
            "zeros": {name: shares.tolist() for name, shares in found.zeros.items()},
        }

    def _embedding(self) -> dict[str, Any]:
        """A two-dimensional embedding of the released models."""
        targets, labels = self.split.targets, self.split.targets.labels
        features = self._released.read(targets, self.access.feature_map(self.plan, self.public))
        points = embedded(features, self.plan.seed)
        counts, n = torch.bincount(labels).double(), len(labels)
        return {
            "points": points.tolist(),
            "labels": labels.tolist(),
            "class_names": targets.class_names,
            "agreement": neighbor_agreement(points, labels),
            "chance": float((counts * (counts - 1)).sum()) / (n * (n - 1)),  # a neighbor is another point
        }


def _first(images: ImageSet, n: int) -> ImageSet:
    return images.subset(torch.arange(min(n, len(images))))


def files_of(wanted: Iterable[Measure]) -> list[str]:
    """Names of the files of all that is measured on a cell: `models` on every cell, the others on request."""
    return [f"{kind}.json" for kind in ("models", *sorted(wanted))]


@dataclass(frozen=True)
class Transfer:
    """A cell with a transfer to another fixed set; `old` is the split of the shadow models before it."""

    how: TransferSettings
    base: ReconnSettings
    shadows: ShadowSettings
    old: InformedSplit

    @property
    def split(self) -> InformedSplit:
        """The new fixed set, the same targets, and as many shadow targets as new models; ConfigError for too few."""
        old, n = self.old, len(self.old.fixed)
        left = 0 if old.rest is None else len(old.rest)
        if old.rest is None or left < n:
            raise ConfigError(
                f"another fixed set needs {n} images that are in no part of the split; got {left}: lower split.shadow, "
                "split.fixed or split.targets"
            )
        if self.how.shadows > len(old.shadow):
            raise ConfigError(
                f"transfer.shadows must be at most split.shadow={len(old.shadow)}; got {self.how.shadows}"
            )
        used = self.how.shadows or len(old.shadow)
        end = used if old.foreign else len(old.shadow)
        spare = [old.fixed.images, old.rest.images[n:], old.shadow.images[used:end]]
        labels = [old.fixed.labels, old.rest.labels[n:], old.shadow.labels[used:end]]
        rest = dataclasses.replace(old.rest, images=torch.cat(spare), labels=torch.cat(labels))
        fixed = old.rest.subset(torch.arange(n), f"{old.fixed.name}, another")
        return dataclasses.replace(old, fixed=fixed, shadow=_first(old.shadow, used), rest=rest)

    @property
    def held(self) -> list[ImageSet]:
        """Images that the adversary holds: those of the new models and, to adapt a reconstructor, of the old ones."""
        split, old = self.split, self.old
        return [split.fixed, split.shadow] if self.how.way == "scratch" else [split.fixed, old.fixed, old.shadow]

    def attack(self, plan: ShadowPlan, state: Path | None = None) -> ReconnSettings:
        """The attack, by `ReconnSettings.bind`; a transferred reconstructor is not given the training of either set."""
        scratch = self.how.way == "scratch"
        return self.base.bind(plan, len((self.split if scratch else self.old).shadow), state, alike=scratch)

    def run(self, folder: RunFolder) -> None:
        """Train the missing models, attack, and write the files of a run into an open folder."""
        with Stopwatch(folder) as watch:
            trainer, split = build_trainer(self.shadows.trainer, loggers=[], float64=True), self.split
            device = str(trainer.strategy.root_device)
            plan = self.shadows.plan(split, device)
            owners = plan.for_purpose("released")
            base, shadow = self.attack(plan, folder.checkpoints / "reconstructor"), self.old.shadow
            feature_map = base.access.feature_map(plan, shadow)
            differences = observed = self._trained(trainer, owners, split.targets, feature_map, folder)
            facts = model_facts(base, self.shadows, split, plan, shadow)
            facts |= {"n_features": observed.shape[1], "n_shadow": self.how.shadows}
            used: list[tuple[str, Plan, ImageSet]] = []
            if self.how.shadows:
                models = self.shadows.shadow_models(plan, split)
                differences = self._trained(trainer, models, split.shadow, feature_map)
                used = [("", models, split.shadow)]
            if self.how.way == "adapted":
                facts |= {"n_fixed_before": len(self.old.fixed), "n_shadow_before": len(shadow)}
                before = self.shadows.plan(self.old, device)
                models = self.shadows.shadow_models(before, self.old)
                known = self._trained(trainer, models, shadow, base.access.feature_map(before, shadow))
                used = [("First training set: ", models, shadow), *used]
                fitted = base.reconstructor.fitted(known, shadow.pixels(), shadow.labels, split.fixed.n_classes)
                learner = base.reconstructor if self.how.shadows else None
                base = dataclasses.replace(base, reconstructor=Adapted(fitted, learner))
            held = torch.cat([part.images for part in self.held])
            outcome = score_targets(base, split, differences, observed, held)
            for of, models, images in used:
                there, n = store_folder(self.shadows, models, images), len(images)
                facts |= models.facts(there, n)
                outcome.notes.extend(f"{of}{note}" for note in models.notes(there, n))
            facts |= {"seconds": watch.seconds, **environment(device)}
            write_reconn(folder, split, outcome, facts)

    def _trained(
        self,
        trainer: Trainer,
        plan: Plan,
        images: ImageSet,
        feature_map: FeatureExtractor,
        folder: RunFolder | None = None,
    ) -> Tensor:
        """Observations of the models of these images, stored below a run's folder or, without one, in the cache."""
        shadows = self.shadows
        there = store_folder(shadows, plan, images) if folder is None else folder.checkpoints / "released"
        store = train_store(trainer, plan, images, there, shadows.execution, shadows.shard_size)
        return store.read(images, feature_map)
