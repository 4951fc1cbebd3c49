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

import torch

torch.set_num_threads(1)
