"""Initial weights that are no random numbers but a model's, trained before on images that nobody attacks."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.errors import ConfigError
from lit_recon.informed.shadow.training import GradientDescent, flat_weights


@dataclass(frozen=True)
class Pretraining:
    """All models begin where a training on other images ended; the adversary has seen the model at that point.

    Full batches; the defaults bring ReleasedMLP to 98 % of 10,000 images of MNIST, and 91 % of others.

    Args:
        images: so many of those that are in no part of the split.
        steps: of descent on them.
        lr: learning rate.
        momentum: as of `GradientDescent`.

    Raises:
        ConfigError: a number is out of its range.

    Source: Balle, Cherubin and Hayes 2022, appendix C and figure 13.
    """

    images: int = 10_000
    steps: int = 500
    lr: float = 0.2
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.images < 1 or self.steps < 1 or not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ConfigError(
                "initialization.images and initialization.steps must be at least 1, initialization.lr above 0 and "
                f"initialization.momentum in [0, 1); got {self.images}, {self.steps}, {self.lr} and {self.momentum}"
            )


def pretrained_weights(network: nn.Module, images: Tensor, labels: Tensor, how: Pretraining) -> Tensor:
    """Flat weights `(p,)`, float32 on the CPU, that a training from the network's own weights comes to.

    It goes in float64, so that rounding hardly ever tells machines or numbers of threads apart: a store of shadow
    models belongs to these weights, bit by bit.

    Args:
        network: the architecture with its initial weights, which stay as they are.
        images: `(n, c, h, w)` in [0, 1].
        labels: of those, `(n,)`.
        how: steps and rates.

    Raises:
        ConfigError: the training diverged.
    """
    trained, exact = copy.deepcopy(network).to(images.device, torch.float64), images.double()
    optimizer = GradientDescent(how.steps, how.lr, how.momentum).torch_optimizer(trained)
    with torch.enable_grad():
        for _ in range(how.steps):
            optimizer.zero_grad()
            F.cross_entropy(trained(exact), labels).backward()
            optimizer.step()
    weights = flat_weights(trained).float().cpu()
    if not torch.isfinite(weights).all():
        raise ConfigError(f"pre-training diverged to NaN or infinity: lower initialization.lr={how.lr:g}")
    return weights
