"""Reconstruction by gradient descent through the training.

An informed adversary can repeat the training with any image in the place of the unknown one, and descend on the
distance of the trained from the released weights, differentiated with respect to the image's pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background, Improvement, ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.retraining.repetition import repeatable
from lit_recon.attacks.shadow.engines.general import mean_loss_gradient
from lit_recon.attacks.shadow.training import KnownTraining, full_precision
from lit_recon.errors import ConfigError

#: Decays of the running means of gradients and of their squares, as usual for Adam but for a shorter memory.
_MEAN, _SQUARE = 0.9, 0.99


@dataclass
class Retraining(Improvement):
    """Improve the guess of another reconstructor by descent on the distance of retrained from released weights.

    The optimizer is Adam with one mean square per image, so that pixels without a gradient do not move; the rate falls
    to 0 along half a cosine. The guess whose weights come nearest to the released ones is returned, with the label of
    the first guess.

    Args:
        inner: makes the first guess; default: kernel ridge regression.
        steps: of descent; each is one training forwards and backwards.
        lr: initial step size, in units of a pixel's root mean square gradient.
        together: targets at a time; memory grows with it and with the steps of the training.

    Source: ours; for gradients through a training see Maclaurin, Duvenaud and Adams 2015.
    """

    inner: Reconstructor | None = None
    steps: int = 60
    lr: float = 0.02
    together: int = 4

    def __post_init__(self) -> None:
        if min(self.steps, self.together) < 1 or not self.lr > 0:
            raise ConfigError(f"steps and together must be at least 1 and lr above 0; got {self}")

    def prepare(self, background: Background) -> None:
        self.plan = repeatable(background.plan, "Retraining")
        self.guess = (self.inner or KernelRidge()).bind(background)

    @property
    def notes(self) -> tuple[str, ...]:
        how = (
            f"Every first guess was improved by {self.steps} steps on the distance of retrained from released weights."
        )
        return (*super().notes, how)

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        first, device = self.guess.reconstruct(differences), self.plan.device
        known, initial = self.plan.known, self.plan.initial_weights().to(device)
        reference, found, distances = self.plan.reference(), [], []
        for chunk in torch.arange(len(differences)).split(self.together):
            start, labels = first.images[chunk].to(device), first.labels[chunk].to(device)
            wanted = (differences[chunk].double() + reference).float().to(device)
            scale = differences[chunk].norm(dim=1).to(device)
            images, distance = self._descend(known, initial, start, labels, wanted, scale)
            found.append(images.cpu())
            distances.append(distance.cpu())
        return ReconstructedTargets(torch.cat(found), first.labels, torch.cat(distances).double())

    def _descend(
        self, known: KnownTraining, initial: Tensor, start: Tensor, labels: Tensor, wanted: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best images `(m, c, h, w)` and their relative distances `(m,)`."""
        images, best = start.clone(), start.clone()
        least = torch.full_like(scale, math.inf)
        mean, square = torch.zeros_like(images), images.new_zeros(len(images), 1, 1, 1)
        for step in range(self.steps + 1):
            images.requires_grad_(True)
            with torch.enable_grad(), full_precision():
                difference = (trained_weights(known, initial, images, labels) - wanted) / scale[:, None]
                squared = difference.square().sum(dim=1)
                gradient = torch.autograd.grad(squared.sum(), images)[0]
            images, distance = images.detach(), squared.detach().sqrt()
            closer = distance < least
            best[closer], least[closer] = images[closer], distance[closer]
            mean = _MEAN * mean + (1 - _MEAN) * gradient
            square = _SQUARE * square + (1 - _SQUARE) * gradient.square().mean(dim=(1, 2, 3), keepdim=True)
            rate = self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2
            change = (mean / (1 - _MEAN ** (step + 1))) / ((square / (1 - _SQUARE ** (step + 1))).sqrt() + 1e-30)
            images = (images - rate * change.nan_to_num()).clamp(0, 1)
        return best, least


def trained_weights(known: KnownTraining, initial: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Weights `(m, p)` of models trained on full batches with one image each, differentiable in the images."""
    descent, gradient = known.descent, mean_loss_gradient(known)
    weights = initial.expand(len(images), -1)
    speed = torch.zeros_like(weights)
    for _ in range(descent.steps):
        speed = descent.momentum * speed + gradient(weights, images, labels)
        weights = weights - descent.lr * speed
    return weights
