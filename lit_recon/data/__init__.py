"""Images, where they come from, and how they are split into public data and victims."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lit_recon.data.dataset import ImageSet, measure_normalization
from lit_recon.data.sources.base import ImageSource
from lit_recon.data.sources.bundled import Digits, Photos
from lit_recon.data.sources.folder import ImageFolder
from lit_recon.data.sources.npz import Npz
from lit_recon.data.sources.published import CIFAR10, CIFAR100, MNIST
from lit_recon.data.splits import (
    Split,
    VictimBatch,
    content_hash,
    disjoint_split,
    hold_out,
    sample_victims,
    split_hash,
    victim_batches,
)

if TYPE_CHECKING:
    from lit_recon.data.informed_splits import InformedSplit, InformedSplitSettings, draw_informed_split
else:

    def __getattr__(name: str) -> object:
        """Names of attacks on released models, which other commands do not load."""
        if name in ("InformedSplit", "InformedSplitSettings", "draw_informed_split"):
            return getattr(import_module("lit_recon.data.informed_splits"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "Split",
    "VictimBatch",
    "content_hash",
    "disjoint_split",
    "draw_informed_split",
    "hold_out",
    "measure_normalization",
    "sample_victims",
    "split_hash",
    "victim_batches",
]
