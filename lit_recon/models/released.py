"""Victim models of informed adversaries: small enough to train thousands, on pixels without normalization.

Source: Balle, Cherubin and Hayes 2022, Reconstructing Training Data with Informed Adversaries, table V.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.layers import activation_layer

#: Standard deviation of a standard normal variable truncated at 2.
_TRUNCATED_STD = 0.87962566103423978


class ReleasedNetwork(nn.Module, ABC):
    """A classifier of images `(n, c, h, w)` in [0, 1], whose weights are a function of a generator.

    Attributes:
        arguments: of the constructor, JSON-able; with the class they identify the architecture.
    """

    arguments: dict[str, object]

    @abstractmethod
    def initialize(self, generator: torch.Generator) -> None:
        """Draw new weights."""

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, k)`."""

    @property
    def architecture(self) -> dict[str, object]:
        """Class and arguments."""
        return {"class": type(self).__name__, **self.arguments}


class ReleasedMLP(ReleasedNetwork):
    """Linear layers with activations between them.

    Weights are drawn from normal distributions of variance 1 / inputs, truncated at two standard deviations; biases
    are 0, as in the paper's code.

    Args:
        image_shape: `(c, h, w)`.
        n_classes: number of logits `k`.
        hidden: neurons of each hidden layer.
        activation: after each hidden layer.

    Source: table V, MNIST: 784-10-10 with ELU.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        n_classes: int = 10,
        hidden: Sequence[int] = (10,),
        activation: Literal["relu", "elu", "gelu", "tanh", "sigmoid", "softplus"] = "elu",
    ) -> None:
        super().__init__()
        if min(hidden, default=1) < 1 or n_classes < 2:
            raise ConfigError(
                f"hidden must be positive layer sizes and n_classes at least 2; got {list(hidden)} and {n_classes}"
            )
        self.arguments = {
            "image_shape": list(image_shape),
            "n_classes": n_classes,
            "hidden": list(hidden),
            "activation": activation,
        }
        self.activation = activation
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((prod(image_shape), *hidden)):
            layers += [nn.Linear(inputs, outputs), activation_layer(activation)]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else prod(image_shape), n_classes))

    def initialize(self, generator: torch.Generator) -> None:
        initialize_lecun(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits

    @property
    def linear_layers(self) -> list[nn.Linear]:
        """The linear layers in order."""
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]


class ReleasedCNN(ReleasedNetwork):
    """Two convolutions without padding, a hidden layer and a linear head; initialized as `ReleasedMLP`.

    Args:
        image_shape: `(c, h, w)`, with sides of at least 10 pixels.
        n_classes: number of logits `k`.
        activation: after each layer but the last.
        hidden: neurons of the hidden layer; 20 double the parameters.

    Source: table VI, CIFAR-10: 4x4 convolutions with 16 channels and stride 2, then 32 channels and stride 1; 55,208
    parameters.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        n_classes: int = 10,
        activation: Literal["relu", "elu", "gelu", "tanh", "sigmoid", "softplus"] = "elu",
        hidden: int = 10,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        if min(height, width) < 10:
            raise ConfigError(f"ReleasedCNN needs images of at least 10 x 10 pixels; got {height} x {width}")
        if hidden < 1 or n_classes < 2:
            raise ConfigError(f"hidden must be at least 1 and n_classes at least 2; got {hidden} and {n_classes}")
        self.arguments = {"image_shape": list(image_shape), "n_classes": n_classes, "activation": activation}
        if hidden != 10:  # older shadow-model stores do not state the default of 10
            self.arguments["hidden"] = hidden
        positions = (height // 2 - 4) * (width // 2 - 4)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 4, stride=2),
            activation_layer(activation),
            nn.Conv2d(16, 32, 4),
            activation_layer(activation),
            nn.Flatten(),
            nn.Linear(32 * positions, hidden),
            activation_layer(activation),
            nn.Linear(hidden, n_classes),
        )

    def initialize(self, generator: torch.Generator) -> None:
        initialize_lecun(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


@torch.no_grad()
def initialize_lecun(network: nn.Module, generator: torch.Generator) -> None:
    """Draw weights of variance 1 / inputs from normal distributions truncated at two deviations; biases are 0."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            scale = module.weight[0].numel() ** -0.5 / _TRUNCATED_STD
            drawn = torch.empty(module.weight.shape, dtype=torch.float64)
            nn.init.trunc_normal_(drawn, 0.0, 1.0, -2.0, 2.0, generator=generator)
            module.weight.copy_(drawn.mul_(scale))
            if module.bias is not None:
                module.bias.zero_()
