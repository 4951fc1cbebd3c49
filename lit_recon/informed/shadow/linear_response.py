"""Shadow models without training: how one image's pull spreads along the path that all models nearly share.

A model trained on the fixed set and one image stays within a thousandth of the reference, which is trained on the
fixed set alone. To first order in the distance `delta`, the fixed set's gradient changes by its Hessian times `delta`:

    v <- momentum v + (H(theta_t) delta + g(theta_t + delta)) / (n + 1),    delta <- delta - lr v

with the own image's gradient `g` taken exactly. The path `theta_t` and its Hessians are the same for all models: each
is computed once, serves all of them, and is forgotten. What an own image has outside the leading directions of the
fixed set is moved by `g` alone: one number per neuron times that remainder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_recon.data.seeding import seeded_generator
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.informed.shadow.curvature import Coordinates, n_coordinates, with_one
from lit_recon.informed.shadow.descent import Descent
from lit_recon.informed.shadow.products import times_transposed
from lit_recon.informed.shadow.training import KnownTraining, flat_weights, full_precision, unflatten


@dataclass(frozen=True)
class LinearResponse:
    """How shadow models are had by linear response, and how far that is trusted.

    Args:
        rank: directions of the fixed images along which their Hessian is kept; all where there are no more.
        hessian_images: of the fixed set that a Hessian is estimated on, others in every step; all where it has no more.
        sample: models that are also trained exactly, to measure the error.
        tolerance: largest median relative error of the sample's differences with which linear response is used.

    Raises:
        ConfigError: a number is out of its range.
    """

    rank: int = 100
    hessian_images: int = 2_000
    sample: int = 32
    tolerance: float = 0.4

    def __post_init__(self) -> None:
        if self.rank < 1 or self.hessian_images < 1 or self.sample < 2:
            raise ConfigError(
                "linear.rank and linear.hessian_images must be at least 1 and linear.sample at least 2; "
                f"got {self.rank}, {self.hessian_images} and {self.sample}"
            )
        if not 0 < self.tolerance <= 1:
            raise ConfigError(f"linear.tolerance is a relative error, above 0 and at most 1; got {self.tolerance}")


def respond(
    known: KnownTraining, initial: Tensor, groups: Sequence[tuple[Tensor, Tensor]], response: LinearResponse
) -> Iterator[Tensor]:
    """What each image changes in the weights, to first order in what the fixed set does about it.

    All models advance together along the path. A group's result depends on its own images only, not on the others.

    Args:
        known: the training: gradient descent on full batches, with momentum or without.
        initial: weights `(p,)` that all models start from.
        groups: images `(s, c, h, w)` and labels `(s,)`; what moves at a time should fit the processor's cache.
        response: rank and number of images of the Hessian.

    Yields:
        Differences `(s, p)` from `train_reference`, group by group.

    Raises:
        ConfigError: the network is no MLP, or its Hessians would be too large.
        ShapeError: arguments do not fit, or training diverged.
    """
    for images, labels in groups:
        known.check(initial, images, labels)
    with full_precision(), torch.no_grad():
        coordinates = Coordinates.of(known, response.rank)
        models = [_Responses(known, coordinates, *group) for group in groups]
        for step, weights in enumerate(reference_path(known, initial)):
            hessian = _estimated(coordinates, known, weights, step, response.hessian_images)
            for group in models:
                group.step(weights, hessian)
    for group in models:
        with full_precision(), torch.no_grad():
            differences = group.differences()
        if not torch.isfinite(differences).all():
            raise ShapeError("linear response diverged to NaN or infinity: lower descent.lr, or set shadows to exact")
        yield differences


def reference_path(known: KnownTraining, initial: Tensor) -> Iterator[Tensor]:
    """Weights `(p,)` of the reference before each of its steps; see `train_reference`."""
    network, n = copy.deepcopy(known.network), len(known.images)
    network.load_state_dict(unflatten(network, initial))
    optimizer = known.descent.torch_optimizer(network)
    for _ in range(known.descent.steps):
        yield flat_weights(network)
        with torch.enable_grad():
            optimizer.zero_grad()
            F.cross_entropy(network(known.images), known.labels, reduction="sum").div(n + 1).backward()
            optimizer.step()


def bytes_per_model(known: KnownTraining, rank: int) -> int:
    """Memory that one model takes on its way: its image twice, where it is and how fast it moves."""
    inputs = known.images[0].numel()
    return known.images.element_size() * (2 * inputs + rank + 2 * n_coordinates(known.network, inputs, rank))


def _estimated(coordinates: Coordinates, known: KnownTraining, weights: Tensor, step: int, n_images: int) -> Tensor:
    """The Hessian of the loss summed over the fixed set, from some of its images."""
    n = len(known.images)
    if n_images >= n:
        return coordinates.hessian(weights, known.images.flatten(1), known.labels)
    chosen = torch.randperm(n, generator=seeded_generator(step, "curvature"))[:n_images].to(weights.device)
    found = coordinates.hessian(weights, known.images[chosen].flatten(1), known.labels[chosen])
    return found.mul_(n / n_images)


class _Responses:
    """Models of one group on their way.

    Args:
        known: the training.
        coordinates: of what the fixed set acts on.
        images: own image of each model, `(s, c, h, w)`.
        labels: of those, `(s,)`.
    """

    def __init__(self, known: KnownTraining, coordinates: Coordinates, images: Tensor, labels: Tensor) -> None:
        self.coordinates, self.labels, self.n = coordinates, labels, len(known.images)
        self._inputs = with_one(images)
        self._along = times_transposed(self._inputs, coordinates.basis.T)  # (s, r)
        remainder = self._inputs - times_transposed(self._along, coordinates.basis)
        self._squares = remainder.square().sum(dim=1, keepdim=True)
        self._moved = images.new_zeros(len(images), coordinates.n)
        self._beyond = images.new_zeros(len(images), coordinates.neurons)
        self._descent = Descent(known.descent, [self._moved, self._beyond])

    def step(self, weights: Tensor, hessian: Tensor) -> None:
        """Go one step of training, at these weights of the reference."""
        first, later = self._split(self._moved)
        outputs = times_transposed(self._inputs, self.coordinates.first_layer(weights))
        outputs += torch.bmm(first, self._along[:, :, None])[:, :, 0]
        outputs.addcmul_(self._beyond, self._squares)
        pull, own = self.coordinates.flow(self.coordinates.later(weights) + later, outputs, self.labels)
        gradient = times_transposed(self._moved, hessian)
        for part, added in zip(self._split(gradient), (pull[:, :, None] * self._along[:, None, :], own), strict=True):
            part.add_(added)
        self._descent.step([gradient, pull], scale=1 / (self.n + 1))

    def differences(self) -> Tensor:
        """What the images changed so far, `(s, p)`."""
        first, later = self._split(self._moved)
        remainder = self._inputs - times_transposed(self._along, self.coordinates.basis)
        whole = times_transposed(first.flatten(0, 1), self.coordinates.basis).view(
            len(first), -1, len(self.coordinates.basis)
        )
        return self.coordinates.flat(whole.addcmul_(self._beyond[:, :, None], remainder[:, None, :]), later)

    def _split(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Of the first layer `(s, h, r)` and of the later ones `(s, p')`; views."""
        neurons, rank = self.coordinates.neurons, self.coordinates.rank
        return coordinates[:, : neurons * rank].unflatten(1, (neurons, rank)), coordinates[:, neurons * rank :]
