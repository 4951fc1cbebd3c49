"""Seconds to complete a gradient with hidden entries, over one singular value decomposition of the whole matrix.

    python -m benchmarks.completion [--rounds 3] [--threads 1]

The matrices have the size of a convolution's gradient in the fourth stage of a ResNet-18, `(512, 4608)`, the rank of
its patches for batches of 1 and 4, singular values that fall fortyfold, and entries hidden at random. Both run in turn
in one process, in seconds of processor time.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch import Tensor

from benchmarks.record import Record, Row, alternate, ratios, spread
from lit_recon.attacks.updates.feature_maps.completion import CompletedMatrix, complete

ROWS, COLUMNS = 512, 4608
#: Rank, and the share of the entries that is observed.
CELLS = ((16, 0.5), (16, 0.1), (64, 0.5), (64, 0.3))


def matrix(rank: int, seed: int = 0) -> Tensor:
    """A random matrix `(ROWS, COLUMNS)` of a rank, in the single precision of gradients, as float64."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in (ROWS, COLUMNS))
    scales = torch.logspace(0, -1.6, rank, dtype=torch.float64)
    return ((torch.linalg.qr(left)[0] * scales) @ torch.linalg.qr(right)[0].T).float().double()


def measure(rank: int, share: float, rounds: int) -> Row:
    """The ratio, and how far the completed row space is from the true one."""
    values = matrix(rank)
    observed = torch.rand(values.shape, generator=torch.Generator().manual_seed(1)) < share
    variants = {
        "svd": partial(torch.linalg.svd, values, full_matrices=False),
        "completion": partial(complete, values, observed, rank),
    }
    seconds = alternate(variants, rounds, time.process_time)
    found = complete(values, observed, rank)
    row: Row = {"rank": rank, "observed": share, "completed": isinstance(found, CompletedMatrix)}
    if isinstance(found, CompletedMatrix):
        known, basis = values[:, found.known], found.basis[found.known]
        outside = known - (known @ basis) @ basis.T
        row["known_columns"] = int(found.known.sum())
        row["outside"] = float(f"{float(outside.norm() / known.norm()):.1g}")
    times = {name: spread(own) for name, own in seconds.items()}
    return {**row, "ratio": ratios(seconds, "svd")["completion"], "seconds": times}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with Record("completion", vars(arguments)) as record:
        for rank, share in CELLS:
            own = {"rank": rank, "observed": share}
            record.measure(own, partial(measure, rank, share, arguments.rounds))


if __name__ == "__main__":
    main()
