"""What a study measures on a cell besides the attack: accuracy, gradients of the unknown images, and a layout."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import lit_recon._torchvision

import torch
from torch import Tensor

from lit_recon.attacks.released.access import ModelAccess
from lit_recon.attacks.released.diagnostics import along_training, embedded, neighbor_agreement
from lit_recon.attacks.shadow import ShadowPlan, ShadowStore
from lit_recon.attacks.shadow.engine import execution_of
from lit_recon.bounds import gaussian_bound
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import MissingDataError
from lit_recon.experiments.factors.settings import FactorsSettings, Measure
from lit_recon.experiments.rero.score import accuracies, losses
from lit_recon.io.files import write_text
from lit_recon.metrics.membership import area_under_roc
from lit_recon.reporting.run_folder import RunFolder

#: What every cell is measured by, and what only some are.
_Kind = Literal["models"] | Measure


@dataclass(frozen=True)
class Measures:
    """The measures of a finished cell.

    Args:
        study: how much is measured.
        view: what of a released model the attacker sees.
        plan: of the cell's models.
        split: of its images.
        public: images that the adversary holds besides the fixed set.
        folder: of its run.
    """

    study: FactorsSettings
    access: ModelAccess
    plan: ShadowPlan
    split: InformedSplit
    public: ImageSet
    folder: RunFolder

    def take(self, wanted: Iterable[Measure]) -> None:
        """Measure what is wanted and not there yet."""
        take = {"models": self._models, "gradients": self._gradients, "embedding": self._embedding}
        for kind in kinds_of(wanted):
            path = self.folder.path / file_of(kind)
            if not path.is_file():
                write_text(path, json.dumps(take[kind]()) + "\n")

    def _models(self) -> dict[str, Any]:
        """How well released models classify, and what privacy they have."""
        plan, descent = self.plan, self.plan.descent
        tried = self.split.targets.subset(torch.arange(min(self.study.tried, len(self.split.targets))))
        own = plan.known.n_parameters
        weights = (plan.reference() + self._released().read(tried)).float()[:, -own:]  # the last of several snapshots
        others = self.split.shadow if self.split.rest is None else self.split.rest
        # the last ones: more shadow targets take away the first
        test = others.subset(torch.arange(max(0, len(others) - self.study.test_images), len(others)))
        right, learned = accuracies(plan, weights, test), accuracies(plan, weights, self.split.fixed)
        found: dict[str, Any] = {"n_parameters": own, "n_tried": len(tried), "n_test_images": len(test)}
        for name, values in (("accuracy", right), ("train_accuracy", learned)):
            found |= {name: float(values.mean()), f"{name}_std": float(values.std()) if len(values) > 1 else 0.0}
        found["membership_auc"] = self._membership(weights, test)
        noise = 0.0 if descent.dp is None else descent.dp.noise(descent.steps)
        if descent.dp is not None and noise:
            mu = math.sqrt(descent.steps) / noise
            found |= {"epsilon": descent.dp.epsilon(descent.steps), "noise_multiplier": noise}
            found["bounds"] = [gaussian_bound(math.log(kappa), mu) for kappa in self.study.kappas]
        return found

    def _membership(self, weights: Tensor, others: ImageSet) -> float:
        """How well an image's loss tells members from others, as the area under the ROC, mean over the models.

        Source: the threshold attack on losses, which Balle et al. 2022 set beside theirs in table IX.
        """
        known = self.split.fixed
        scores = -torch.cat([losses(self.plan, weights, images) for images in (known, others)], dim=1).double()
        members = torch.arange(scores.shape[1]) < len(known)
        return fmean(area_under_roc(own.numpy(), members.double().numpy()).value for own in scores)

    def _gradients(self) -> dict[str, Any]:
        """The gradients of the unknown images along training."""
        chosen = self.split.targets.subset(torch.arange(min(self.study.gradient_targets, len(self.split.targets))))
        owners = dataclasses.replace(self.plan, purpose="released")
        found = along_training(owners, chosen, self.study.gradient_steps, execution_of(self._released().execution))
        return {
            "steps": found.steps,
            "norms": found.norms.tolist(),
            "zeros": {name: shares.tolist() for name, shares in found.zeros.items()},
        }

    def _embedding(self) -> dict[str, Any]:
        """The released models in the plane."""
        targets, labels = self.split.targets, self.split.targets.labels
        points = embedded(
            self._released().read(targets, self.access.feature_map(self.plan, self.public)), self.plan.seed
        )
        shares = torch.bincount(labels) / len(labels)
        return {
            "points": points.tolist(),
            "labels": labels.tolist(),
            "class_names": targets.class_names,
            "agreement": neighbor_agreement(points, labels),
            "chance": float(shares.square().sum()),
        }

    def _released(self) -> ShadowStore:
        owners, there = dataclasses.replace(self.plan, purpose="released"), self.folder.checkpoints / "released"
        store = ShadowStore.open(there, owners.description)
        if store is None:
            raise MissingDataError(f"{there} is not there: repeat the cell by deleting {self.folder.path}")
        return store


def kinds_of(wanted: Iterable[Measure]) -> list[_Kind]:
    """All that is measured on a cell."""
    return ["models", *sorted(wanted)]


def file_of(kind: _Kind) -> str:
    """Name of a measure's file in the cell's folder."""
    return f"{kind}.json"
