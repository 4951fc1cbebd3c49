"""Shadow models without training, to first order in their distance from the reference.

A model trained on the fixed set and one image stays within a thousandth of the reference, which is trained on the
fixed set alone. To first order in the difference `delta`, the fixed set's gradient changes by Hessian times `delta`:

    v <- momentum v + (H(theta_t) delta + g(theta_t + delta)) / (n + 1),    delta <- delta - lr v

where the gradient `g` of the model's own image is exact. The path `theta_t` and its Hessians are the same for all
models, so that every Hessian is computed once. The component of an own image outside the leading directions of the
fixed set is changed by `g` alone: one number per neuron times that component.

The first layer of an MLP computes `a = W x`, with a 1 appended to `x` for the bias. Its second derivatives are products
of second derivatives with respect to `a` and of the image with itself. Projected to the `r` leading directions of the
images, `p` weights become `q = h r + p'` coordinates: `r` for each of the `h` neurons, and the `p'` weights of later
layers. The Hessian is then a `(q, q)` matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, vmap
from torch.nn import functional as F

from lit_recon.attacks.shadow.engine import full_batch_path
from lit_recon.attacks.shadow.engines.pixels import times_transposed
from lit_recon.attacks.shadow.steps import Descent
from lit_recon.attacks.shadow.training import KnownTraining, cross_entropy, full_precision, unflatten
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.released import ReleasedMLP

#: Most coordinates of a Hessian: 256 MiB in float32. Beyond this, exact training is as fast.
_MOST_COORDINATES = 8_192
#: Images at a time, so that memory does not grow with their number.
_IMAGES = 2_048


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Coordinates of an MLP's weights along the leading directions of its training images."""

    network: ReleasedMLP
    basis: Tensor  # orthonormal directions of images with a 1 appended, `(d + 1, r)`

    @classmethod
    def of(cls, known: KnownTraining, rank: int) -> Coordinates:
        """Along the `rank` leading directions of the fixed images, or all if there are fewer."""
        n_coordinates(known.network, known.images[0].numel(), rank)
        images = with_one(known.images).double()
        directions = torch.linalg.eigh(images.T @ images).eigenvectors.flip(1)
        return cls(_mlp(known.network), directions[:, :rank].to(known.images.dtype).contiguous())

    @property
    def rank(self) -> int:
        """Number `r` of directions."""
        return self.basis.shape[1]

    @property
    def neurons(self) -> int:
        """Outputs `h` of the first layer."""
        return self.network.linear_layers[0].out_features

    @property
    def head(self) -> nn.Sequential:
        """The layers after the first one."""
        return nn.Sequential(*list(self.network.layers)[2:])

    @property
    def n(self) -> int:
        """Number `q` of coordinates."""
        return self.neurons * self.rank + sum(part.numel() for part in self.head.parameters())

    def first_layer(self, weights: Tensor) -> Tensor:
        """Weights and biases of the first layer, `(..., h, d + 1)` of `(..., p)`."""
        matrix, bias, *_ = unflatten(self.network, weights).values()
        return torch.cat([matrix, bias[..., None]], dim=-1)

    def later(self, weights: Tensor) -> Tensor:
        """All other weights, `(..., p')` of `(..., p)`."""
        return weights[..., self.neurons * len(self.basis) :]

    def flat(self, first: Tensor, later: Tensor) -> Tensor:
        """The inverse of `first_layer` and `later`: `(s, p)` of `(s, h, d + 1)` and `(s, p')`."""
        return torch.cat([first[..., :-1].flatten(1), first[..., -1], later], dim=1)

    def flow(self, later: Tensor, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of each image's loss in the first layer's outputs `(s, h)`, later weights `(s, p')` or `(p',)`."""
        shared = None if later.dim() == 1 else 0
        found: tuple[Tensor, Tensor] = vmap(self._gradient, in_dims=(0, shared, 0))(outputs, later, labels)
        return found

    def hessian(self, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Second derivatives `(q, q)` at weights `(p,)` of the loss summed over images `(n, d)` with labels `(n,)`."""
        found = weights.new_zeros(self.n, self.n)
        for some, theirs in zip(images.split(_IMAGES), labels.split(_IMAGES), strict=True):
            found += self._hessian(weights, some, theirs)
        return found

    def _hessian(self, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        inputs, later = with_one(images), self.later(weights)
        outputs, reduced = times_transposed(inputs, self.first_layer(weights)), times_transposed(inputs, self.basis.T)
        second = vmap(jacfwd(self._gradient, argnums=0), in_dims=(0, None, 0))
        among, across = second(outputs, later, labels)  # (n, h, h) and (n, p', h)
        found = weights.new_empty(self.n, self.n)
        split = self.neurons * self.rank
        transposed, blocks = reduced.T.contiguous(), found[:split, :split].unflatten(0, (self.neurons, self.rank))
        for neuron in range(self.neurons):
            # Only neurons from this one on: the matrix is symmetric.
            scaled = (among[:, neuron, neuron:].T[:, None, :] * transposed).flatten(0, 1)
            upper = times_transposed(scaled, transposed)
            blocks[neuron, :, neuron * self.rank :] = upper.T
            found[neuron * self.rank : split, neuron * self.rank : (neuron + 1) * self.rank] = upper
        mixed = times_transposed(transposed, across.flatten(1).T.contiguous())  # (r, p' h)
        found[split:, :split] = mixed.view(self.rank, -1, self.neurons).permute(1, 2, 0).flatten(1)
        found[:split, split:] = found[split:, :split].T

        def total(later: Tensor) -> Tensor:
            return cross_entropy(self.head, later, outputs, labels, "sum")

        found[split:, split:] = jacfwd(grad(total))(later)
        return found

    def _gradient(self, outputs: Tensor, later: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        def loss(outputs: Tensor, later: Tensor) -> Tensor:
            return cross_entropy(self.head, later, outputs[None], label[None])

        found: tuple[Tensor, Tensor] = grad(loss, argnums=(0, 1))(outputs, later)
        return found


def n_coordinates(network: nn.Module, inputs: int, rank: int) -> int:
    """Number `q` of coordinates of an MLP on images of `inputs` pixels; ConfigError for others, and too many."""
    first, total = _mlp(network).linear_layers[0], sum(parameter.numel() for parameter in network.parameters())
    n = first.out_features * min(rank, inputs + 1) + total - first.out_features * (inputs + 1)
    if n > _MOST_COORDINATES:
        raise ConfigError(
            f"linear response of rank {rank} has {n} coordinates for this network; with more than {_MOST_COORDINATES} "
            "it is slower than exact training: lower linear.rank, or set shadows to exact"
        )
    return n


def _mlp(network: nn.Module) -> ReleasedMLP:
    if not isinstance(network, ReleasedMLP):
        raise ConfigError(f"linear response needs a ReleasedMLP; got {type(network).__name__}: set shadows to exact")
    return network


def with_one(images: Tensor) -> Tensor:
    """Images flattened, with a 1 appended for the bias, `(n, d + 1)`."""
    return F.pad(images.flatten(1), (0, 1), value=1.0)


@dataclass(frozen=True)
class LinearResponse:
    """Approximation of shadow models along the reference's path; ConfigError for a number out of its range.

    Args:
        rank: leading directions of the fixed images that the Hessian of an MLP is projected to, all if there are fewer;
            with `steps`, of the fixed set's curvature.
        hessian_images: fixed images on which the Hessian of a step is estimated. For networks other than MLPs without
            `steps`: the largest number of fixed images per step on which the change of the fixed set's gradient is
            estimated; twice as many take twice the time and halve the error.
        steps: for networks other than MLPs: number of steps of the training at which gradients of own images are
            computed, see `PathResponse`; 0: at every step, with the change of the fixed set's gradient.
        rest: with `steps`: of the `hessian_images`, on which what the Hessian has beyond its Gauss-Newton part is
            estimated, see `PathResponse`; it takes most of the time; 0: it is left out.
        sample: models that are also trained exactly, to measure the error.
        tolerance: largest median relative error of the sample's differences at which the approximation is used.
    """

    rank: int = 100
    hessian_images: int = 2_000
    sample: int = 32
    tolerance: float = 0.4
    steps: int = 0
    rest: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rest <= self.hessian_images or (self.rest and not self.steps):
            raise ConfigError(
                f"linear.rest must be from 0 to linear.hessian_images={self.hessian_images}, and needs linear.steps; "
                f"got {self.rest} with linear.steps={self.steps}"
            )
        if self.steps < 0 or self.steps == 1:
            raise ConfigError(f"linear.steps must be 0, or at least 2; got {self.steps}")
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
    """Differences `(s, p)` of shadow models from `train_reference`, to first order, group by group.

    All models advance together along the reference's path, by gradient descent on full batches from `initial` `(p,)`.
    The result of a group, images `(s, c, h, w)` and labels `(s,)`, depends on these only; one group should fit into the
    processor's cache. ConfigError, ShapeError: see `n_coordinates`; arguments do not fit, or training diverged.
    """
    for images, labels in groups:
        known.check(initial, images, labels)
    with full_precision(), torch.no_grad():
        coordinates = Coordinates.of(known, response.rank)
        models = [_Responses(known, coordinates, *group) for group in groups]
        for step, weights in enumerate(full_batch_path(known, initial)):
            hessian = _estimated(coordinates, known, weights, step, response.hessian_images)
            for group in models:
                group.step(weights, hessian)
    for group in models:
        with full_precision(), torch.no_grad():
            differences = group.differences()
        if not torch.isfinite(differences).all():
            raise ShapeError("linear response diverged to NaN or infinity: lower descent.lr, or set shadows to exact")
        yield differences


def bytes_per_model(known: KnownTraining, rank: int) -> int:
    """Memory of one model: its image twice, coordinates and momentum."""
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
    """The models of one group between steps, each with its own image `(s, c, h, w)` and label `(s,)`."""

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
        """One step of training, at these weights of the reference."""
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
        """Differences from the reference so far, `(s, p)`."""
        first, later = self._split(self._moved)
        remainder = self._inputs - times_transposed(self._along, self.coordinates.basis)
        whole = times_transposed(first.flatten(0, 1), self.coordinates.basis).view(*first.shape[:2], -1)
        return self.coordinates.flat(whole.addcmul_(self._beyond[:, :, None], remainder[:, None, :]), later)

    def _split(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first layer's coordinates `(s, h, r)` and of those of later layers `(s, p')`."""
        neurons, rank = self.coordinates.neurons, self.coordinates.rank
        return coordinates[:, : neurons * rank].unflatten(1, (neurons, rank)), coordinates[:, neurons * rank :]
