"""The released models' training, repeated with another image in the place of the unknown one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from lit_recon.attacks.shadow.engine import Execution, deltas, train_models
from lit_recon.attacks.shadow.engines.batched_mlp import fits_batched_mlp
from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.attacks.shadow.training import cross_entropy
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, ThreatModelError

#: Fixed images from which on models are trained one by one on a GPU, as they always are on a CPU: grouped convolutions
#: are no faster there, as measured on an H200, and take many times the memory.
_ONE_BY_ONE = 2_000
#: Maps images `(m, d)` and labels `(m,)` to differences `(m, p)` of models trained on them.
Training = Callable[[Tensor, Tensor], Tensor]


def repeatable(plan: ShadowPlan | None, who: str) -> ShadowPlan:
    """The plan, if its training can be repeated with another image; otherwise an error that names `who` repeats it."""
    if plan is None:
        raise ThreatModelError(f"{who} needs an adversary who sees the whole model and can repeat its training")
    descent = plan.descent
    if not plan.is_repeatable or descent.dp is not None or descent.batch_size is not None or descent.snapshots:
        raise ConfigError(
            f"{who} needs a deterministic training: known initial weights, full batches, no clipping, no noise and no "
            "snapshots"
        )
    if descent.optimizer != "sgd":
        raise ConfigError(f"{who} needs gradient descent with momentum; got {descent.optimizer}")
    return plan


def training_of(plan: ShadowPlan, shape: torch.Size) -> Training:
    """The training of a plan, for images of this shape `(c, h, w)`."""
    known, initial = plan.known, plan.initial_weights().to(plan.device)
    execution: Execution = "batched_mlp"
    if not fits_batched_mlp(plan.network):
        one_by_one = plan.device == "cpu" or len(plan.fixed) >= _ONE_BY_ONE
        execution = "loop" if one_by_one else "vmap"

    def train(images: Tensor, labels: Tensor) -> Tensor:
        own = images.float().unflatten(1, shape).to(plan.device)
        return deltas(train_models(known, initial, own, labels.to(plan.device), execution).cpu(), plan.reference())

    return train


def why_undetermined(plan: ShadowPlan) -> str:
    """Why other images than the right one may give the released weights, as a sentence; empty where they do not."""
    pixels, unseen = math.prod(plan.fixed.image_shape), _unseen(plan)
    if unseen:
        return f"{unseen} of {pixels} pixels do not enter the network."
    if pixels >= plan.known.n_parameters:
        return f"{plan.known.n_parameters} weights do not determine {pixels} pixels."
    return ""


def _unseen(plan: ShadowPlan) -> int:
    """Number of pixels on which no derivative of the weights' gradient depends: random weights cancel none."""
    weights = plan.initial_weights()
    gradient = grad(partial(cross_entropy, plan.known.network))
    some = torch.randn(weights.shape, generator=seeded_generator(0, "unseen pixels")).to(weights)
    images = plan.fixed.pixels()[:1].to(weights)
    labels = plan.fixed.labels[:1].to(weights.device)
    slope = grad(lambda images: (gradient(weights, images, labels) * some).sum())(images)
    return int((slope == 0).sum())


def distances_of(found: Tensor, released: Tensor) -> Tensor:
    """Distances of differences `(m, p)`, relative to the norms of the released ones, `(m,)` float64."""
    distances: Tensor = (found - released).double().norm(dim=1) / released.double().norm(dim=1)
    return distances
