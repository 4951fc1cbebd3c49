"""Sources of images: bundled, downloaded, or the user's own."""

from __future__ import annotations

from lit_recon.data.sources.base import ImageSource
from lit_recon.data.sources.bundled import Digits, Photos
from lit_recon.data.sources.folder import ImageFolder
from lit_recon.data.sources.npz import Npz
from lit_recon.data.sources.published import CIFAR10, CIFAR100, MNIST

__all__ = ["CIFAR10", "CIFAR100", "MNIST", "Digits", "ImageFolder", "ImageSource", "Npz", "Photos"]
