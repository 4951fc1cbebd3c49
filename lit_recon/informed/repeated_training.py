"""Many searches side by side for the images on which a known training gives released weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.informed.anderson import Anderson
from lit_recon.informed.first_layer import FirstLayer
from lit_recon.informed.shadow.by_hand import fits_by_hand
from lit_recon.informed.shadow.engine import Execution, deltas, train_models
from lit_recon.informed.shadow.plan import ShadowPlan

#: Beyond so many times the least distance so far a search has lost its way, and starts from its best guess again.
_LOST = 2.0
#: Share of a correction that is made after that, of the share before.
_CAREFUL = 0.5


@dataclass(frozen=True, eq=False)
class RepeatedTraining:
    """Trains on guesses, and corrects them by what the first layer lacks.

    Attributes:
        plan: of a training that can be repeated.
        layer: its first one.
        steps: trainings per search, at most.
        memory: earlier steps that the next one is made from.
        tolerance: relative distance of weights at which a search ends.

    Source: ours, with [Anderson1965] for the acceleration.
    """

    plan: ShadowPlan
    layer: FirstLayer
    steps: int
    memory: int
    tolerance: float

    def search(
        self, released: Tensor, starts: Tensor, labels: Tensor, trained: Callable[[int], None] = lambda n: None
    ) -> tuple[Tensor, Tensor]:
        """The best images `(m, c, h, w)` and the distances `(m,)` of their weights, relative to the difference.

        Args:
            released: differences of the released models, `(m, p)`.
            starts: images to begin with, `(m, c, h, w)`.
            labels: of the images, `(m,)`.
            trained: told how many models were trained, or need no training any more.
        """
        guesses = starts.flatten(1).double()
        best, best_correction = guesses.clone(), torch.zeros_like(guesses)
        least = torch.full((len(guesses),), math.inf, dtype=torch.float64)
        damping, active = torch.ones_like(least), torch.arange(len(guesses))
        memory, train = Anderson(len(guesses), guesses.shape[1], self.memory), self._training(starts.shape[1:])
        for step in range(self.steps):
            found, wanted = train(guesses, labels[active]), released[active]
            trained(len(active))
            distance = _distances(found, wanted)
            corrections = self._corrections(found, wanted, guesses)
            closer, lost = distance < least[active], distance > _LOST * least[active]
            for kept, values in ((best, guesses), (best_correction, corrections), (least, distance)):
                kept[active[closer]] = values[closer]
            going = least[active] > self.tolerance
            trained(int((~going).sum()) * (self.steps - step - 1))
            if step == self.steps - 1 or not going.any():
                break
            memory.forget(lost)
            damping[active[lost]] *= _CAREFUL
            guesses[lost], corrections[lost] = best[active[lost]], best_correction[active[lost]]
            guesses = memory.next(guesses, corrections, damping[active]).clamp(0, 1)[going]
            memory.keep(going)
            active = active[going]
        return best.float().unflatten(1, starts.shape[1:]), least

    def likeliest(self, released: Tensor, images: Tensor) -> Tensor:
        """The labels `(m,)` with which training on images comes nearest to the released models.

        Args:
            released: differences of the released models, `(m, p)`.
            images: one for every label, `(k, m, c, h, w)`.
        """
        train = self._training(images.shape[2:])
        labels = torch.arange(len(images))[:, None].expand(len(images), len(released))
        found = [train(each.flatten(1).double(), label) for each, label in zip(images, labels, strict=True)]
        return torch.stack([_distances(each, released) for each in found]).argmin(dim=0)

    def _training(self, shape: torch.Size) -> Callable[[Tensor, Tensor], Tensor]:
        """What gives the differences `(m, p)` of models that are trained on images `(m, d)` with labels `(m,)`."""
        plan = self.plan
        known, initial, reference = plan.known, plan.initial_weights().to(plan.device), plan.reference()
        execution: Execution = "hand" if fits_by_hand(plan.network) else "vmap"

        def train(images: Tensor, labels: Tensor) -> Tensor:
            own = images.float().unflatten(1, shape).to(plan.device)
            return deltas(train_models(known, initial, own, labels.to(plan.device), execution).cpu(), reference)

        return train

    def _corrections(self, found: Tensor, released: Tensor, guesses: Tensor) -> Tensor:
        """What to add to guesses `(m, d)` if the fixed set's part of the first layer stayed as it is."""
        rows = self.layer.rows(found)
        weights = self.layer.weights(rows, guesses)
        missing = torch.einsum("mj,mjd->md", weights, self.layer.rows(released) - rows)
        corrections: Tensor = missing / weights.square().sum(dim=1, keepdim=True).clamp(
            min=torch.finfo(torch.float64).tiny
        )
        return corrections


def _distances(found: Tensor, released: Tensor) -> Tensor:
    """Of differences `(m, p)`, relative to the released ones, `(m,)` float64."""
    distances: Tensor = (found - released).double().norm(dim=1) / released.double().norm(dim=1)
    return distances
