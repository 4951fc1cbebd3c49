"""The block that a malicious server puts before a network so that images leave their imprint in its gradient."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.trunk import Trunk

Activation = Literal["relu", "hardtanh"]
Connection = Literal["replace", "add"]


class ImprintBlock(nn.Module):
    """Measures a linear functional h of every image, and tells the rest of the network in which bins it lies.

    Neuron i of the first layer computes `gain s_i (h(x) - e_i)`. All neurons have the same outgoing weights, so that
    the loss has the same derivative with respect to every neuron that an image activates:

    * `relu`: an image activates all neurons with an edge below h(x). The gradients of two neighbouring neurons differ
      by the images in the bin between their edges.
    * `hardtanh`: s_i is one over the width of bin i, and an image activates the neuron of its own bin alone.

    Args:
        image_shape: `(c, h, w)` of normalized images.
        n_edges: `m`; the edges are set by `place`. There are `m - 1` bins, and `m` (`relu`) or `m - 1` neurons.
        activation: see above.
        connection: the rest of the network sees a fixed pattern whose contrast is the block's output, in the image's
            place (`replace`) or on top of it (`add`, which leaves the network most of its accuracy).
        gain: small gains make the block's gradient large beside that of the rest, since the outgoing weights are
            proportional to `1 / gain`.

    Attributes:
        edges: `(m,)`, ascending.
        functional: `(d,)`, the weights of h on the flattened image.

    Raises:
        ConfigError: fewer than two edges, a gain that is not positive, or an unknown activation or connection.

    Source: [Fowl2022]; `hardtanh` is its sparse variant.
    """

    edges: Tensor
    functional: Tensor

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        n_edges: int,
        activation: Activation = "relu",
        connection: Connection = "replace",
        gain: float = 1e-3,
    ) -> None:
        super().__init__()
        if n_edges < 2 or gain <= 0 or activation not in ("relu", "hardtanh") or connection not in ("replace", "add"):
            raise ConfigError(
                "an imprint block needs n_edges >= 2, gain > 0, activation 'relu' or 'hardtanh', connection 'replace' "
                f"or 'add'; got {n_edges}, {gain:g}, {activation!r}, {connection!r}"
            )
        self.activation: Activation = activation
        self.connection: Connection = connection
        self.gain = gain
        size, neurons = prod(image_shape), n_edges if activation == "relu" else n_edges - 1
        # skip_init: the global random state is the same with and without the block
        self.measure: nn.Linear = nn.utils.skip_init(nn.Linear, size, neurons)
        self.spread: nn.Linear = nn.utils.skip_init(nn.Linear, neurons, size)
        self.register_buffer("edges", torch.arange(n_edges, dtype=torch.float32))
        self.register_buffer("functional", torch.zeros(size))
        self.place(self.functional, self.edges, self.functional)

    @torch.no_grad()
    def place(self, functional: Tensor, edges: Tensor, pattern: Tensor) -> None:
        """Set both layers.

        Args:
            functional: `(d,)`.
            edges: `(m,)`, ascending.
            pattern: `(d,)`: what the rest of the network sees, times the mean of the neurons' outputs.

        Raises:
            ShapeError: another number of edges, or edges that do not ascend.
        """
        if edges.shape != self.edges.shape or (edges.diff() <= 0).any():
            raise ShapeError(f"the block needs {len(self.edges)} ascending edges; got {edges.tolist()}")
        self.functional.copy_(functional)
        self.edges.copy_(edges)
        neurons = len(self.measure.bias)
        scale = self.gain / edges.diff() if self.activation == "hardtanh" else self.gain * torch.ones_like(edges)
        self.measure.weight.copy_(torch.outer(scale, functional))
        self.measure.bias.copy_(-scale * edges[:neurons])
        self.spread.weight.copy_((pattern / (self.gain * neurons))[:, None].expand(-1, neurons))
        self.spread.bias.zero_()

    def forward(self, images: Tensor) -> Tensor:
        """What the rest of the network sees, `(n, c, h, w)`, of normalized images `(n, c, h, w)`."""
        seen: Tensor = self.spread(self.activate(self.measure(images.flatten(1)))).view_as(images)
        return seen if self.connection == "replace" else images + seen

    def activate(self, neurons: Tensor) -> Tensor:
        """What neurons put out, `(n, k)`, of what they measured."""
        return neurons.relu() if self.activation == "relu" else neurons.clamp(0, self.gain)


class ImprintedTrunk(Trunk):
    """A trunk behind an imprint block; `lit_recon.models.Imprint` makes it from an honest one.

    Args:
        image_shape: `(c, h, w)`.
        trunk: class name of the honest trunk.
        trunk_arguments: the honest trunk's constructor arguments, as JSON text.
        n_edges, activation, connection, gain: of the block, see `ImprintBlock`.

    Raises:
        ConfigError: there is no trunk of that name.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        trunk: str,
        trunk_arguments: str,
        n_edges: int,
        activation: Activation = "relu",
        connection: Connection = "replace",
        gain: float = 1e-3,
    ) -> None:
        super().__init__(
            image_shape,
            {
                "trunk": trunk,
                "trunk_arguments": trunk_arguments,
                "n_edges": n_edges,
                "activation": activation,
                "connection": connection,
                "gain": gain,
            },
        )
        known = _trunks()
        if trunk not in known:
            raise ConfigError(f"there is no trunk {trunk!r} to put an imprint block before; known are {sorted(known)}")
        self.imprint = ImprintBlock(self.image_shape, n_edges, activation, connection, gain)
        with torch.random.fork_rng(devices=[]):  # initial weights, which those of the honest trunk replace
            self.trunk = known[trunk](**json.loads(trunk_arguments))
        self.out_features = self.trunk.out_features

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.trunk(self.imprint(images))
        return features


def find_imprint(model: nn.Module) -> tuple[str, ImprintBlock] | None:
    """Name and block of the model's imprint block; None if it has none."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ImprintBlock)]
    return found[0] if found else None


def _trunks() -> dict[str, type[Trunk]]:
    """Trunk classes by name; a class is an interface or a leaf, so that there are no further descendants."""
    return {found.__name__: found for found in Trunk.__subclasses__()}
