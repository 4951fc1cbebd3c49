"""Images at which attacks on a training set begin, with a stated share of the truth in them.

Nothing else in an experiment shows the true images to an attack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_recon.errors import ConfigError


@dataclass(frozen=True)
class StartMaterial:
    """What starts are made of, each `(m, c, h, w)` with one image per candidate.

    Attributes:
        truth: the training image with the candidate's number; training images take turns.
        other: another image of the data with the same label, not in the training set.
        mean: the public mean image `(c, h, w)`.
        generator: of random noise.
    """

    truth: Tensor
    other: Tensor
    mean: Tensor
    generator: torch.Generator

    def noise(self, scale: float) -> Tensor:
        """The mean image plus Gaussian noise of this standard deviation per pixel."""
        drawn = torch.randn(self.truth.shape, generator=self.generator, dtype=self.truth.dtype)
        return self.mean + scale * drawn.to(self.truth.device)


class Start(ABC):
    """A kind of start. Subclasses implement `truth_shares`, `images` and `describe`."""

    @abstractmethod
    def truth_shares(self) -> list[float]:
        """Shares of the truth in the start, in [0, 1], one cell of a study for each."""

    @abstractmethod
    def images(self, material: StartMaterial, share: float) -> Tensor:
        """The start `(m, c, h, w)` with one of these shares."""

    @abstractmethod
    def describe(self, share: float) -> str:
        """What a start with this share is made of, for reports."""


@dataclass(frozen=True)
class NoiseStart(Start):
    """Gaussian noise around the mean image: the start of an attacker who knows nothing.

    Args:
        scale: standard deviation per pixel.
    """

    scale: float = 1e-3

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def truth_shares(self) -> list[float]:
        return [0.0]

    def images(self, material: StartMaterial, share: float) -> Tensor:
        return material.noise(self.scale)

    def describe(self, share: float) -> str:
        return f"noise of standard deviation {self.scale:g} around the mean image"


@dataclass(frozen=True)
class TruthStart(Start):
    """The training images themselves: whether an attack stays at the truth."""

    def truth_shares(self) -> list[float]:
        return [1.0]

    def images(self, material: StartMaterial, share: float) -> Tensor:
        return material.truth.clone()

    def describe(self, share: float) -> str:
        return "the training images themselves"


@dataclass(frozen=True)
class OtherPartitionStart(Start):
    """Other images of the data with the same labels: real images that were not trained on."""

    def truth_shares(self) -> list[float]:
        return [0.0]

    def images(self, material: StartMaterial, share: float) -> Tensor:
        return material.other.clone()

    def describe(self, share: float) -> str:
        return "other images of the data with the same labels"


@dataclass(frozen=True)
class MixtureStart(Start):
    """`share * truth + (1 - share) * rest` in every image: an attacker with a blurred idea of all training images.

    Args:
        shares: of the truth, in [0, 1].
        rest: `noise` around the mean image, or `other` images of the data with the same labels.
        scale: standard deviation of the noise.
    """

    shares: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    rest: str = "noise"
    scale: float = 0.2

    def __post_init__(self) -> None:
        _check_shares(self.shares)
        _check_scale(self.scale)
        if self.rest not in ("noise", "other"):
            raise ConfigError(f"the rest of a mixture must be noise or other; got {self.rest!r}")

    def truth_shares(self) -> list[float]:
        return self.shares

    def images(self, material: StartMaterial, share: float) -> Tensor:
        rest = material.noise(self.scale) if self.rest == "noise" else material.other
        return share * material.truth + (1 - share) * rest

    def describe(self, share: float) -> str:
        rest = f"noise of standard deviation {self.scale:g} around the mean image"
        rest = rest if self.rest == "noise" else "another image with the same label"
        return f"each the sum of {share:g} times a training image and {1 - share:g} times {rest}"


@dataclass(frozen=True)
class PartialStart(Start):
    """A share of the candidates is the truth, all others are noise: an attacker who has some of the training images.

    Args:
        shares: of the candidates, in [0, 1]; rounded to whole images, of the first labels and the last alike.
        scale: standard deviation of the others' noise around the mean image.
    """

    shares: list[float] = field(default_factory=lambda: [0.5])
    scale: float = 1e-3

    def __post_init__(self) -> None:
        _check_shares(self.shares)
        _check_scale(self.scale)

    def truth_shares(self) -> list[float]:
        return self.shares

    def images(self, material: StartMaterial, share: float) -> Tensor:
        m = len(material.truth)
        drawn = material.noise(self.scale)
        chosen = torch.randperm(m, generator=material.generator)[: round(share * m)].to(drawn.device)
        return drawn.index_copy(0, chosen, material.truth[chosen])

    def describe(self, share: float) -> str:
        return f"{share:g} of the candidates are training images, the others noise around the mean image"


def _check_shares(shares: list[float]) -> None:
    if not shares or len(set(shares)) < len(shares) or not all(0 <= share <= 1 for share in shares):
        raise ConfigError(f"shares of the truth must differ from each other and lie in [0, 1]; got {shares}")


def _check_scale(scale: float) -> None:
    if not 0 <= scale < torch.inf:
        raise ConfigError(f"scale, the noise of a start, must be at least 0 and finite; got {scale:g}")
