"""What turns the trace that an image left in a model's weights back into the image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.errors import ShapeError

#: Begins a long computation: told its number of units, what it is and what its units are called, it gives what is to be
#: told of units done.
Announce = Callable[[int, str, str], Callable[[int], None]]


def silently(total: int, label: str, unit: str) -> Callable[[int], None]:
    """An announcement that nobody hears."""
    return lambda n: None


@dataclass(frozen=True)
class ReconstructedTargets:
    """One image for every released model.

    Attributes:
        images: `(m, c, h, w)` in [0, 1].
        labels: int64 `(m,)`, as the attack takes them to be.
        uncertainty: `(m,)`, seen by the attacker: how little the shadow models tell about this model; 0 to about 1.
        certified: bool `(m,)`: to the attacker this is the image itself; None for an attack that cannot tell.
    """

    images: Tensor
    labels: Tensor
    uncertainty: Tensor
    certified: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Background:
    """What there is beside shadow models.

    Attributes:
        plan: how the released models were trained, all of it known to the adversary; None where he does not see their
            weights.
        state: folder in which a long computation keeps what it needs to go on after a kill; None: it starts over.
        announce: told how far long reconstructions have come.
    """

    plan: ShadowPlan | None = None
    state: Path | None = None
    announce: Announce = silently


class FittedReconstructor(ABC):
    """Knows the shadow models, and reconstructs from released ones."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a reader of its results should know; none by default."""
        return ()

    @property
    @abstractmethod
    def facts(self) -> dict[str, float]:
        """What was chosen or measured while fitting, by name."""

    @abstractmethod
    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        """The images of released models.

        Args:
            differences: of their weights from the reference, `(m, p)`.

        Raises:
            ShapeError: a difference is zero or not finite, or they are of another network.
        """


class Reconstructor(ABC):
    """A way to learn from shadow models."""

    def bind(self, background: Background) -> Reconstructor:
        """The same with what there is beside shadow models; by default it makes no use of that.

        Raises:
            ThreatModelError, UnsupportedModelError, ConfigError: it needs something else.
        """
        return self

    @abstractmethod
    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        """Learn from shadow models; all choices are made among them.

        Args:
            differences: of their weights from the reference, `(s, p)`.
            images: own image of each, `(s, c, h, w)` in [0, 1].
            labels: of those, int64 `(s,)`.
            n_classes: number of classes.

        Raises:
            ConfigError: a setting forbids so many models.
            ShapeError: the arguments do not fit each other or are not finite.
        """


def check_shadows(differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
    """Refuse shadow models that do not fit their images.

    Raises:
        ShapeError: shapes differ, there are fewer than two models, or something is NaN or out of range.
    """
    s = len(differences)
    if differences.dim() != 2 or images.dim() != 4 or len(images) != s or labels.shape != (s,) or s < 2:
        raise ShapeError(
            "two or more shadow models need differences (s, p), images (s, c, h, w) and labels (s,); got "
            f"{tuple(differences.shape)}, {tuple(images.shape)} and {tuple(labels.shape)}"
        )
    if not torch.isfinite(differences).all() or not ((images >= 0) & (images <= 1)).all():
        raise ShapeError("differences of shadow models must be finite, and their images in [0, 1]")
    if int(labels.min()) < 0 or int(labels.max()) >= n_classes:
        raise ShapeError(f"labels must be 0 to {n_classes - 1}; got {int(labels.min())} to {int(labels.max())}")
