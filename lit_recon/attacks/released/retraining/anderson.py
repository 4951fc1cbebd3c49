"""Reconstruction by repeating the training, without derivatives: fixed-point iteration with Anderson acceleration.

Train on a guess of the unknown image, and compare the first layer with the released one. The difference is the error of
the guess times its coefficient in every neuron, plus the changed contributions of the fixed images. Neglecting the
latter gives a correction of the guess; Anderson acceleration makes the iteration converge all the same. If the weights
agree in the end, the image is the training image, and the adversary can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.first_layer import FirstLayerRidge, WhitenedFirstLayer
from lit_recon.attacks.released.retraining.descent import repeatable
from lit_recon.attacks.released.retraining.search import RepeatedTraining, SearchState, state_path
from lit_recon.errors import ConfigError


@dataclass
class AndersonRetraining(Reconstructor):
    """Improve the guess of another reconstructor by repeating the training until the weights agree.

    Every step costs one training. The guess whose weights come nearest to the released ones is returned. If they do not
    agree, the search restarts: half way from the first guess to the mean of a class, then from such a mean, then from
    shadow targets, each time with the label for which a training on that start comes nearest.

    Args:
        inner: makes the first guess; default: `FirstLayerRidge`.
        steps: most trainings per target and search.
        restarts: most further searches for a target whose weights did not agree.
        memory: number of earlier steps that Anderson acceleration combines.
        tolerance: relative distance at which a search ends: of retrained from released weights, divided by that of
            the released weights from the reference. Float32 alone leaves 1e-5 (500 known images) to 1e-3 (10,000).
        certain: relative distance below which an image counts as certified.
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

    needs_background = True

    def __post_init__(self) -> None:
        counts = (self.steps, self.memory, self.together, self.restarts + 1)
        if min(counts) < 1 or not 0 < self.tolerance <= self.certain < 1:
            raise ConfigError(
                "steps, memory and together must be at least 1, restarts 0 or more, and 0 < tolerance <= certain < 1; "
                f"got {self.steps}, {self.memory}, {self.together}, {self.restarts}, {self.tolerance}, {self.certain}"
            )

    def prepare(self, background: Background) -> None:
        plan = repeatable(background.plan, "AndersonRetraining")
        layer = WhitenedFirstLayer.of(plan, "AndersonRetraining")
        self.training = RepeatedTraining(plan, layer, self.steps, self.memory, self.tolerance)
        self.folder, self.announce = background.state, background.announce
        self.guess = (self.inner or FirstLayerRidge()).bind(background)

    @property
    def first(self) -> Reconstructor:
        return self.guess

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.guess = self.guess.fitted(differences, images, labels, n_classes)
        self.shadow_images, self.shadow_labels, self.n_classes = images, labels, n_classes

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the first guess, and how it was improved."""
        how = (
            f"Every first guess was corrected by up to {self.steps} trainings on it; an image is certified if the "
            f"retrained weights differ from the released ones by at most {self.certain:g} of the image's effect on the "
            "weights."
        )
        return (*super().notes, how)

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        first = self.guess.reconstruct(differences)
        path, state = None, SearchState.of(first.images, first.labels)
        if self.folder is not None:
            path = state_path(self.folder, f"{self}", differences, first.images, first.labels)
            state = SearchState.read(path) if path.is_file() else state
        for attempt in range(self.restarts + 1):
            left = ((state.distances > self.certain) & (state.searches == attempt)).nonzero().squeeze(1)
            if not len(left):
                continue
            label = f"search {attempt + 1} of at most {self.restarts + 1}"
            advance = self.announce(len(left) * self.steps, label, "trainings")
            for chunk in left.split(self.together):
                starts, labels = first.images[chunk], first.labels[chunk]
                if attempt:
                    starts, labels = self._again(differences[chunk], starts, attempt)
                state.update(chunk, labels, *self.training.search(differences[chunk], starts, labels, advance))
                if path is not None:
                    state.write(path)
        return ReconstructedTargets(state.images, state.labels, state.distances, state.distances <= self.certain)

    def _again(self, differences: Tensor, images: Tensor, attempt: int) -> tuple[Tensor, Tensor]:
        """Starts `(m, c, h, w)` and labels `(m,)` of a further search."""
        starts = []
        for label in range(self.n_classes):
            of_class = self.shadow_images[self.shadow_labels == label]
            of_class = of_class if len(of_class) else self.shadow_images
            other = of_class.mean(dim=0) if attempt <= 2 else of_class[(attempt - 3) % len(of_class)]
            starts.append((images + other) / 2 if attempt == 1 else other.expand_as(images))
        candidates = torch.stack(starts)
        labels = self.training.likeliest(differences, candidates)
        return candidates[labels, torch.arange(len(images))], labels
