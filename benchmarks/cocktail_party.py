"""What each term of the Cocktail Party Attack is worth, on real images behind a fully connected layer.

    python -m benchmarks.cocktail_party --root DIR [--batches 16 64 128] [--repeats 3 2 1] [--first 0]
        [--variants "ours" ...]

CIFAR-10 images, a random network of 256 neurons with ReLU, one gradient, labels recovered. Every row is one choice of
terms; seeds draw images, network and start anew. Matched RMSE and SSIM, beside those of an image of the mean color.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.record import Record, Row, spread
from benchmarks.workload import read_cifar10
from lit_recon.attacks.updates import CocktailPartyAttack, UnmixingTerms
from lit_recon.clients import Client
from lit_recon.data import ImageSet, measure_normalization, sample_victims
from lit_recon.metrics import metrics_of, score_batch
from lit_recon.models import MLP, Backbone
from lit_recon.records import Normalization, Observation, Reconstruction

PUBLISHED = UnmixingTerms(decorrelation=1.47, temperature=12.4, total_variation=3.1, volume=0, smoothness=0, bounds=0)
#: Root mean square error below which an image counts as exact.
EXACT = 1e-3
#: Terms and rounds of consistency with the model, by name.
VARIANTS: dict[str, tuple[UnmixingTerms, int]] = {
    "published code: no negentropy": (replace(PUBLISHED, negentropy=0), 0),
    "published terms": (PUBLISHED, 0),
    "ours": (UnmixingTerms(), 0),
    "ours without negentropy": (UnmixingTerms(negentropy=0), 0),
    "ours without volume": (UnmixingTerms(volume=0), 0),
    "ours without smoothness": (UnmixingTerms(smoothness=0), 0),
    "ours without bounds": (UnmixingTerms(bounds=0), 0),
    "ours with decorrelation": (UnmixingTerms(decorrelation=0.01, temperature=2), 0),
    "ours and consistency": (UnmixingTerms(), 40),
}


def observation(normalization: Normalization, images: Tensor, labels: Tensor, hidden: int, seed: int) -> Observation:
    """What a client with these images releases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels, height, width = images.shape[1:]
        model = Backbone(MLP((channels, height, width), [hidden]), 10, normalization)
    return Client(model).observe(images, labels)


def measure(
    public: Normalization,
    held_out: ImageSet,
    n: int,
    repeats: int,
    steps: int,
    hidden: int,
    variants: Sequence[str],
    first: int = 0,
) -> Iterator[Row]:
    """One row per choice of terms at batch size `n`, and one for an image of the mean color; seeds from `first` on."""
    figures: dict[str, dict[str, list[float]]] = {}
    for seed in range(first, first + repeats):
        chosen = sample_victims(held_out.labels, n, seed)
        images, labels = held_out.pixels(chosen), held_out.labels[chosen]
        seen = observation(public, images, labels, hidden, seed)
        mean = torch.tensor(public.mean)[:, None, None].expand_as(images)
        _add(figures, "mean color", _scores(Reconstruction(mean, labels, 0.0), images, labels))
        for name in variants:
            terms, rounds = VARIANTS[name]
            start = time.process_time()
            found = CocktailPartyAttack(terms, steps, refinements=rounds, seed=seed)(seen)
            seconds = time.process_time() - start
            scores = {**_scores(found, images, labels), "seconds": seconds}
            print(n, seed, name, {figure: round(value, 4) for figure, value in scores.items()}, flush=True)
            _add(figures, name, scores)
    for name, row in figures.items():
        yield {"batch": n, "variant": name, **{figure: spread(values) for figure, values in row.items()}}


def _scores(found: Reconstruction, images: Tensor, labels: Tensor) -> dict[str, float]:
    scores = score_batch(found.images, images, found.labels, labels, metrics_of(["rmse", "ssim"]))
    return {
        "rmse": float(scores.per_image["rmse"].mean()),
        "ssim": float(scores.per_image["ssim"].mean()),
        "exact": float((scores.per_image["rmse"] < EXACT).double().mean()),
        "labels": float((scores.recovered_labels == labels).double().mean()),
    }


def _add(figures: dict[str, dict[str, list[float]]], name: str, values: dict[str, float]) -> None:
    for figure, value in values.items():
        figures.setdefault(name, {}).setdefault(figure, []).append(value)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--repeats", type=int, nargs="+", default=[3, 2, 1], help="seeds of every batch size")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--hidden", type=int, default=256)
    arguments, public, held_out = read_cifar10(parser)
    normalization = measure_normalization(public)
    size = arguments.steps, arguments.hidden, arguments.variants, arguments.first
    with Record("cocktail_party", vars(arguments), arguments.pool) as record:
        for n, repeats in zip(arguments.batches, arguments.repeats, strict=True):
            if not any(row["batch"] == n for row in record.rows):
                for row in measure(normalization, held_out, n, repeats, *size):
                    record.add(row)


if __name__ == "__main__":
    main()
