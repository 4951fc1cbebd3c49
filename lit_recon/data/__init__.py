"""Images, where they come from, and how they are split into public data and victims."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lit_recon.data.dataset import ImageSet, measure_normalization
from lit_recon.data.sources import CIFAR10, CIFAR100, MNIST, Digits, ImageFolder, ImageSource, Npz, Photos
from lit_recon.data.splits import VictimBatch, content_hash, hold_out, sample_victims, victim_batches

if TYPE_CHECKING:
    from lit_recon.data.informed_splits import InformedSplit, InformedSplitSettings, draw_informed_split

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "Digits",
    "ImageFolder",
    "ImageSet",
    "ImageSource",
    "InformedSplit",
    "InformedSplitSettings",
    "Npz",
    "Photos",
    "VictimBatch",
    "content_hash",
    "draw_informed_split",
    "hold_out",
    "measure_normalization",
    "sample_victims",
    "victim_batches",
]

#: Names of a module that attacks on updates have no use for; it is imported on first use.
_INFORMED = ("InformedSplit", "InformedSplitSettings", "draw_informed_split")


def __getattr__(name: str) -> Any:
    if name in _INFORMED:
        return getattr(importlib.import_module("lit_recon.data.informed_splits"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
