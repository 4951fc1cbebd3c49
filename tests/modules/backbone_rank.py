"""One process of a group: trains a small backbone and prints a fingerprint of its own copy.

Usage: `python backbone_rank.py OUT [N]`, with the variables of torchrun; N: images per step and process, for a backbone
and data in which nothing depends on the process (no statistics of its batch, no augmentation).
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import lit_recon._torchvision

import torch

from lit_recon.data.sources import Digits
from lit_recon.models import Backbone, ConvNet, WideFeatureLayer
from lit_recon.modules.backbone import BackboneModule, train_backbone
from lit_recon.modules.data import BackboneDataModule
from lit_recon.training.module import training_callbacks
from lit_recon.training.trainer import TrainerSettings, build_trainer


def fingerprint(model: Backbone) -> str:
    """Of all parameters and buffers."""
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def main(out: Path, together: int | None = None) -> None:
    """Train two epochs on this rank's share."""
    data = BackboneDataModule(Digits(), padding=1, flip=False, n_train=200)
    torch.manual_seed(int(os.environ["RANK"]))  # the first process's weights count
    trunk = ConvNet((1, 8, 8), widths=[4, 8], norm="batch" if together is None else "group")
    model = Backbone(trunk, 10, data.normalization, WideFeatureLayer(trunk.out_features, 64, 32))
    if together is not None:
        data = BackboneDataModule(Digits(), together, augment=False, n_train=180)
        model = Backbone(trunk, 10, data.normalization)
    callbacks = training_callbacks(out, data.class_names, data.split_hash, minutes=0.0)
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], callbacks, max_epochs=2)
    train_backbone(trainer, BackboneModule(model), data, out)
    print(fingerprint(model))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
