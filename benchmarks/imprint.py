"""How many images Robbing the Fed decodes under noise, pruning, dropping and clipping of the gradient.

    python -m benchmarks.imprint --root DIR [--batch 16] [--bins 128] [--seeds 3] [--labels known]

CIFAR-10 images, a random ConvNet behind an imprint block of the mean pixel with bins of equal normal mass, one
gradient. Labels are recovered unless they are said to be known, which saves a search of up to half a minute where a
defense has changed the gradient that they are counted in. Hits are images with a PSNR above 50 dB, compared with the
images that are alone in their bin. The rule of neighbouring differences, which keeps the rows of largest or, as one
public version does, of smallest size, is shown beside.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.record import Record, Row
from benchmarks.workload import read_cifar10
from lit_recon.attacks.updates import KnownLabels, RobbingTheFed
from lit_recon.clients import Client
from lit_recon.data import ImageSet, measure_normalization, sample_victims
from lit_recon.defenses import Defense, GaussianNoise, GradientDropout, GradientPruning, PerExampleClipping
from lit_recon.metrics import metrics_of, score_batch
from lit_recon.models import Backbone, ConvNet, Imprint
from lit_recon.models.classifiers.imprint import ImprintBlock, find_imprint
from lit_recon.records import Knowledge, Observation

#: PSNR in dB above which an image counts as decoded.
HIT = 50.0
DEFENSES: list[Defense | None] = [
    None,
    *(GaussianNoise(std, relative=True) for std in (1e-6, 1e-4, 1e-3, 1e-2, 1e-1)),
    *(GradientPruning(fraction) for fraction in (0.3, 0.7, 0.9, 0.99)),
    *(GradientDropout(fraction) for fraction in (0.1, 0.3, 0.7)),
    PerExampleClipping(0.1),
]


def server(public: ImageSet, bins: int) -> Backbone:
    """A random ConvNet with BatchNorm statistics of public images, behind an imprint block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        honest = Backbone(ConvNet(public.image_shape, widths=[16, 32]), 10, measure_normalization(public)).train()
    with torch.no_grad():
        for batch in torch.arange(min(512, len(public.labels))).split(64):
            honest(public.pixels(batch))
    return Imprint(n_bins=bins, bins="gaussian").modify(honest.eval())


def alone(images: Tensor, model: Backbone, block: ImprintBlock) -> Tensor:
    """Whether each image is the only one in its bin."""
    functional = ((images - model.pixel_mean) / model.pixel_std).flatten(1) @ block.functional
    bins = torch.bucketize(functional, block.edges)
    single: Tensor = (bins[:, None] == bins[None, :]).sum(dim=1) == 1
    return single


def neighbouring_differences(seen: Observation, name: str, largest: bool) -> Tensor:
    """Images `(n, c, h, w)` by differences of neighbouring rows, of those with the largest or the smallest size."""
    weight, bias = (seen.update[f"{name}.measure.{part}"] for part in ("weight", "bias"))
    rows = torch.cat([weight, bias[:, None]], dim=1).diff(dim=0).neg()
    rows = rows[rows[:, -1] != 0]
    kept = rows[rows[:, :-1].mean(dim=1).abs().argsort(descending=largest)[: seen.n_examples]]
    images = (kept[:, :-1] / kept[:, -1:]).view(-1, *seen.image_shape)
    mean, std = seen.normalization.tensors(images)
    return (images * std + mean).nan_to_num(0.0).clamp(0, 1)


def hits(found: Tensor, images: Tensor) -> int:
    """How many images have a reconstruction above the PSNR that counts."""
    error = (images[:, None] - found[None]).double().square().flatten(2).mean(dim=2)
    return int((error < 10 ** (-HIT / 10)).any(dim=1).sum())


def measure(
    model: Backbone, held_out: ImageSet, defense: Defense | None, n: int, seeds: int, known: bool = False
) -> Row:
    """Means over seeds of one defense."""
    found_block = find_imprint(model)
    assert found_block is not None
    name, block = found_block
    figures: dict[str, list[float]] = {}
    for seed in range(seeds):
        chosen = sample_victims(held_out.labels, n, seed)
        images, labels = held_out.pixels(chosen), held_out.labels[chosen]
        single = alone(images, model, block)
        generator = torch.Generator().manual_seed(seed)
        seen = Client(model, defense=defense).observe(images, labels, Knowledge(known), generator)
        start = time.process_time()
        found = RobbingTheFed(KnownLabels() if known else None)(seen)
        seconds = time.process_time() - start
        scores = score_batch(found.images, images, found.labels, labels, metrics_of(["rmse", "psnr"]))
        values = {
            "alone": float(single.sum()),
            "hits": hits(found.images, images),
            "psnr_alone": float(scores.per_image["psnr"].double()[single].clamp(max=120).median()),
            "rmse": float(scores.per_image["rmse"].mean()),
            "labels_alone": float((scores.recovered_labels == labels)[single].double().mean()),
            "largest_differences": hits(neighbouring_differences(seen, name, True), images),
            "smallest_differences": hits(neighbouring_differences(seen, name, False), images),
            "seconds": seconds,
        }
        for figure, value in values.items():
            figures.setdefault(figure, []).append(value)
    means = {figure: round(fmean(values), 4) for figure, values in figures.items()}
    return {**means, "hits_by_seed": figures["hits"]}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bins", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--labels", choices=("recovered", "known"), default="recovered")
    arguments, public, held_out = read_cifar10(parser)
    model = server(public, arguments.bins)
    known = arguments.labels == "known"
    with Record("imprint", vars(arguments), arguments.pool) as record:
        for defense in DEFENSES:
            record.measure(
                {"defense": "none" if defense is None else repr(defense)},
                partial(measure, model, held_out, defense, arguments.batch, arguments.seeds, known),
            )


if __name__ == "__main__":
    main()
