"""The missing image as the one on which the known training gives the released weights, without a single derivative.

Train on a guess, and compare the first layer with the released one: what they differ by is the guess's error times its
weight in every neuron, plus what fixed images were made to add by it. The former, read off as if the latter were
nothing, corrects the guess. Anderson acceleration takes care of the latter. Where the weights agree in the end, the
image is the released model's own, and the adversary knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lit_recon.attacks.released.base import (
    Announce,
    Background,
    FittedReconstructor,
    ReconstructedTargets,
    Reconstructor,
)
from lit_recon.attacks.released.first_layer import FirstLayerRidge, WhitenedFirstLayer
from lit_recon.attacks.released.retraining.descent import repeatable
from lit_recon.attacks.released.retraining.search import RepeatedTraining, SearchState, state_path
from lit_recon.errors import ConfigError, ThreatModelError


@dataclass(frozen=True)
class AndersonRetraining(Reconstructor):
    """Begins with what another reconstructor finds, and repeats the training until the weights agree.

    Every step costs one training, forwards. Of all guesses that one is returned whose weights came nearest. Where they
    did not agree, the search starts again: half way from the first guess to the mean of a class, from such a mean, then
    from shadow targets, each time with the label with which a training on that start comes nearest.

    Args:
        inner: makes the first guess; default: `FirstLayerRidge`.
        steps: trainings per target and search, at most.
        restarts: further searches where one did not end in agreement.
        memory: earlier steps that the next one is made from.
        tolerance: a search ends when the retrained differ from the released weights by this share of what the image
            changed; float32 alone leaves 1e-5 (500 known images) to 1e-3 (10,000).
        certain: below this distance an image counts as found, in that the adversary knows it.
        together: targets at a time; memory grows with it.

    Source: ours, with [Anderson1965] for the acceleration.
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

    def bind(self, background: Background) -> Reconstructor:
        plan = repeatable(background.plan, "AndersonRetraining")
        layer = WhitenedFirstLayer.of(plan, "AndersonRetraining")
        training = RepeatedTraining(plan, layer, self.steps, self.memory, self.tolerance)
        inner = (self.inner or FirstLayerRidge()).bind(background)
        return _Informed(self, inner, training, background.state, background.announce)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        raise ThreatModelError("AndersonRetraining needs to know the training: call informed() before fit()")


@dataclass(frozen=True, eq=False)
class _Informed(Reconstructor):
    settings: AndersonRetraining
    inner: Reconstructor
    training: RepeatedTraining
    folder: Path | None
    announce: Announce

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        return _Fitted(self.inner.fit(differences, images, labels, n_classes), self, images, labels, n_classes)


@dataclass(frozen=True, eq=False)
class _Fitted(FittedReconstructor):
    inner: FittedReconstructor
    attack: _Informed
    shadow_images: Tensor
    shadow_labels: Tensor
    n_classes: int

    @property
    def facts(self) -> dict[str, float]:
        """Those of the first guess."""
        return self.inner.facts

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the first guess, and what happened to it."""
        steps, certain = self.attack.settings.steps, self.attack.settings.certain
        how = (
            f"Every guess was corrected by up to {steps} trainings on it; an image is certified where the retrained "
            f"weights differ from the released ones by at most {certain:g} of what the image changed."
        )
        return (*self.inner.notes, how)

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        first, settings = self.inner.reconstruct(differences), self.attack.settings
        path, state = None, SearchState.of(first.images, first.labels)
        if self.attack.folder is not None:
            path = state_path(self.attack.folder, f"{settings}", differences, first.images, first.labels)
            state = SearchState.read(path) if path.is_file() else state
        for attempt in range(settings.restarts + 1):
            left = ((state.distances > settings.certain) & (state.searches == attempt)).nonzero().squeeze(1)
            if not len(left):
                continue
            label = f"search {attempt + 1} of at most {settings.restarts + 1}"
            advance = self.attack.announce(len(left) * settings.steps, label, "trainings")
            for chunk in left.split(settings.together):
                starts, labels = first.images[chunk], first.labels[chunk]
                if attempt:
                    starts, labels = self._again(differences[chunk], starts, attempt)
                state.update(chunk, labels, *self.attack.training.search(differences[chunk], starts, labels, advance))
                if path is not None:
                    state.write(path)
        return ReconstructedTargets(state.images, state.labels, state.distances, state.distances <= settings.certain)

    def _again(self, differences: Tensor, images: Tensor, attempt: int) -> tuple[Tensor, Tensor]:
        """Where searches begin whose first ones failed, `(m, c, h, w)`, and with which labels `(m,)`."""
        starts = []
        for label in range(self.n_classes):
            of_class = self.shadow_images[self.shadow_labels == label]
            of_class = of_class if len(of_class) else self.shadow_images
            other = of_class.mean(dim=0) if attempt <= 2 else of_class[(attempt - 3) % len(of_class)]
            starts.append((images + other) / 2 if attempt == 1 else other.expand_as(images))
        candidates = torch.stack(starts)
        labels = self.attack.training.likeliest(differences, candidates)
        return candidates[labels, torch.arange(len(images))], labels
