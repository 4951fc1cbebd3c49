"""Informed membership inference: was a model trained on the known records and the first, or the second candidate?

Every attack gives one score per model, and guesses the second candidate if it is above 0; ShapeError for other shapes.

Source: [Balle2022], section II-D and algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from lit_recon.attacks.shadow.training import cross_entropy, of_own_images
from lit_recon.data import ImageSet
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, ShapeError

#: Models whose losses are computed at a time, on one image each and on all images.
_CHUNK, _CHUNK_OF_ALL = 256, 16


@dataclass(frozen=True, eq=False)
class MembershipGames:
    """Games of algorithm 2: two candidates each, and the secret membership bit."""

    first: ImageSet
    second: ImageSet
    bits: Tensor  # int64 `(m,)`: whether the model is trained on the first (0) or the second candidate (1)

    @classmethod
    def draw(cls, images: ImageSet, seed: int) -> MembershipGames:
        """Pair the first half of an even number of images with the second half, and draw fair membership bits."""
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
        """The candidates that the released models are trained on."""
        places = self.bits, torch.arange(len(self.bits))
        images = torch.stack([self.first.images, self.second.images])[places]
        labels = torch.stack([self.first.labels, self.second.labels])[places]
        return ImageSet(images, labels, self.first.class_names, self.first.name)


def compare_trained(released: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Scores `(m,)`: distance of the released model to the adversary's model of the first candidate, minus the second.

    Models are weights, or their differences from a common reference, `(m, p)`. If training is deterministic and
    everything else is known, one of the two distances is 0 up to rounding.
    """
    _check(released, first, second)
    nearer: Tensor = (released - first).double().norm(dim=1) - (released - second).double().norm(dim=1)
    return nearer


def compare_losses(
    first: Tensor, second: Tensor, usual_first: Tensor | None = None, usual_second: Tensor | None = None
) -> Tensor:
    """Scores `(m,)`: the model's loss on the first candidate minus that on the second, as training data has lower loss.

    The usual losses `(s, m)` are those of models that were not trained on these candidates; their means are subtracted,
    since some images have larger losses under any model. Default: no calibration.
    """
    _check(first, second)
    losses = [first.double(), second.double()]
    for index, usual in enumerate((usual_first, usual_second)):
        if usual is not None:
            _check(first, usual[0])
            losses[index] = losses[index] - usual.double().mean(dim=0)
    return losses[0] - losses[1]


def compare_reconstructions(images: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Scores `(m,)`: RMSE of reconstructions `(m, c, h, w)` to the first candidates minus that to the second."""
    _check(images, first, second)
    return distances(images, first) - distances(images, second)


def implies_membership(errors: Tensor, apart: Tensor) -> Tensor:
    """Whether a reconstruction is so good that `compare_reconstructions` must be right, bool `(m,)`.

    By the triangle inequality this holds if its distance `(m,)` to the true candidate is below half the distance `(m,)`
    of the candidates, both by a metric such as `distances`.
    """
    _check(errors, apart)
    return errors < apart / 2


def distances(a: Tensor, b: Tensor) -> Tensor:
    """RMSE of pairs of images `(m, c, h, w)`, float64 `(m,)`."""
    return (a.double() - b.double()).flatten(1).square().mean(dim=1).sqrt()


def own_losses(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy `(m,)` of models with flat weights `(m, p)` on one image `(m, c, h, w)` and label `(m,)` each."""
    with torch.no_grad():
        return of_own_images(partial(cross_entropy, network), weights, images, labels, _CHUNK)


def all_losses(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy `(s, m)` of every model on every image; arguments as for `own_losses`."""
    losses = partial(cross_entropy, network, images=images, labels=labels, reduction="none")
    with torch.no_grad():
        return torch.cat([vmap(losses)(part) for part in weights.split(_CHUNK_OF_ALL)])


def _check(*tensors: Tensor) -> None:
    if len({tuple(tensor.shape) for tensor in tensors}) != 1:
        raise ShapeError(f"arguments must have one shape; got {[tuple(tensor.shape) for tensor in tensors]}")
