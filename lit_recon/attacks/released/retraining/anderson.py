"""Reconstruction by repeating the training: the guess is corrected, with Anderson acceleration, until weights agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.attacks.anderson import Anderson
from lit_recon.attacks.released.base import (
    Advance,
    Background,
    Improvement,
    ReconstructedTargets,
    Reconstructor,
    digest,
)
from lit_recon.attacks.released.first_layer import TINY, FirstLayerRidge, WhitenedFirstLayer
from lit_recon.attacks.released.retraining.repetition import Training, distances_of, repeatable, training_of
from lit_recon.attacks.released.retraining.state import read_state, write_state
from lit_recon.errors import ConfigError

#: A search restarts from its best guess when its distance exceeds the least one so far by this factor.
_LOST = 2.0
#: Factor on the damping of corrections after such a restart.
_CAREFUL = 0.5


@dataclass(frozen=True, eq=False)
class SearchState:
    """Best results so far, in tensors that are changed in place."""

    images: Tensor  # `(m, c, h, w)`
    labels: Tensor  # `(m,)`
    distances: Tensor  # of their weights, `(m,)`; infinite before the first search
    searches: Tensor  # number of searches for each, int64 `(m,)`

    def __post_init__(self) -> None:
        n = self.images.shape[:1]
        if self.images.dim() != 4 or not self.labels.shape == self.distances.shape == self.searches.shape == n:
            raise ValueError("images must be (m, c, h, w) and all else (m,)")

    @classmethod
    def of(cls, images: Tensor, labels: Tensor) -> SearchState:
        """Before the first search, from first guesses."""
        never = torch.full((len(images),), torch.inf, dtype=torch.float64)
        return cls(images.clone(), labels.clone(), never, torch.zeros_like(labels))

    def update(self, which: Tensor, labels: Tensor, images: Tensor, distances: Tensor) -> None:
        """Count one search for the targets at positions `which`, `(s,)`, and keep results that are better."""
        closer = distances < self.distances[which]
        for kept, values in ((self.images, images), (self.labels, labels), (self.distances, distances)):
            kept[which[closer]] = values[closer]
        self.searches[which] += 1


@dataclass
class AndersonRetraining(Improvement):
    """Improve the guess of another reconstructor by repeating the training until the weights agree.

    Every step costs one training. The guess whose weights come nearest to the released ones is returned. If they do not
    agree, the search restarts: half way from the first guess to the mean of a class, then from such a mean, then from
    shadow targets, each time with the label for which a training on that start comes nearest.

    Args:
        inner: makes the first guess; default: `FirstLayerRidge`.
        steps: most trainings per target and search.
        restarts: most further searches for a target whose weights did not agree.
        memory: number of earlier steps that Anderson acceleration combines.
        tolerance: relative distance of weights at which a search ends; float32 leaves 1e-5 to 1e-3 (10,000 images).
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

    def __post_init__(self) -> None:
        counts = (self.steps, self.memory, self.together, self.restarts + 1)
        if min(counts) < 1 or not 0 < self.tolerance <= self.certain < 1:
            raise ConfigError(
                "steps, memory and together must be at least 1, restarts 0 or more, and 0 < tolerance <= certain < 1; "
                f"got {self}"
            )

    def prepare(self, background: Background) -> None:
        self.plan = repeatable(background.plan, "AndersonRetraining")
        self.layer = WhitenedFirstLayer.of(self.plan, "AndersonRetraining")
        self.folder, self.announce = background.state, background.announce
        self.guess = (self.inner or FirstLayerRidge()).bind(background)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        super().fit(differences, images, labels, n_classes)
        self.shadow_images, self.shadow_labels, self.n_classes = images, labels, n_classes

    @property
    def notes(self) -> tuple[str, ...]:
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
            path = self.folder / f"search_{digest(f'{self}', differences, first.images, first.labels)}.safetensors"
            state = read_state(path, SearchState) if path.is_file() else state
        train = training_of(self.plan, first.images.shape[1:])
        for attempt in range(self.restarts + 1):
            left = ((state.distances > self.certain) & (state.searches == attempt)).nonzero().squeeze(1)
            if not len(left):
                continue
            label = f"search {attempt + 1} of at most {self.restarts + 1}"
            advance = self.announce(len(left) * self.steps, label, "trainings")
            for chunk in left.split(self.together):
                starts, labels = first.images[chunk], first.labels[chunk]
                if attempt:
                    starts, labels = self._again(train, differences[chunk], starts, attempt)
                state.update(chunk, labels, *self._search(train, differences[chunk], starts, labels, advance))
                if path is not None:
                    write_state(path, state)
        return ReconstructedTargets(state.images, state.labels, state.distances, state.distances <= self.certain)

    def _search(
        self, train: Training, released: Tensor, starts: Tensor, labels: Tensor, advance: Advance
    ) -> tuple[Tensor, Tensor]:
        """The best images `(m, c, h, w)` and the relative distances `(m,)` of their weights from `released`, `(m, p)`.

        `advance` is called with the number of trainings done or no longer needed.
        """
        guesses = starts.flatten(1).double()
        best, best_correction = guesses.clone(), torch.zeros_like(guesses)
        least = torch.full((len(guesses),), math.inf, dtype=torch.float64)
        damping, active = torch.ones_like(least), torch.arange(len(guesses))
        memory = Anderson(len(guesses), guesses.shape[1], self.memory)
        for step in range(self.steps):
            found, wanted = train(guesses, labels[active]), released[active]
            advance(len(active))
            distance = distances_of(found, wanted)
            corrections = self._corrections(found, wanted, guesses)
            closer, lost = distance < least[active], distance > _LOST * least[active]
            for kept, values in ((best, guesses), (best_correction, corrections), (least, distance)):
                kept[active[closer]] = values[closer]
            going = least[active] > self.tolerance
            advance(int((~going).sum()) * (self.steps - step - 1))
            if step == self.steps - 1 or not going.any():
                break
            memory.forget(lost)
            damping[active[lost]] *= _CAREFUL
            guesses[lost], corrections[lost] = best[active[lost]], best_correction[active[lost]]
            guesses = memory.next(guesses, corrections, damping[active]).clamp(0, 1)[going]
            memory.keep(going)
            active = active[going]
        return best.float().unflatten(1, starts.shape[1:]), least

    def _corrections(self, found: Tensor, released: Tensor, guesses: Tensor) -> Tensor:
        """Corrections of guesses `(m, d)`, neglecting that the fixed set's contributions change, too."""
        rows = self.layer.rows(found)
        weights = self.layer.weights(rows, guesses)
        missing = torch.einsum("mj,mjd->md", weights, self.layer.rows(released) - rows)
        corrections: Tensor = missing / weights.square().sum(dim=1, keepdim=True).clamp(min=TINY)
        return corrections

    def _again(self, train: Training, released: Tensor, images: Tensor, attempt: int) -> tuple[Tensor, Tensor]:
        """Starts `(m, c, h, w)` and labels `(m,)` of a further search, given the first guesses."""
        starts, distances = [], []
        for label in range(self.n_classes):
            of_class = self.shadow_images[self.shadow_labels == label]
            of_class = of_class if len(of_class) else self.shadow_images
            other = of_class.mean(dim=0) if attempt <= 2 else of_class[(attempt - 3) % len(of_class)]
            starts.append((images + other) / 2 if attempt == 1 else other.expand_as(images))
            found = train(starts[-1].flatten(1).double(), torch.full((len(images),), label))
            distances.append(distances_of(found, released))
        labels = torch.stack(distances).argmin(dim=0)
        return torch.stack(starts)[labels, torch.arange(len(images))], labels
