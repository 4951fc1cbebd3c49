"""Curvature of the fixed set's loss, in the few directions that its images span best.

The first layer of an MLP sees images through `a = W x`, with a 1 for the bias. Its second derivatives are products of
what an image does to the rest of the network and of the image twice: projected to the `r` leading directions of all
images, `p` weights become `q = h r + p'` coordinates, those of the `h` neurons along the directions and the later
layers' own `p'`, and the Hessian a `(q, q)` matrix that thousands of models share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, vmap
from torch.nn import functional as F

from lit_recon.errors import ConfigError
from lit_recon.informed.shadow.products import times_transposed
from lit_recon.informed.shadow.training import KnownTraining, unflatten
from lit_recon.models.released import ReleasedMLP

#: Most coordinates of a Hessian: 256 MiB in float32, beyond which training exactly is no slower.
_MOST_COORDINATES = 8_192
#: Images at a time, so that memory does not grow with their number.
_IMAGES = 2_048


@dataclass(frozen=True, eq=False)
class Coordinates:
    """An MLP's weights along the leading directions of the images that it was trained on.

    Attributes:
        network: the MLP.
        basis: orthonormal directions of images with a 1 appended, `(d + 1, r)`.
    """

    network: ReleasedMLP
    basis: Tensor

    @classmethod
    def of(cls, known: KnownTraining, rank: int) -> Coordinates:
        """Along the `rank` directions with most of the fixed images in them, or all where there are no more.

        Raises:
            ConfigError: the network is no MLP, or the coordinates are too many.
        """
        n_coordinates(known.network, known.images[0].numel(), rank)
        network = _mlp(known.network)
        images = with_one(known.images).double()
        directions = torch.linalg.eigh(images.T @ images).eigenvectors.flip(1)
        return cls(network, directions[:, :rank].to(known.images.dtype).contiguous())

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
        """What follows the first layer."""
        return nn.Sequential(*list(self.network.layers)[2:])

    @property
    def n(self) -> int:
        """Number `q` of coordinates."""
        return self.neurons * self.rank + sum(part.numel() for part in self.head.parameters())

    def first_layer(self, weights: Tensor) -> Tensor:
        """Weights and biases of the first layer, `(..., h, d + 1)` of `(..., p)`."""
        parts = unflatten(self.network, weights)
        matrix, bias = list(parts.values())[:2]
        return torch.cat([matrix, bias[..., None]], dim=-1)

    def later(self, weights: Tensor) -> Tensor:
        """All other weights, `(..., p')` of `(..., p)`."""
        return weights[..., self.neurons * len(self.basis) :]

    def flat(self, first: Tensor, later: Tensor) -> Tensor:
        """The inverse of `first_layer` and `later`: `(s, p)` of `(s, h, d + 1)` and `(s, p')`."""
        return torch.cat([first[..., :-1].flatten(1), first[..., -1], later], dim=1)

    def flow(self, later: Tensor, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of every image's loss to its first layer's outputs and to the later layers.

        Args:
            later: weights `(s, p')` of every image's own model, or `(p',)` of one.
            outputs: of the first layer, `(s, h)`.
            labels: int64 `(s,)`.

        Returns:
            `(s, h)` and `(s, p')`.
        """
        shared = None if later.dim() == 1 else 0
        found: tuple[Tensor, Tensor] = vmap(self._gradient, in_dims=(0, shared, 0))(outputs, later, labels)
        return found

    def hessian(self, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Second derivatives of the loss summed over images, `(q, q)`.

        Args:
            weights: `(p,)` at which they are taken.
            images: `(n, d)`.
            labels: int64 `(n,)`.
        """
        found = weights.new_zeros(self.n, self.n)
        for some, theirs in zip(images.split(_IMAGES), labels.split(_IMAGES), strict=True):
            found += self._hessian(weights, some, theirs)
        return found

    def _hessian(self, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        inputs, later = with_one(images), self.later(weights)
        outputs, reduced = times_transposed(inputs, self.first_layer(weights)), times_transposed(inputs, self.basis.T)
        second = jacfwd(self._gradient, argnums=0)
        among, across = vmap(second, in_dims=(0, None, 0))(outputs, later, labels)  # (n, h, h) and (n, p', h)
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
        total = partial(self._summed, outputs=outputs, labels=labels)
        found[split:, split:] = jacfwd(grad(total))(later)
        return found

    def _loss(self, outputs: Tensor, later: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(self.head, unflatten(self.head, later), outputs[None])
        return F.cross_entropy(logits, label[None])

    def _gradient(self, outputs: Tensor, later: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = grad(self._loss, argnums=(0, 1))(outputs, later, label)
        return found

    def _summed(self, later: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(self.head, unflatten(self.head, later), outputs)
        return F.cross_entropy(logits, labels, reduction="sum")


def n_coordinates(network: nn.Module, inputs: int, rank: int) -> int:
    """Number `q` of coordinates of a network that sees images of so many pixels.

    Raises:
        ConfigError: the network is no MLP, or the coordinates are too many.
    """
    first, total = _mlp(network).linear_layers[0], sum(parameter.numel() for parameter in network.parameters())
    n = first.out_features * min(rank, inputs + 1) + total - first.out_features * (inputs + 1)
    if n > _MOST_COORDINATES:
        raise ConfigError(
            f"linear response of rank {rank} has {n} coordinates for this network; at most {_MOST_COORDINATES} are "
            "worth their products: lower linear.rank, or set shadows to exact"
        )
    return n


def _mlp(network: nn.Module) -> ReleasedMLP:
    if not isinstance(network, ReleasedMLP):
        raise ConfigError(f"linear response needs a ReleasedMLP; got {type(network).__name__}: set shadows to exact")
    return network


def with_one(images: Tensor) -> Tensor:
    """Images flattened, with a 1 for the bias, `(n, d + 1)`.

    >>> with_one(torch.zeros(1, 1, 1, 2)).tolist()
    [[0.0, 0.0, 1.0]]
    """
    return F.pad(images.flatten(1), (0, 1), value=1.0)
