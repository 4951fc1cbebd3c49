"""One process of a group of two: trains on, validates and attacks its own share, and prints which images that was.

Usage: `python victims_rank.py ARCHIVE`, with the variables of torchrun; the archive's images are constant and equal to
their index.
"""

from __future__ import annotations

import json
import sys

import lit_recon._torchvision

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lit_recon.data import VictimBatch
from lit_recon.data.sources import Npz
from lit_recon.modules.data import BackboneDataModule, VictimDataModule


class Witness(pl.LightningModule):
    """A classifier with BatchNorm, whose buffers are broadcast in every forward pass, that notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
        self.net(torch.zeros(2, 1, 4, 4))
        self.seen: dict[str, list[list[int]]] = {"train": [], "validate": [], "victims": []}

    def note(self, kind: str, images: Tensor) -> Tensor:
        self.seen[kind].append((images[:, 0, 0, 0] * 255).round().int().tolist())
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.note("train", images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.note("validate", batch[0])

    def test_step(self, batch: VictimBatch) -> None:
        self.note("victims", batch.images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(archive: str) -> None:
    """Run one epoch and one test on this rank's share."""
    source = Npz(archive)  # type: ignore[arg-type]  # text is fine
    witness = Witness()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(witness, datamodule=BackboneDataModule(source, batch_size=8, augment=False))
    trainer.test(witness, datamodule=VictimDataModule(source, n_victims=10, batch_size=2, pool="all"))
    print(json.dumps(witness.seen))


if __name__ == "__main__":
    main(sys.argv[1])
