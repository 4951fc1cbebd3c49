"""One process of a group of two: trains a small backbone and prints a fingerprint of its own copy.

Usage: `python backbone_rank.py OUT`, with the variables of torchrun.
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


def main(out: Path) -> None:
    """Train two epochs on this rank's share."""
    data = BackboneDataModule(Digits(), padding=1, flip=False, n_train=200)
    torch.manual_seed(int(os.environ["RANK"]))  # the first process's weights count
    trunk = ConvNet((1, 8, 8), widths=[4, 8])
    model = Backbone(trunk, 10, data.normalization, WideFeatureLayer(trunk.out_features, 64, 32))
    callbacks = training_callbacks(out, data.class_names, data.split_hash, minutes=0.0)
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], callbacks, max_epochs=2)
    train_backbone(trainer, BackboneModule(model), data, out)
    print(fingerprint(model))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
