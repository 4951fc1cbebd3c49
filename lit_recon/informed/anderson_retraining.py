"""The missing image as the one on which the known training gives the released weights, without a single derivative.

Train on a guess, and compare the first layer with the released one: what they differ by is the guess's error times its
weight in every neuron, plus what fixed images were made to add by it. The former, read off as if the latter were
nothing, corrects the guess. Anderson acceleration takes care of the latter. Where the weights agree in the end, the
image is the released model's own, and the adversary knows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.informed.anderson import Anderson
from lit_recon.informed.first_layer import FirstLayer
from lit_recon.informed.first_layer_ridge import FirstLayerRidge
from lit_recon.informed.reconstructor import Background, FittedReconstructor, ReconstructedTargets, Reconstructor
from lit_recon.informed.retraining import repeatable
from lit_recon.informed.shadow.by_hand import fits_by_hand
from lit_recon.informed.shadow.engine import Execution, deltas, train_models
from lit_recon.informed.shadow.plan import ShadowPlan

#: Beyond so many times the least distance so far a search has lost its way, and starts from its best guess again.
_LOST = 2.0
#: Share of a correction that is made after that, of the share before.
_CAREFUL = 0.5


@dataclass(frozen=True)
class AndersonRetraining(Reconstructor):
    """Begins with what another reconstructor finds, and repeats the training until the weights agree.

    Every step costs one training, forwards. Of all guesses that one is returned whose weights came nearest. Where they
    did not agree, the search starts again: half way from the first guess to the mean of its class, from that mean, then
    from shadow targets of that class. The label stays that of the first guess.

    Args:
        inner: makes the first guess; default: `FirstLayerRidge`.
        steps: trainings per target and search, at most.
        restarts: further searches where one did not end in agreement.
        memory: earlier steps that the next one is made from.
        tolerance: a search ends when the retrained differ from the released weights by this share of what the image
            changed; float32 alone leaves 1e-5 (500 known images) to 1e-3 (10,000).
        certain: below this distance an image counts as found, in that the adversary knows it.
        together: targets at a time; memory grows with it.

    Source: ours, with Anderson 1965 for the acceleration.
    """

    inner: Reconstructor | None = None
    steps: int = 40
    restarts: int = 4
    memory: int = 30
    tolerance: float = 1e-3
    certain: float = 1e-2
    together: int = 100

    def __post_init__(self) -> None:
        counts = (self.steps, self.memory, self.together, self.restarts + 1)
        if min(counts) < 1 or not 0 < self.tolerance <= self.certain < 1:
            raise ConfigError(
                "steps, memory and together must be at least 1, restarts 0 or more, and 0 < tolerance <= certain < 1; "
                f"got {self.steps}, {self.memory}, {self.together}, {self.restarts}, {self.tolerance}, {self.certain}"
            )

    def informed(self, background: Background) -> Reconstructor:
        plan = repeatable(background.plan, "AndersonRetraining")
        inner = (self.inner or FirstLayerRidge()).informed(background)
        return _Informed(self, inner, plan, FirstLayer.of(plan, "AndersonRetraining"))

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        raise ThreatModelError("AndersonRetraining needs to know the training: call informed() before fit()")


@dataclass(frozen=True, eq=False)
class _Informed(Reconstructor):
    settings: AndersonRetraining
    inner: Reconstructor
    plan: ShadowPlan
    layer: FirstLayer

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        fitted = self.inner.fit(differences, images, labels, n_classes)
        return _Fitted(fitted, self.settings, self.plan, self.layer, images, labels)


@dataclass(frozen=True, eq=False)
class _Fitted(FittedReconstructor):
    inner: FittedReconstructor
    settings: AndersonRetraining
    plan: ShadowPlan
    layer: FirstLayer
    shadow_images: Tensor
    shadow_labels: Tensor

    @property
    def facts(self) -> dict[str, float]:
        """Those of the first guess."""
        return self.inner.facts

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the first guess, and what happened to it."""
        steps, certain = self.settings.steps, self.settings.certain
        how = (
            f"Every guess was corrected by up to {steps} trainings on it; an image is certified where the retrained "
            f"weights differ from the released ones by at most {certain:g} of what the image changed."
        )
        return (*self.inner.notes, how)

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        first = self.inner.reconstruct(differences)
        images, distances = first.images.clone(), torch.full((len(differences),), math.inf, dtype=torch.float64)
        for attempt in range(self.settings.restarts + 1):
            left = (distances > self.settings.certain).nonzero().squeeze(1)
            for chunk in left.split(self.settings.together) if len(left) else ():
                labels = first.labels[chunk]
                starts = self._starts(first.images[chunk], labels, attempt)
                found, distance = self._search(differences[chunk], starts, labels)
                closer = distance < distances[chunk]
                images[chunk[closer]], distances[chunk[closer]] = found[closer], distance[closer]
        return ReconstructedTargets(images, first.labels, distances, distances <= self.settings.certain)

    def _starts(self, images: Tensor, labels: Tensor, attempt: int) -> Tensor:
        """Where the searches of one attempt begin, `(m, c, h, w)`."""
        if attempt == 0:
            return images
        starts = images.clone()
        for label in labels.unique():
            of_class = self.shadow_images[self.shadow_labels == label]
            if len(of_class):
                one = of_class[(attempt - 3) % len(of_class)]
                starts[labels == label] = one if attempt > 2 else of_class.mean(dim=0)
        return (images + starts) / 2 if attempt == 1 else starts

    def _search(self, released: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The best images `(m, c, h, w)` and the relative distances `(m,)` of their weights."""
        settings, plan = self.settings, self.plan
        known, initial, reference = plan.known, plan.initial_weights().to(plan.device), plan.reference()
        execution: Execution = "hand" if fits_by_hand(plan.network) else "vmap"
        guesses = images.flatten(1).double()
        best, best_correction = guesses.clone(), torch.zeros_like(guesses)
        least = torch.full((len(guesses),), math.inf, dtype=torch.float64)
        damping, active = torch.ones_like(least), torch.arange(len(guesses))
        memory = Anderson(len(guesses), guesses.shape[1], settings.memory)
        for step in range(settings.steps):
            own = guesses.float().unflatten(1, images.shape[1:])
            weights = train_models(known, initial, own.to(plan.device), labels[active].to(plan.device), execution)
            trained = deltas(weights.cpu(), reference)
            wanted = released[active]
            distance = (trained - wanted).double().norm(dim=1) / wanted.double().norm(dim=1)
            corrections = self._corrections(trained, wanted, guesses)
            closer, lost = distance < least[active], distance > _LOST * least[active]
            for kept, values in ((best, guesses), (best_correction, corrections), (least, distance)):
                kept[active[closer]] = values[closer]
            if step == settings.steps - 1:
                break
            memory.forget(lost)
            damping[active[lost]] *= _CAREFUL
            guesses[lost], corrections[lost] = best[active[lost]], best_correction[active[lost]]
            guesses = memory.next(guesses, corrections, damping[active]).clamp(0, 1)
            going = least[active] > settings.tolerance
            if not going.any():
                break
            memory.keep(going)
            guesses, active = guesses[going], active[going]
        return best.float().unflatten(1, images.shape[1:]), least

    def _corrections(self, trained: Tensor, released: Tensor, guesses: Tensor) -> Tensor:
        """What to add to guesses `(m, d)` if the fixed set's part of the first layer stayed as it is."""
        rows = self.layer.rows(trained)
        weights = self.layer.weights(rows, guesses)
        missing = torch.einsum("mj,mjd->md", weights, self.layer.rows(released) - rows)
        return missing / weights.square().sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
