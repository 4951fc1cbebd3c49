"""Combinations of reconstructors: the mean of several, and one that corrects another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor
from lit_recon.errors import ConfigError


@dataclass
class Ensemble(Reconstructor):
    """The mean image of two or more reconstructors, their majority label, and their mean uncertainty.

    Args:
        members: two or more; ties between labels go to the earlier one.
    """

    members: Sequence[Reconstructor]

    def __post_init__(self) -> None:
        if len(self.members) < 2:
            raise ConfigError(f"an ensemble needs two or more members; got {len(self.members)}")

    def prepare(self, background: Background) -> None:
        self.members = [member.bind(background) for member in self.members]

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.members = [member.fitted(differences, images, labels, n_classes) for member in self.members]
        self.n_classes = n_classes

    @property
    def facts(self) -> dict[str, float]:
        return {
            f"member_{number}_{name}": value
            for number, member in enumerate(self.members)
            for name, value in member.facts.items()
        }

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for member in self.members for note in member.notes))

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        found = [member.reconstruct(differences) for member in self.members]
        labels = torch.stack([one.labels for one in found])
        votes = (labels[:, None] == labels).sum(dim=1)  # for the label of every member, `(members, m)`
        winners = votes.argmax(dim=0)  # the first of equal counts
        return ReconstructedTargets(
            images=torch.stack([one.images for one in found]).mean(dim=0),
            labels=labels[winners, torch.arange(len(differences))],
            uncertainty=torch.stack([one.uncertainty for one in found]).mean(dim=0),
        )


@dataclass
class Adapted(Reconstructor):
    """A fitted reconstructor, corrected by another one that learns its errors on the shadow models.

    Args:
        known: the fitted reconstructor, of any fixed set.
        learner: of its errors; None to use it as it is, without shadow models.

    Source: after Balle, Cherubin and Hayes 2022, appendix B, where a reconstructor network is fine-tuned instead.
    """

    known: Reconstructor
    learner: Reconstructor | None = None

    def check(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        if self.learner is not None:
            super().check(differences, images, labels, n_classes)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        if self.learner is not None:
            # Errors lie in [-1, 1], and a reconstructor takes images in [0, 1].
            errors = (images - self.known.reconstruct(differences).images + 1) / 2
            self.learner = self.learner.fitted(differences, errors.clamp(0, 1), labels, n_classes)

    @property
    def facts(self) -> dict[str, float]:
        return (self.learner or self.known).facts

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.learner is not None else self.known.notes

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        first = self.known.reconstruct(differences)
        if self.learner is None:
            return first
        second = self.learner.reconstruct(differences)
        images = (first.images + 2 * second.images - 1).clamp(0, 1)
        # The few models of the new fixed set say less about labels than the many of the old one.
        return ReconstructedTargets(images, first.labels, second.uncertainty)
