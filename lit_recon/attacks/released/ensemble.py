"""Several reconstructors that learn from the same shadow models, and the mean of what they find.

Source: Balle, Cherubin and Hayes 2022, appendix B (fine-tuning a reconstructor network). Here the correction is a
second reconstructor that is fitted to the first one's errors, so that any two of them go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background, FittedReconstructor, ReconstructedTargets, Reconstructor
from lit_recon.errors import ConfigError


@dataclass(frozen=True)
class Ensemble(Reconstructor):
    """The mean image of several reconstructors, the label that most of them name, and their mean uncertainty.

    Their errors are partly independent, which their mean makes smaller; where they name different labels equally often,
    the earlier member's counts.

    Args:
        members: two or more.
    """

    members: Sequence[Reconstructor]

    def __post_init__(self) -> None:
        if len(self.members) < 2:
            raise ConfigError(f"an ensemble needs two or more members; got {len(self.members)}")

    def bind(self, background: Background) -> Reconstructor:
        return Ensemble([member.bind(background) for member in self.members])

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        return _FittedEnsemble(
            [member.fit(differences, images, labels, n_classes) for member in self.members], n_classes
        )


@dataclass(frozen=True, eq=False)
class _FittedEnsemble(FittedReconstructor):
    members: Sequence[FittedReconstructor]
    n_classes: int

    @property
    def facts(self) -> dict[str, float]:
        """Those of all members, each with its member's number."""
        found: dict[str, float] = {}
        for number, member in enumerate(self.members):
            found |= {f"member_{number}_{name}": value for name, value in member.facts.items()}
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of all members, each once."""
        return tuple(dict.fromkeys(note for member in self.members for note in member.notes))

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        found = [member.reconstruct(differences) for member in self.members]
        votes = torch.zeros(len(differences), self.n_classes, dtype=torch.float64)
        for rank, one in enumerate(found):
            # The small share decides between labels with equally many votes.
            votes[torch.arange(len(differences)), one.labels] += 1 - 1e-3 * rank / len(found)
        return ReconstructedTargets(
            images=torch.stack([one.images for one in found]).mean(dim=0),
            labels=votes.argmax(dim=1),
            uncertainty=torch.stack([one.uncertainty for one in found]).mean(dim=0),
        )


@dataclass(frozen=True)
class Adapted(Reconstructor):
    """Learns from shadow models what an already fitted reconstructor gets wrong about them.

    Args:
        known: the fitted reconstructor, of any fixed set.
        learner: of its errors; None to use it as it is.
    """

    known: FittedReconstructor
    learner: Reconstructor | None = None

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        if self.learner is None:
            return self.known
        # Errors lie in [-1, 1], and a reconstructor takes images in [0, 1].
        errors = (images - self.known.reconstruct(differences).images + 1) / 2
        return _FittedAdapted(self.known, self.learner.fit(differences, errors.clamp(0, 1), labels, n_classes))


@dataclass(frozen=True, eq=False)
class _FittedAdapted(FittedReconstructor):
    known: FittedReconstructor
    errors: FittedReconstructor

    @property
    def facts(self) -> dict[str, float]:
        """What was chosen while fitting the errors."""
        return self.errors.facts

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        first, second = self.known.reconstruct(differences), self.errors.reconstruct(differences)
        images = (first.images + 2 * second.images - 1).clamp(0, 1)
        # Few models of the new fixed set say less about labels than the many of the old one.
        return ReconstructedTargets(images, first.labels, second.uncertainty)
