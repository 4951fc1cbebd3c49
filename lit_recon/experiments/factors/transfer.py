"""A cell about transfer: released models of another fixed set than the one that a reconstructor learned from."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import lit_recon._torchvision

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from lit_recon.attacks.released.access import FeatureExtractor
from lit_recon.attacks.released.ensemble import Adapted
from lit_recon.attacks.shadow import Plan, ShadowPlan
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import ConfigError
from lit_recon.experiments.factors.settings import TransferSettings
from lit_recon.experiments.released_attack.score import score_targets, write_reconn
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.experiments.train.shadows import store_folder
from lit_recon.modules.shadows import train_store
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar
from lit_recon.training.trainer import build_trainer


@dataclass(frozen=True)
class Transfer:
    """One such cell.

    Args:
        how: what the adversary has of the new fixed set.
        base: of the attack.
        shadows: of the shadow models of the old fixed set.
        old: the split that they are trained on.
    """

    how: TransferSettings
    base: ReconnSettings
    shadows: ShadowSettings
    old: InformedSplit

    @property
    def split(self) -> InformedSplit:
        """The new fixed set, with the same targets and as many of the shadow targets as there are new models of.

        Raises:
            ConfigError: too few images are left for another fixed set.
        """
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
        spare = [old.fixed.images, old.rest.images[n:], old.shadow.images[used:]]
        labels = [old.fixed.labels, old.rest.labels[n:], old.shadow.labels[used:]]
        rest = dataclasses.replace(old.rest, images=torch.cat(spare), labels=torch.cat(labels))
        return InformedSplit(
            old.rest.subset(torch.arange(n), f"{old.fixed.name}, another"),
            old.shadow.subset(torch.arange(used)),
            old.targets,
            rest,
            old.pretraining,
        )

    def attack(self, plan: ShadowPlan, state: Path | None = None) -> ReconnSettings:
        """The attack; a reconstructor that is taken from one fixed set to another knows the training of neither.

        Args:
            plan: of the models of the new fixed set.
            state: see `ReconnSettings.bind`.

        Raises:
            LitReconError: the reconstructor needs something else.
        """
        return self.base.bind(plan if self.how.way == "scratch" else None, state)

    def run(self, folder: RunFolder) -> None:
        """Train what is missing, attack, and leave the files of a run in a folder that is open."""
        started = time.perf_counter()
        trainer, split = build_trainer(self.shadows.trainer, loggers=[]), self.split
        device = str(trainer.strategy.root_device)
        plan = self.shadows.plan(split, device)
        owners = dataclasses.replace(plan, purpose="released")
        base, shadow = self.attack(plan, folder.checkpoints / "reconstructor"), self.old.shadow
        feature_map = base.access.feature_map(plan, shadow)
        differences = observed = self._trained(trainer, owners, split.targets, feature_map, folder)
        if self.how.shadows:
            models = self.shadows.shadow_models(plan, split)
            differences = self._trained(trainer, models, split.shadow, feature_map)
        if self.how.way == "adapted":
            before = self.shadows.plan(self.old, device)
            models = self.shadows.shadow_models(before, self.old)
            known = self._trained(trainer, models, shadow, base.access.feature_map(before, shadow))
            fitted = base.reconstructor.fitted(known, shadow.pixels(), shadow.labels, split.fixed.n_classes)
            learner = base.reconstructor if self.how.shadows else None
            base = dataclasses.replace(base, reconstructor=Adapted(fitted, learner))
        facts: dict[str, Scalar] = {
            "seed": self.shadows.seed,
            "split_hash": split.hash,
            "n_fixed": len(split.fixed),
            "n_shadow": self.how.shadows,
            "seconds": time.perf_counter() - started,
            **environment(device),
        }
        write_reconn(folder, split, score_targets(base, split, differences, observed), facts)

    def _trained(
        self,
        trainer: Trainer,
        plan: Plan,
        images: ImageSet,
        feature_map: FeatureExtractor,
        folder: RunFolder | None = None,
    ) -> Tensor:
        """What is seen of the models of these images, kept below a run's folder or, without one, in the cache."""
        there = store_folder(self.shadows, plan) if folder is None else folder.checkpoints / "released"
        shadows = self.shadows
        return train_store(trainer, plan, images, there, shadows.execution, shadows.shard_size).read(
            images, feature_map
        )
