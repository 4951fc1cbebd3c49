"""One process of a group of two: trains a small backbone and prints a fingerprint of its own copy.

Usage: `python backbone_rank.py RANK PORT OUT`.
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
from lit_recon.training.callbacks import training_callbacks
from lit_recon.training.trainer import TrainerSettings, build_trainer


def fingerprint(model: Backbone) -> str:
    """Of all parameters and buffers."""
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def main(rank: int, port: str, out: Path) -> None:
    """Train two epochs on this rank's share."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    data = BackboneDataModule(Digits(), padding=1, flip=False, n_train=200)
    torch.manual_seed(rank)  # the first process's weights count
    trunk = ConvNet((1, 8, 8), widths=[4, 8])
    model = Backbone(trunk, 10, data.normalization, WideFeatureLayer(trunk.out_features, 64, 32))
    callbacks = training_callbacks(out, data.class_names, data.split_hash, minutes=0.0)
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [], callbacks, max_epochs=2)
    train_backbone(trainer, BackboneModule(model), data, out)
    print(fingerprint(model))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
