"""A fully connected network on the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.layers import activation_layer
from lit_recon.models.trunk import Trunk


class MLP(Trunk):
    """Flattened pixels through linear layers, each followed by an activation.

    Args:
        image_shape: `(c, h, w)`.
        hidden: neurons of each layer; the last is the number of features.
        activation: after each layer.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        hidden: Sequence[int] = (256,),
        activation: Literal["relu", "elu", "gelu", "tanh", "sigmoid", "softplus"] = "relu",
    ) -> None:
        super().__init__(image_shape, {"hidden": list(hidden), "activation": activation})
        if not hidden or min(hidden) < 1:
            raise ConfigError(f"hidden must be one or more positive layer sizes; got {list(hidden)}")
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((prod(image_shape), *hidden)):
            layers += [nn.Linear(inputs, outputs), activation_layer(activation)]
        self.layers = nn.Sequential(*layers)
        self.out_features = hidden[-1]

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images.flatten(1))
        return features
