"""What all tests share: no network, no display, one thread, and a torchvision that can be imported."""

from __future__ import annotations

import os

# Before PyTorch is imported, and for the processes that tests start.
os.environ.update(
    {
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile here, not in processes that import PyTorch again
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
)

import lit_recon._torchvision

import pytest
import torch

torch.set_num_threads(1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every process that collects must give a test one name: pytest-xdist runs nothing otherwise."""
    if " at 0x" in item.nodeid:
        raise pytest.UsageError(f"{item.nodeid}: the name holds an address in memory; give the parameter an id")
    if item.get_closest_marker("slow"):
        # measuring coverage takes a quarter of their time, and quicker tests cover the same lines
        item.add_marker("no_cover")
