"""The missing image as the one on which the known training gives the released weights, sought by descent.

An informed adversary can repeat the training with any image in the place of the unknown one, and differentiate the
result by its pixels: a first guess becomes better until the trained weights agree. No shadow model is needed for this
but those that the guess was learned from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from lit_recon.attacks.released.base import Background, FittedReconstructor, ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.attacks.shadow.training import KnownTraining, full_precision, unflatten
from lit_recon.errors import ConfigError, ThreatModelError

#: Decays of the running means of gradients and of their squares, as usual for Adam but for a shorter memory.
_MEAN, _SQUARE = 0.9, 0.99


@dataclass(frozen=True)
class Retraining(Reconstructor):
    """Begins with what another reconstructor finds, and descends on the distance of retrained from released weights.

    Steps are those of Adam with one mean square per image, so that a pixel which no gradient reaches stays where it is;
    the rate falls to 0 along half a cosine. Of all guesses that one is returned whose weights came nearest. The label
    stays that of the first guess.

    Args:
        inner: makes the first guess; default: kernel ridge regression.
        steps: of descent; each trains once more and goes back through that training.
        lr: first rate, in root mean squares of a pixel's change.
        together: targets at a time; memory grows with it and with the steps of the training.

    Source: ours; matching final weights by differentiating through training is known from dataset distillation
    (Maclaurin, Duvenaud and Adams 2015 for the gradient).
    """

    inner: Reconstructor | None = None
    steps: int = 60
    lr: float = 0.02
    together: int = 4

    def __post_init__(self) -> None:
        if min(self.steps, self.together) < 1 or not self.lr > 0:
            raise ConfigError(
                f"steps and together must be at least 1 and lr above 0; got {self.steps}, {self.together} and {self.lr}"
            )

    def bind(self, background: Background) -> Reconstructor:
        plan = repeatable(background.plan, "Retraining")
        return _InformedRetraining(self, (self.inner or KernelRidge()).bind(background), plan)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        raise ThreatModelError("Retraining needs to know the training: call informed() before fit()")


@dataclass(frozen=True, eq=False)
class _InformedRetraining(Reconstructor):
    settings: Retraining
    inner: Reconstructor
    plan: ShadowPlan

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        return _FittedRetraining(self.inner.fit(differences, images, labels, n_classes), self.settings, self.plan)


@dataclass(frozen=True, eq=False)
class _FittedRetraining(FittedReconstructor):
    inner: FittedReconstructor
    settings: Retraining
    plan: ShadowPlan

    @property
    def facts(self) -> dict[str, float]:
        """Those of the first guess."""
        return self.inner.facts

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the first guess, and what happened to it."""
        steps = self.settings.steps
        how = f"Every guess was improved by {steps} steps on the distance of retrained from released weights."
        return (*self.inner.notes, how)

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        first = self.inner.reconstruct(differences)
        known, initial = self.plan.known, self.plan.initial_weights().to(self.plan.device)
        reference, found, distances = self.plan.reference(), [], []
        for chunk in torch.arange(len(differences)).split(self.settings.together):
            start, labels = (value[chunk].to(self.plan.device) for value in (first.images, first.labels))
            wanted = (differences[chunk].double() + reference).float().to(self.plan.device)
            scale = differences[chunk].norm(dim=1).to(self.plan.device)
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
        for step in range(self.settings.steps + 1):
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
            rate = self.settings.lr * (1 + math.cos(math.pi * step / self.settings.steps)) / 2
            change = (mean / (1 - _MEAN ** (step + 1))) / ((square / (1 - _SQUARE ** (step + 1))).sqrt() + 1e-30)
            images = (images - rate * change.nan_to_num()).clamp(0, 1)
        return best, least


def repeatable(plan: ShadowPlan | None, who: str) -> ShadowPlan:
    """The plan of a training that can be repeated with any image in the place of the unknown one.

    Raises:
        ThreatModelError: the adversary does not see the whole model.
        ConfigError: the training cannot be repeated, or is none by gradient descent on full batches.
    """
    if plan is None:
        raise ThreatModelError(f"{who} needs an adversary who sees the whole model and can repeat its training")
    descent = plan.descent
    if not plan.is_repeatable or descent.dp is not None or descent.batch_size is not None or descent.snapshots:
        raise ConfigError(
            f"{who} needs a training that can be repeated to the digit: known initial weights, full batches, no "
            "clipping, no noise and no snapshots"
        )
    if descent.optimizer != "sgd":
        raise ConfigError(f"{who} needs gradient descent with momentum; got {descent.optimizer}")
    return plan


def trained_weights(known: KnownTraining, initial: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Weights `(m, p)` of models each trained on the fixed set and one image, differentiable by the images.

    Args:
        known: the training: full batches, gradient descent with momentum.
        initial: weights `(p,)` of all models.
        images: own image of each model, `(m, c, h, w)`.
        labels: of those, `(m,)`.
    """
    n, descent = len(known.images), known.descent

    def loss(weights: Tensor, image: Tensor, label: Tensor) -> Tensor:
        parameters = unflatten(known.network, weights)
        fixed = F.cross_entropy(functional_call(known.network, parameters, known.images), known.labels, reduction="sum")
        own = F.cross_entropy(functional_call(known.network, parameters, image[None]), label[None])
        return (fixed + own) / (n + 1)

    gradient = vmap(grad(loss))
    weights = initial.expand(len(images), -1)
    speed = torch.zeros_like(weights)
    for _ in range(descent.steps):
        speed = descent.momentum * speed + gradient(weights, images, labels)
        weights = weights - descent.lr * speed
    return weights
