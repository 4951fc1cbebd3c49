"""Parts shared by networks: activations and norms by name, dense layers, initial weights of convolutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError

Activation = Literal["relu", "leaky_relu", "elu", "gelu", "tanh", "sigmoid", "softplus"]
Norm = Literal["batch", "group", "none"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
}

#: Group size at which Wu and He (2018, table 3) find GroupNorm as good as with 32 groups.
CHANNELS_PER_GROUP = 16


def checked_shape(image_shape: Sequence[int]) -> tuple[int, int, int]:
    """An image shape `(c, h, w)`; a ShapeError unless it is three positive numbers."""
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise ShapeError(f"image_shape must be (channels, height, width), all positive; got {tuple(image_shape)}")
    channels, height, width = image_shape
    return channels, height, width


def activation_layer(name: str) -> nn.Module:
    """The activation of that name, not in place, so that it can be differentiated twice; a ConfigError for none."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation must be one of {sorted(_ACTIVATIONS)}; got {name!r}")
    return _ACTIVATIONS[name]()


def dense_layers(sizes: Sequence[int], activation: str) -> list[nn.Module]:
    """Linear layers between consecutive sizes, each followed by an activation."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation_layer(activation)]
    return layers


def layers_with_weights(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by name whose `weight` is a parameter of theirs alone, so that its gradient is that of one layer.

    Parametrized weights, as by `weight_norm`, are no parameters; tied ones are parameters of several layers.
    """
    uses = Counter(id(value) for layer in model.modules() for value in layer.parameters(recurse=False))
    own = {name: dict(layer.named_parameters(recurse=False)) for name, layer in model.named_modules()}
    return {name: layer for name, layer in model.named_modules() if uses[id(own[name].get("weight"))] == 1}


def used_elsewhere(
    layers: Iterable[nn.Module], parameters: Mapping[str, Tensor], run: Callable[[dict[str, Tensor]], Tensor]
) -> set[str]:
    """The parameters that `run` uses in other ways than by calls of the layers, as in `linear(x, layer.weight)`.

    `run` gets the parameters by name, and runs a network of which these layers return tensors.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    found: list[Tensor] = []

    def cut(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        found.append(given[0])
        return output.detach()

    hooks = [layer.register_forward_hook(cut) for layer in layers]
    try:
        with torch.enable_grad():
            found.append(run(leaves))
    finally:
        for hook in hooks:
            hook.remove()
    # the graph ends at the layers' outputs: it reaches their parameters by other ways alone
    ends = [value for value in found if value.requires_grad]
    if not ends:
        return set()
    ones = [torch.ones_like(value) for value in ends]
    reached: Sequence[Tensor | None] = torch.autograd.grad(ends, list(leaves.values()), ones, allow_unused=True)
    return {name for name, other in zip(leaves, reached, strict=True) if other is not None}


def norm_layer(name: str, channels: int) -> nn.Module:
    """Norm of a feature map `(n, channels, h, w)`: BatchNorm, GroupNorm, or none; a ConfigError for another name.

    GroupNorm takes groups of 16 channels, or one group where 16 does not divide the channels, since small groups reduce
    a map of one pixel to little more than signs.
    """
    if name == "batch":
        return nn.BatchNorm2d(channels)
    if name == "group":
        return nn.GroupNorm(1 if channels % CHANNELS_PER_GROUP else channels // CHANNELS_PER_GROUP, channels)
    if name == "none":
        return nn.Identity()
    raise ConfigError(f"norm must be 'batch', 'group' or 'none'; got {name!r}")


def initialize_he(network: nn.Module) -> None:
    """Draw the weights of all convolutions from normal distributions of variance 2 / fan-out."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
