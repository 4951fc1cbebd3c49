"""Images, where they come from, and how they are split into public data and victims."""

from __future__ import annotations

from lit_recon.data.dataset import ImageSet, measure_normalization
from lit_recon.data.sources import CIFAR10, CIFAR100, MNIST, Digits, ImageFolder, ImageSource, Npz, Photos
from lit_recon.data.splits import VictimBatch, content_hash, hold_out, sample_victims, victim_batches

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "Digits",
    "ImageFolder",
    "ImageSet",
    "ImageSource",
    "Npz",
    "Photos",
    "VictimBatch",
    "content_hash",
    "hold_out",
    "measure_normalization",
    "sample_victims",
    "victim_batches",
]
