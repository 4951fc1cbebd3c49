"""Reconstructors: attacks that turn the weights of a released model into its unknown training image."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, cast, final

import torch
from torch import Tensor

from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.errors import ShapeError, ThreatModelError

#: Differences that are checked at a time.
_ROWS = 1_000
#: Called with the number of units of a long computation that were just done.
Advance = Callable[[int], None]
#: Starts the progress display of a computation, given its number of units, its label and the name of a unit.
Announce = Callable[[int, str, str], Advance]


def silently(total: int, label: str, unit: str) -> Advance:
    """No progress display."""
    return lambda n: None


def digest(identity: str, *tensors: Tensor) -> str:
    """16 hexadecimal digits of a hash of a text and tensors, which name the state of a computation on them."""
    content = hashlib.sha256(identity.encode())
    for tensor in tensors:
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()[:16]


@dataclass(frozen=True)
class ReconstructedTargets:
    """One image for every released model."""

    images: Tensor  # `(m, c, h, w)` in [0, 1]
    labels: Tensor  # int64 `(m,)`, recovered by the attack
    uncertainty: Tensor  # `(m,)`, known to the attacker: 0 for a certain reconstruction, about 1 for a guess
    certified: Tensor | None = None  # bool `(m,)`: whether the image is known to be the true one; None: never known


class ShadowSizes(NamedTuple):
    """Numbers about the shadow models that a reconstructor is to learn from, known before they are trained."""

    n: int
    n_features: int  # of each model; or fewer, where an access has to be computed to count them
    image_shape: tuple[int, int, int]
    n_classes: int

    @classmethod
    def of(cls, plan: ShadowPlan, n: int, whole: bool = True) -> Self:
        """Of `n` models of a plan, of which all weights are seen or only a part."""
        known = plan.known
        n_features = known.n_parameters * len(known.kept_steps) if whole else 1
        return cls(n, n_features, plan.fixed.image_shape, plan.fixed.n_classes)


@dataclass(frozen=True, eq=False)
class Background:
    """What the adversary has besides shadow models."""

    plan: ShadowPlan | None = None  # the training of the released models; None where whole models are not seen
    state: Path | None = None  # folder from which killed computations resume; None: they start over
    announce: Announce = silently
    sizes: ShadowSizes | None = None  # None: not known yet, so that only `fitted` refuses them


class Reconstructor(ABC):
    """An attack on released models. Subclasses implement `fit` and `reconstruct`.

    A reconstructor is never changed once it is built: `bind` and `fitted` return copies.

    >>> class MeanImage(Reconstructor):
    ...     def fit(self, differences, images, labels, n_classes):
    ...         self.mean, self.label = images.mean(0), labels.mode().values
    ...     def reconstruct(self, differences):
    ...         n = len(differences)
    ...         return ReconstructedTargets(self.mean.expand(n, -1, -1, -1), self.label.expand(n), torch.ones(n))
    >>> attack = MeanImage().fitted(torch.eye(2), torch.full((2, 1, 4, 4), 0.5), torch.tensor([3, 3]), 10)
    >>> attack.reconstruct(torch.eye(2)).labels
    tensor([3, 3])
    """

    # Without annotations, which the command line would evaluate in the modules of subclasses.
    needs_background = False  # whether `bind` has to come before `fitted`
    background = cast("Background | None", None)  # the argument of `bind`

    @final
    def bind(self, background: Background) -> Self:
        """A copy with this background; ThreatModelError, UnsupportedModelError or ConfigError if it needs another."""
        bound = copy.copy(self)
        bound.background = background
        bound.prepare(background)
        return bound

    def prepare(self, background: Background) -> None:  # noqa: B027 - most need none
        """Refuse a background that lacks what this reconstructor needs, and derive from it what `fit` needs.

        With `background.sizes`, what `fit` would refuse for them is refused here, before shadow models are trained.
        """

    @final
    def fitted(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> Self:
        """A copy that has learned from shadow models; all choices are made among them.

        Args:
            differences: of their weights from the reference, `(s, p)`.
            images, labels: own image of each, `(s, c, h, w)` in [0, 1], and its label, int64 `(s,)`.
            n_classes: number of labels there are.

        Raises:
            ThreatModelError, ConfigError: `bind` has to be called before; a setting forbids so many models.
            ShapeError: see `check`.
        """
        if self.needs_background and self.background is None:
            raise ThreatModelError(
                f"{type(self).__name__} needs to know how the released models were trained: "
                "call bind(Background(plan)) before fitted()"
            )
        self.check(differences, images, labels, n_classes)
        learned = copy.copy(self)
        learned.fit(differences, images, labels, n_classes)
        return learned

    def check(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        """Raise ShapeError for fewer than two shadow models, or those that do not fit their images and labels."""
        s = len(differences)
        if differences.dim() != 2 or images.dim() != 4 or len(images) != s or labels.shape != (s,) or s < 2:
            raise ShapeError(
                "two or more shadow models need differences (s, p), images (s, c, h, w) and labels (s,); got "
                f"{tuple(differences.shape)}, {tuple(images.shape)} and {tuple(labels.shape)}"
            )
        # In parts: a mask of all differences would take a multiple of their memory.
        finite = all(bool(torch.isfinite(part).all()) for part in differences.split(_ROWS))
        if not finite or not ((images >= 0) & (images <= 1)).all():
            raise ShapeError("differences of shadow models must be finite, and their images in [0, 1]")
        if int(labels.min()) < 0 or int(labels.max()) >= n_classes:
            raise ShapeError(f"labels must be 0 to {n_classes - 1}; got {int(labels.min())} to {int(labels.max())}")

    @abstractmethod
    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        """Learn from shadow models, in place; `fitted` calls this on a copy."""

    @abstractmethod
    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        """The images of released models, given the differences `(m, p)` of their weights from the reference.

        A ShapeError says that one is zero or not finite, or that they are of another network.
        """

    @property
    def facts(self) -> dict[str, float]:
        """Numbers chosen or measured while fitting, by name."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the reader of the results."""
        return ()


class Improvement(Reconstructor):
    """A reconstructor that builds on another one, its `guess`, and reports that one's facts and notes."""

    needs_background = True

    @abstractmethod
    def prepare(self, background: Background) -> None:
        """Refuse a background that lacks what this reconstructor needs, and set `guess`."""

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.guess: Reconstructor = self.guess.fitted(differences, images, labels, n_classes)

    @property
    def facts(self) -> dict[str, float]:
        return self.guess.facts

    @property
    def notes(self) -> tuple[str, ...]:
        return self.guess.notes
