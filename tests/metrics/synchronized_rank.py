"""One process of a group of two: scores its own share of the images and prints what the group agrees on.

Usage: `python synchronized_rank.py`, with the variables of torchrun.
"""

from __future__ import annotations

import json

import lit_recon._torchvision

import torch
from torch import distributed

from lit_recon.metrics.aggregate import ImageScore

#: What each rank scores: unequal shares, and one that is empty.
SHARES = {"psnr": ([10.0, 20.0, 30.0, 12.5], [41.0]), "rmse": ([0.25, 0.5], [])}


def main() -> None:
    """Join the group, score this rank's share, print the result of all."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    found: dict[str, object] = {}
    for name, shares in SHARES.items():
        score = ImageScore(name)
        score.update(torch.tensor(shares[rank]))
        found[name] = {key: value.item() for key, value in score.compute().items()}
        found[f"{name}_record"] = score.record()
    print(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
