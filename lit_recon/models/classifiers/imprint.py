"""Imprint attack of a malicious server: the block put before the network, its functional and its bins."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, MissingDataError, ShapeError, UnsupportedModelError
from lit_recon.models.classifiers.backbone import Argument, Backbone, Trunk, find_trunk, trunk_path

Activation = Literal["relu", "hardtanh"]
Connection = Literal["replace", "add"]


class ImprintBlock(nn.Module):
    """Measures a linear functional h of every image and passes on the bins in which it lies.

    Neuron i of the first layer computes `gain s_i (h(x) - e_i)`. All neurons have the same outgoing weights, so that
    the loss has the same derivative with respect to every neuron that an image activates.

    Args:
        image_shape: `(c, h, w)` of normalized images.
        n_edges: `m`, at least 2; set by `place`. There are `m - 1` bins, and `m` (`relu`) or `m - 1` neurons.
        activation: with `relu` an image activates all neurons with an edge below h(x), and the gradients of neighboring
            neurons differ by the images in the bin between them. With `hardtanh`, s_i is one over the width of bin i,
            and an image activates the neuron of its own bin alone.
        connection: the input of the rest is a fixed pattern scaled by the block's output, in the image's
            place (`replace`) or added to it (`add`, which keeps most of the network's accuracy).
        gain: above 0; a small one makes the block's gradient large relative to that of the rest.

    The buffers are the ascending edges `(m,)` and the functional `(d,)`, the weights of h on the flattened image.

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
        # skip_init: does not change the global random state
        self.measure: nn.Linear = nn.utils.skip_init(nn.Linear, size, neurons)
        self.spread: nn.Linear = nn.utils.skip_init(nn.Linear, neurons, size)
        self.register_buffer("edges", torch.arange(n_edges, dtype=torch.float32))
        self.register_buffer("functional", torch.zeros(size))
        self.place(self.functional, self.edges, self.functional)

    @torch.no_grad()
    def place(self, functional: Tensor, edges: Tensor, pattern: Tensor) -> None:
        """Set functional `(d,)`, edges `(m,)` and the pattern `(d,)` which the mean of the neurons' outputs scales.

        A ShapeError says that the number of edges is another, or that they do not ascend.
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
        """Input `(n, c, h, w)` of the rest of the network, from normalized images of that shape."""
        seen: Tensor = self.spread(self.activate(self.measure(images.flatten(1)))).view_as(images)
        return seen if self.connection == "replace" else images + seen

    def activate(self, neurons: Tensor) -> Tensor:
        """Outputs `(n, k)` of the neurons, from their pre-activations."""
        return neurons.relu() if self.activation == "relu" else neurons.clamp(0, self.gain)


class ImprintedTrunk(Trunk):
    """A trunk after an imprint block; `lit_recon.models.Imprint` makes it from an honest one.

    Args:
        trunk: import path of the honest trunk's class.
        trunk_arguments: its constructor arguments, as JSON text.
        n_edges, activation, connection, gain: see `ImprintBlock`.
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
        origin: dict[str, Argument] = {"trunk": trunk, "trunk_arguments": trunk_arguments}
        block: dict[str, Any] = {"n_edges": n_edges, "activation": activation, "connection": connection, "gain": gain}
        super().__init__(image_shape, origin | block)
        self.imprint = ImprintBlock(self.image_shape, **block)
        with torch.random.fork_rng(devices=[]):  # initial weights, replaced later by those of the honest trunk
            rebuilt: Any = find_trunk(trunk)  # the arguments are those of its own constructor
            self.trunk: Trunk = rebuilt(**json.loads(trunk_arguments))
        self.out_features = self.trunk.out_features

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.trunk(self.imprint(images))
        return features


def find_imprint(model: nn.Module) -> tuple[str, ImprintBlock] | None:
    """Name and block of the model's imprint block; None if it has none."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, ImprintBlock))
    return next(found, None)


#: Of the published code: this times a mean over pixels has a standard deviation near 1 on photographs.
FUNCTIONAL_SCALE, LEAST_FREQUENCY = 4.0, 0.33


class Imprint:
    """A server that puts an imprint block before an honest network.

    Args:
        n_bins: `k`; an image is recovered if it is alone in its bin.
        functional: `mean` of all normalized pixels, or their `cosine` transform at `frequency`.
        frequency: half-waves of the cosine along the flattened image.
        bins: edges at quantiles of the standard normal (`gaussian`) or of the Laplace distribution of variance 1
            (`laplace`), which need no data, or of the functional on `public` images.
        one_shot: if given, a single bin around the median with mass `1 / one_shot`, for one image out of an aggregate
            of about that many, instead of `n_bins` between the extremes of the functional on [0, 1] pixels.
        activation: `relu`, or `hardtanh`, the sparse variant: every image enters one row of the gradient only.
        connection: see `ImprintBlock`.
        gain: see `ImprintBlock`.
        seed: of the block's output pattern.

    Source: [Fowl2022] and its published code.
    """

    def __init__(
        self,
        n_bins: int = 128,
        functional: Literal["mean", "cosine"] = "mean",
        frequency: int = 32,
        bins: Literal["gaussian", "laplace", "public"] = "gaussian",
        one_shot: int | None = None,
        activation: Activation = "relu",
        connection: Connection = "replace",
        gain: float = 1e-3,
        seed: int = 0,
    ) -> None:
        if n_bins < 1 or frequency < 1 or (one_shot is not None and one_shot < 2):
            raise ConfigError(
                f"Imprint needs n_bins and frequency of at least 1 and one_shot of at least 2; "
                f"got {n_bins}, {frequency}, {one_shot}"
            )
        if functional not in ("mean", "cosine") or bins not in ("gaussian", "laplace", "public"):
            raise ConfigError(
                f"Imprint needs functional 'mean' or 'cosine' and bins 'gaussian', 'laplace' or 'public'; "
                f"got {functional!r} and {bins!r}"
            )
        self.n_bins, self.functional, self.frequency, self.bins = n_bins, functional, frequency, bins
        self.one_shot, self.seed = one_shot, seed
        self._block = (activation, connection, gain)

    def modify(self, model: nn.Module, public: Tensor | None = None) -> Backbone:
        """A copy of a backbone with the block before its trunk; public images `(n, c, h, w)` in [0, 1] for their bins.

        Raises:
            UnsupportedModelError: another model than a backbone.
            MissingDataError: no public images, with `bins="public"`.
            ShapeError: public images of another shape.
        """
        if not isinstance(model, Backbone):
            raise UnsupportedModelError(
                f"Imprint puts its block before the trunk of a Backbone; {type(model).__name__} has none: describe the "
                "network by the settings `backbone`, or leave `server` out"
            )
        like = model.pixel_mean
        functional = self._weights(math.prod(model.image_shape)).to(like)
        edges = self._edges(model, functional, public)
        pattern = torch.randn(len(functional), generator=torch.Generator().manual_seed(self.seed)).to(like)
        honest = model.trunk
        origin = (honest.image_shape, trunk_path(type(honest)), json.dumps(honest.arguments))
        trunk = ImprintedTrunk(*origin, len(edges), *self._block).to(like)
        trunk.trunk = copy.deepcopy(honest)
        trunk.imprint.place(functional, edges, pattern)
        modified = copy.deepcopy(model)
        modified.trunk = trunk.train(honest.training)
        return modified

    def _weights(self, size: int) -> Tensor:
        if self.functional == "mean":
            return torch.full((size,), FUNCTIONAL_SCALE * LEAST_FREQUENCY / size)
        phase = math.pi / size * (torch.arange(size, dtype=torch.float64) + 0.5) * self.frequency
        return (FUNCTIONAL_SCALE * self.frequency / size * phase.cos()).float()

    def _edges(self, model: Backbone, functional: Tensor, public: Tensor | None) -> Tensor:
        if self.one_shot is None:
            quantiles = torch.arange(1, self.n_bins, dtype=torch.float64) / self.n_bins
        else:
            quantiles = 0.5 + torch.tensor([-0.5, 0.5], dtype=torch.float64) / self.one_shot
        inner = self._at(quantiles, model, functional, public).to(functional)
        if self.one_shot is not None:
            return inner
        black, white = ((level - model.pixel_mean) / model.pixel_std for level in (0.0, 1.0))
        per_pixel = functional.view(model.image_shape)
        extremes = torch.stack([per_pixel * black, per_pixel * white]).double()
        low, high = extremes.amin(dim=0).sum(), extremes.amax(dim=0).sum()
        margin = 1e-3 * (high - low)
        low, high = (low - margin).to(functional), (high + margin).to(functional)
        # quantiles of an unbounded distribution may exceed the range of the functional
        inside = inner[(inner > low) & (inner < high)]
        edges: Tensor = torch.cat([low.view(1), inside, high.view(1)]).unique()
        return edges

    def _at(self, quantiles: Tensor, model: Backbone, functional: Tensor, public: Tensor | None) -> Tensor:
        if self.bins == "gaussian":
            standard: Tensor = torch.erfinv(2 * quantiles - 1)
            return standard * math.sqrt(2)
        if self.bins == "laplace":
            centered = quantiles - 0.5
            return -centered.sign() * torch.log1p(-2 * centered.abs()).div(math.sqrt(2))
        if public is None:
            raise MissingDataError("Imprint with bins='public' needs public images: give `public`")
        if public.dim() != 4 or tuple(public.shape[1:]) != model.image_shape or len(public) == 0:
            raise ShapeError(f"public images must be (n, {model.image_shape}); got {tuple(public.shape)}")
        normalized = (public.to(functional) - model.pixel_mean) / model.pixel_std
        measured: Tensor = (normalized.flatten(1) @ functional).double()
        return measured.quantile(quantiles.to(measured.device))
