"""Informed membership inference: which of two candidates was a model trained on, beside records that are known?

Every attack gives a score per model: above 0 it guesses the second candidate, else the first.

Source: Balle, Cherubin and Hayes 2022, Reconstructing training data with informed adversaries, section II-D and
algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from lit_recon.attacks.shadow.training import unflatten
from lit_recon.data import ImageSet
from lit_recon.data.seeding import seeded_generator
from lit_recon.errors import ConfigError, ShapeError

#: Models whose losses are computed at a time: on one image each, and on all images.
_CHUNK, _CHUNK_OF_ALL = 256, 16


@dataclass(frozen=True, eq=False)
class MembershipGames:
    """Rounds of algorithm 2: two candidates each, and the secret bit that tells which one is trained on.

    Attributes:
        first, second: candidates, `m` of each.
        bits: int64 `(m,)`; 0 for the first, 1 for the second. No attack may see them.
    """

    first: ImageSet
    second: ImageSet
    bits: Tensor

    @classmethod
    def draw(cls, images: ImageSet, seed: int) -> MembershipGames:
        """Pair the first half of some images with the second half and toss a fair coin for each pair.

        Raises:
            ConfigError: there is no even number of images.
        """
        m, odd = divmod(len(images), 2)
        if odd or not m:
            raise ConfigError(
                f"split.targets must be an even number of candidates, two for each game; got {len(images)}"
            )
        bits = torch.randint(2, (m,), generator=seeded_generator(seed, "membership bits"))
        places = torch.arange(m)
        return cls(images.subset(places), images.subset(places + m), bits)

    @property
    def chosen(self) -> ImageSet:
        """The candidates that the models are trained on."""
        m = len(self.bits)
        images = torch.stack([self.first.images, self.second.images])[self.bits, torch.arange(m)]
        labels = torch.stack([self.first.labels, self.second.labels])[self.bits, torch.arange(m)]
        return ImageSet(images, labels, self.first.class_names, self.first.name)


def compare_trained(released: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Train on both candidates and see which model the released one is nearer to.

    Args:
        released: weights, or their differences from a common reference, `(m, p)`.
        first, second: of the adversary's own models of the first and of the second candidates, `(m, p)`.

    Returns:
        Scores `(m,)`: the distance to the first less that to the second. Where training is deterministic and all else
        is known one of the two is 0 but for rounding.

    Raises:
        ShapeError: shapes differ.
    """
    _check(released, first, second)
    nearer: Tensor = (released - first).double().norm(dim=1) - (released - second).double().norm(dim=1)
    return nearer


def compare_losses(
    first: Tensor, second: Tensor, usual_first: Tensor | None = None, usual_second: Tensor | None = None
) -> Tensor:
    """A model's loss is lower on what it was trained on.

    Against a single candidate its loss is compared with a threshold; between two their difference needs none.

    Args:
        first, second: losses of the released models on their candidates, `(m,)`.
        usual_first, usual_second: losses of models without these candidates, `(s, m)`, whose means are subtracted: one
            image is harder than the other, whoever is trained on what. Default: losses are taken as they are.

    Returns:
        Scores `(m,)`.

    Raises:
        ShapeError: shapes differ.
    """
    _check(first, second)
    losses = [first.double(), second.double()]
    for index, usual in enumerate((usual_first, usual_second)):
        if usual is not None:
            _check(first, usual[0])
            losses[index] = losses[index] - usual.double().mean(dim=0)
    return losses[0] - losses[1]


def compare_reconstructions(images: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Reconstruct, then see which candidate the reconstruction is nearer to: any such attack infers membership.

    Args:
        images: what a reconstruction attack made of the models, `(m, c, h, w)`.
        first, second: candidates, `(m, c, h, w)`.

    Returns:
        Scores `(m,)`: the distance (RMSE) to the first candidate less that to the second.

    Raises:
        ShapeError: shapes differ.
    """
    _check(images, first, second)
    return distances(images, first) - distances(images, second)


def implies_membership(errors: Tensor, apart: Tensor) -> Tensor:
    """Whether a reconstruction was so good that `compare_reconstructions` cannot have guessed wrong, bool `(m,)`.

    By the triangle inequality it is where the error is below half of what the candidates are apart, both measured by a
    metric such as `distances`; their squares would not do.

    Args:
        errors: distance of the reconstruction to the true candidate, `(m,)`.
        apart: distance between the candidates, `(m,)`.
    """
    _check(errors, apart)
    return errors < apart / 2


def distances(a: Tensor, b: Tensor) -> Tensor:
    """RMSE between images `(m, c, h, w)` of equal place, float64 `(m,)`."""
    return (a.double() - b.double()).flatten(1).square().mean(dim=1).sqrt()


def own_losses(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every model on an image of its own.

    Args:
        network: the architecture, in the dtype of weights and images.
        weights: flat, `(m, p)`.
        images: `(m, c, h, w)` in [0, 1].
        labels: int64 `(m,)`.

    Returns:
        `(m,)`.

    Raises:
        ShapeError: the weights are of another network, or their number is another.
    """
    if not len(weights) == len(images) == len(labels):
        raise ShapeError(
            f"one image and one label per model are needed; got {len(weights)} models, {len(images)} images and "
            f"{len(labels)} labels"
        )

    def loss(one: Tensor, image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(network, unflatten(network, one), image[None])
        return F.cross_entropy(logits, label[None])

    with torch.no_grad():
        parts = zip(weights.split(_CHUNK), images.split(_CHUNK), labels.split(_CHUNK), strict=True)
        return torch.cat([vmap(loss)(*part) for part in parts])


def all_losses(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every model on every image.

    Args:
        network, weights, images, labels: as for `own_losses`, of `s` models and `m` images.

    Returns:
        `(s, m)`.
    """

    def loss(one: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, unflatten(network, one), images), labels, reduction="none")

    with torch.no_grad():
        return torch.cat([vmap(loss)(part) for part in weights.split(_CHUNK_OF_ALL)])


def _check(*tensors: Tensor) -> None:
    if len({tuple(tensor.shape) for tensor in tensors}) != 1:
        raise ShapeError(f"arguments must have one shape; got {[tuple(tensor.shape) for tensor in tensors]}")
