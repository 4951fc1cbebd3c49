"""What the statistics of the batch hide of an image behind missing entries: its contrast and, to rounding, no more.

    python -m benchmarks.contrast --data.root DIR --checkpoint FILE

Single images, a client whose BatchNorm uses its own batch, entries dropped or pruned: the images of `defended.py`,
whose attack returns images of the contrast of public ones there. For the first image of every defense the information
in some of the entries says which directions of the image none of them tells (`SampledJacobian`).
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import lit_recon._torchvision

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks.defended import DEFENSES, Defended, drawn_for, linearized
from benchmarks.record import Record, Row
from lit_recon.bounds import SampledJacobian, unknown_basis
from lit_recon.clients import ClientSettings
from lit_recon.data.sources import CIFAR10
from lit_recon.data.splits import in_pool
from lit_recon.models import Backbone
from lit_recon.models.checkpoint import load_backbone
from lit_recon.records import Normalization

#: Kinds and names of the defenses.
HIDING = {"drop": "drop 0.9", "prune": "prune 0.9"}


def centred(images: Tensor, normalization: Normalization) -> Tensor:
    """Images `(n, c, h, w)` minus the mean color of public ones: BatchNorm with the batch hides the size of these."""
    return images - torch.tensor(normalization.mean).view(-1, 1, 1)


def contrast_error(image: Tensor, normalization: Normalization) -> float:
    """RMSE of an image `(1, c, h, w)` with the contrast of public images: mean square 1 once normalized."""
    own = centred(image, normalization)
    normalized = own / torch.tensor(normalization.std).view(-1, 1, 1)
    return float((own / normalized.square().mean().sqrt() - own).square().mean().sqrt())


def hidden(model: Backbone, image: Tensor, label: Tensor, defense: str, kind: str) -> Row:
    """The number of directions that no entry tells, and the cosine of the image, without mean color, with them."""
    started = time.process_time()
    jacobian, round_ = linearized(model, image, label, "train")
    sampled = SampledJacobian(jacobian)
    generator = ClientSettings().generator(0)
    information = DEFENSES[kind][defense].released_information(sampled, round_, 1.0, generator).information
    unknown = unknown_basis(information, sampled.rounding(information))
    direction = centred(image, model.normalization).flatten().double()
    along = unknown @ (unknown.T @ direction)
    cosine = float(cosine_similarity(along, direction, dim=0)) if unknown.numel() else None
    return {"unknown": unknown.shape[1], "cosine": cosine, "seconds": round(time.process_time() - started, 1)}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the ResNet-18 of `defended.py`")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _, test = CIFAR10(root=arguments.root).load()
    private = test.subset(in_pool(test, "evaluation"))
    model = load_backbone(arguments.checkpoint).model
    with Record("contrast", vars(arguments), "evaluation") as record:
        for kind, name in HIDING.items():
            draws = drawn_for(private.labels, Defended(name, 1, "train", 8), kind)
            errors = [float(f"{contrast_error(private.pixels(ids), model.normalization):.3g}") for ids in draws]
            [first, *_] = draws
            told = partial(hidden, model, private.pixels(first), private.labels[first], name, kind)
            record.measure({"defense": name, "rmse": errors}, told)


if __name__ == "__main__":
    main()
