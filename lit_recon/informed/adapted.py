"""A reconstructor of one fixed set, put to use for another: as it is, or corrected by a few models of the new one.

Source: Balle, Cherubin and Hayes 2022, appendix B (fine-tuning a reconstructor network). Here the correction is a
second reconstructor that is fitted to the first one's errors, so that any two of them go together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lit_recon.informed.reconstructor import FittedReconstructor, ReconstructedTargets, Reconstructor


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
