"""Shadow models of a convolutional network that are not trained: error and time beside training them.

    python -m benchmarks.sampled_shadows --cifar10 FILE.npz [--known 1000 5000] [--models 6] [--shares 0.02 0.05 0.1]
        [--ranks 300 600]

From some of the fixed images per step, and by linear response in gradients along the path, of several ranks; that takes
some seconds once, whatever the number of models.

Network and training are the paper's for CIFAR-10, [Balle2022] tables V and VI. Seconds are of processor time and per
model. An interrupted call goes on with the rows that are missing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.record import Record, Row, spread
from lit_recon.attacks.shadow import GradientDescent, ShadowPlan, deltas, train_models, train_reference
from lit_recon.attacks.shadow.engine import full_batch_path
from lit_recon.attacks.shadow.path_response import PathResponse, ResponseSettings
from lit_recon.attacks.shadow.sampled_response import respond_by_samples
from lit_recon.data import InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Npz
from lit_recon.models.released import ReleasedCNN

T = TypeVar("T")


class Comparison:
    """A training on `n` fixed images, and `models` shadow models of it."""

    def __init__(self, source: Path, n: int, models: int, steps: int = 100) -> None:
        split = draw_informed_split(Npz(source), InformedSplitSettings(fixed=n, shadow=models, targets=1))
        plan = ShadowPlan(ReleasedCNN(), split.fixed, GradientDescent(steps, lr=0.01))
        self.known, self.start = plan.known, plan.initial_weights()
        self.images, self.labels = split.shadow.pixels(), split.shadow.labels

    @cached_property
    def path(self) -> Tensor:
        """Weights of the reference before each step, `(t, p)`."""
        return torch.stack(list(full_batch_path(self.known, self.start)))

    @cached_property
    def exact(self) -> tuple[Tensor, list[float]]:
        """Differences of models that are trained, `(s, p)`, and the seconds of each."""
        reference = train_reference(self.known, self.start)
        models = zip(self.images.split(1), self.labels.split(1), strict=True)
        found = [_timed(partial(train_models, self.known, self.start, *own, "loop")) for own in models]
        return torch.cat([deltas(weights, reference).float() for weights, _ in found]), [spent for _, spent in found]

    def measure(self, share: float) -> Row:
        """Relative errors of the models approximated from a share of the fixed images, and seconds of a model."""
        size = round(share * len(self.known.images))
        compute = partial(respond_by_samples, self.known, self.path, self.images, self.labels, size)
        near, spent = _timed(compute)
        return {"images": size, **self._row(near, spent)}

    def respond(self, rank: int) -> Row:
        """The same by linear response in gradients of own images along the path."""
        settings = ResponseSettings(rank)
        response, once = _timed(partial(PathResponse.of, self.known, self.start, settings))
        near, spent = _timed(partial(response.differences, self.images, self.labels))
        return {"steps": settings.steps, "images": settings.images, "seconds_once": once, **self._row(near, spent)}

    def _row(self, near: Tensor, spent: float) -> Row:
        exact, seconds = self.exact
        errors, trained, each = (near - exact).norm(dim=1) / exact.norm(dim=1), spread(seconds), spent / len(near)
        return {
            "models": len(near),
            "error": spread(errors.tolist()),
            "seconds": each,
            "seconds_exact": trained,
            "times_as_fast": trained["median"] / each,
        }


def _timed(compute: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    return compute(), time.process_time() - began


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True, help="an .npz file of CIFAR-10")
    parser.add_argument("--known", type=int, nargs="*", default=[1_000, 5_000], help="sizes of the fixed set")
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.02, 0.05, 0.1, 0.2], help="of it in a step")
    parser.add_argument("--ranks", type=int, nargs="*", default=[300], help="directions of linear response")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with Record("sampled_shadows", vars(arguments)) as record:
        for n in arguments.known:
            comparison = Comparison(arguments.cifar10, n, arguments.models)
            for share in arguments.shares:
                record.measure({"known_images": n, "share": share}, partial(comparison.measure, share))
            for rank in arguments.ranks:
                record.measure({"known_images": n, "rank": rank}, partial(comparison.respond, rank))


if __name__ == "__main__":
    main()
