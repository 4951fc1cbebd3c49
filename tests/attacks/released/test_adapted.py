"""A reconstructor of one fixed set serves another, and a few models of the new one correct it."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.attacks.released.base import ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.ensemble import Adapted
from lit_recon.attacks.released.kernel_ridge import KernelRidge


class MeanImage(Reconstructor):
    """The mean of the shadow models' images, for every released model."""

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.image, self.label = images.mean(0), int(labels[0])

    @property
    def facts(self) -> dict[str, float]:
        return {"brightness": float(self.image.mean())}

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        n = len(differences)
        return ReconstructedTargets(self.image.expand(n, -1, -1, -1), torch.full((n,), self.label), torch.zeros(n))


def grey(value: float, label: int) -> MeanImage:
    """Fitted to images of one shade and to one label."""
    return MeanImage().fitted(torch.zeros(2, 3), torch.full((2, 1, 2, 2), value), torch.full((2,), label), 5)


def test_without_a_learner_the_known_one_answers() -> None:
    known = grey(0.3, 4)
    fitted = Adapted(known).fitted(torch.zeros(0, 3), torch.zeros(0, 1, 2, 2), torch.zeros(0).long(), 5)
    found, expected = (one.reconstruct(torch.zeros(2, 3)) for one in (fitted, known))
    assert torch.equal(found.images, expected.images)
    assert torch.equal(found.labels, expected.labels)
    assert fitted.facts == known.facts


def test_errors_are_learned_exactly_where_they_are_constant() -> None:
    known = grey(0.3, 4)
    images = torch.full((6, 1, 2, 2), 0.9)
    images[:, :, 0] = 0.1
    fitted = Adapted(known, MeanImage()).fitted(torch.zeros(6, 3), images, torch.zeros(6).long(), 5)
    found = fitted.reconstruct(torch.zeros(2, 3))
    torch.testing.assert_close(found.images, images[:2])
    assert found.labels.tolist() == [4, 4]
    assert fitted.facts["brightness"] == float(((images - 0.3 + 1) / 2).mean(0).mean())


def test_a_few_new_models_correct_an_old_reconstructor() -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(260, 1, 3, 3, generator=generator), torch.zeros(260).long()
    old = torch.randn(9, 40, generator=generator)
    new = old + 0.5 * torch.randn(9, 40, generator=generator)
    flat = images.flatten(1)
    attack = KernelRidge()
    known = attack.fitted(flat[:200] @ old, images[:200], labels[:200], 2)
    targets, observed = images[230:], flat[230:] @ new

    def error(fitted: Reconstructor) -> float:
        return float((fitted.reconstruct(observed).images - targets).square().mean())

    few = (flat[200:230] @ new, images[200:230], labels[200:230], 2)
    adapted, scratch = error(Adapted(known, attack).fitted(*few)), error(attack.fitted(*few))
    # measured 0.008, 0.055, 0.017
    assert adapted < 0.5 * error(known)
    assert adapted < 0.9 * scratch
