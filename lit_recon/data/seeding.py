"""Independent random streams from one seed, told apart by what they are for."""

from __future__ import annotations

import hashlib

import torch


def seeded_generator(seed: int, *purpose: int | str) -> torch.Generator:
    """A CPU generator for one purpose, for example `seeded_generator(seed, "shuffle", epoch)`.

    Hashing keeps the streams apart where adding would not: seed 0 in epoch 1 is not seed 1 in epoch 0.
    """
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
