"""One process of a group of two: trains a small network by one of the modules and prints a fingerprint of its copy.

Usage: `python training_rank.py RANK PORT OUT KIND`, with KIND one of plain, identity, defended, private.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import lit_recon._torchvision

import torch
from pytorch_lightning import LightningDataModule

from lit_recon.data.sources import Digits
from lit_recon.defenses import Defense, GradientClipping
from lit_recon.models import Backbone, ConvNet
from lit_recon.modules.backbone import BackboneModule, DefendedBackboneModule, train_backbone
from lit_recon.modules.data import BackboneDataModule, PoissonDataModule
from lit_recon.modules.private import PrivacyPlan, PrivateBackboneModule
from lit_recon.privacy import PrivateDescent
from lit_recon.training.callbacks import training_callbacks
from lit_recon.training.module import SGDSchedule, TrainingModule
from lit_recon.training.trainer import TrainerSettings, build_trainer

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
        return module, PoissonDataModule(images(50), PLAN.sampling_rate, PLAN.steps_per_epoch)
    if kind == "plain":
        return BackboneModule(model("batch", rank), SCHEDULE), images(20)
    if kind == "identity":
        return DefendedBackboneModule(model("batch", rank), Defense(), SCHEDULE), images(20)
    return DefendedBackboneModule(model("group", rank), GradientClipping(BOUND), SCHEDULE), images(100)


def main(rank: int, port: str, out: Path, kind: str) -> None:
    """Train one epoch on this rank's share."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    module, data = build(kind, rank)
    callbacks = training_callbacks(out, [str(digit) for digit in range(10)], "", minutes=0.0)
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], callbacks, max_epochs=1)
    train_backbone(trainer, module, data, out)
    state = b"".join(value.numpy().tobytes() for value in module.model.state_dict().values())
    print(hashlib.sha256(state).hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
