"""Layers by the names used in configurations, activation and norm, and initial weights of convolutions."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lit_recon.errors import ConfigError

Activation = Literal["relu", "elu", "gelu", "tanh", "sigmoid", "softplus"]
Norm = Literal["batch", "group", "none"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
}

#: Group size at which Wu and He (2018, table 3) find GroupNorm as good as with 32 groups.
CHANNELS_PER_GROUP = 16


def activation_layer(name: str) -> nn.Module:
    """The activation called `name`; never in place, so that it can be differentiated twice.

    Raises:
        ConfigError: no activation of that name.
    """
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation must be one of {sorted(_ACTIVATIONS)}; got {name!r}")
    return _ACTIVATIONS[name]()


def norm_layer(name: str, channels: int) -> nn.Module:
    """Norm of a feature map `(n, channels, h, w)`: BatchNorm, GroupNorm, or none.

    GroupNorm takes groups of 16 channels, or one group where 16 does not divide the channels: with smaller groups
    a map of one pixel would keep little more than signs.

    Raises:
        ConfigError: no norm of that name.
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
