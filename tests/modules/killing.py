"""Trainings that are killed, and the comparison of what they leave with what they should."""

from __future__ import annotations

import lit_recon._torchvision

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn


class KilledError(Exception):
    """Stands for a signal that ends the process."""


class Kill(Callback):
    """Ends training before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise KilledError


def assert_same(one: nn.Module, two: nn.Module) -> None:
    """Weights and buffers are equal bit for bit."""
    for (name, left), right in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
