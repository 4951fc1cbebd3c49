"""One process of a group of two: trains a small network by one of the modules and prints a fingerprint of its copy.

Usage: `python training_rank.py OUT`, with the variables of torchrun; each kind of training gets a folder below OUT.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path

import lit_recon._torchvision

import torch
from pytorch_lightning import LightningDataModule

from lit_recon.data.sources import Digits
from lit_recon.defenses import Defense, GradientClipping
from lit_recon.models import Backbone, ConvNet
from lit_recon.modules.backbone import BackboneModule, DefendedBackboneModule, train_backbone
from lit_recon.modules.data import BackboneDataModule
from lit_recon.modules.private import PrivacyPlan, PrivateBackboneModule
from lit_recon.privacy import PrivateDescent
from lit_recon.training.module import LAST_CHECKPOINT, SGDSchedule, TrainingModule, training_callbacks
from lit_recon.training.trainer import TrainerSettings, build_trainer

KINDS = ("plain", "identity", "defended", "private")
#: A bound below the norm of every gradient: clipped before averaging or after it are two different things.
BOUND = 0.05
PLAN = PrivacyPlan(PrivateDescent(bound=0.5, noise_multiplier=0.0, delta=1e-3), 0.25, 50, 4)
SCHEDULE = SGDSchedule(lr=0.5, momentum=0.0, weight_decay=0.0)


def model(norm: str, seed: int = 0) -> Backbone:
    """The same on all processes, unless seeds differ: then the first one's weights count."""
    torch.manual_seed(seed)
    trunk = ConvNet((1, 8, 8), widths=[4, 8], norm=norm)  # type: ignore[arg-type]  # a text of the configuration
    return Backbone(trunk, 10, images(8).normalization)


def images(batch_size: int) -> BackboneDataModule:
    """Without augmentation, whose random numbers depend on the process."""
    return BackboneDataModule(Digits(), batch_size, augment=False, n_train=200)


def build(kind: str, rank: int) -> tuple[TrainingModule, LightningDataModule]:
    """What is trained, on what."""
    if kind == "private":
        module = PrivateBackboneModule(model("group", rank), PLAN, SCHEDULE)
        data = images(50)
        data.poisson = PLAN.sampling_rate, PLAN.steps_per_epoch
        return module, data
    if kind == "plain":
        return BackboneModule(model("batch", rank), SCHEDULE), images(20)
    if kind == "identity":
        return DefendedBackboneModule(model("batch", rank), Defense(), SCHEDULE), images(20)
    return DefendedBackboneModule(model("group", rank), GradientClipping(BOUND), SCHEDULE), images(100)


def main(out: Path) -> None:
    """Train one epoch of every kind, and print the fingerprints by kind."""
    warnings.simplefilter("error", UserWarning)
    print(json.dumps({kind: train(kind, out / kind) for kind in KINDS}))


def train(kind: str, out: Path) -> str:
    """Train one epoch on this rank's share; a fingerprint of the model."""
    rank = int(os.environ["RANK"])
    (out / LAST_CHECKPOINT).parent.mkdir(parents=True, exist_ok=True)
    module, data = build(kind, rank)
    callbacks = training_callbacks(out, [str(digit) for digit in range(10)], "", minutes=0.0)
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], callbacks, max_epochs=1)
    train_backbone(trainer, module, data, out)
    state = b"".join(value.numpy().tobytes() for value in module.model.state_dict().values())
    return hashlib.sha256(state).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
