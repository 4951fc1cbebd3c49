"""Victim models of informed adversaries: small enough to train thousands, on pixels without normalization.

Source: Balle, Cherubin and Hayes 2022, Reconstructing Training Data with Informed Adversaries, table V.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.layers import Activation, activation_layer, dense_layers

#: Standard deviation of a standard normal variable truncated at 2.
_TRUNCATED_STD = 0.87962566103423978


class ReleasedNetwork(nn.Module, ABC):
    """A classifier of images `(n, c, h, w)` in [0, 1], whose weights are a function of a generator.

    Attributes:
        arguments: of the constructor, JSON-able; with the class they identify the architecture.
        layers: from images to logits.
    """

    arguments: dict[str, object]
    layers: nn.Sequential

    @abstractmethod
    def initialize(self, generator: torch.Generator) -> None:
        """Draw new weights."""

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, k)`."""
        logits: Tensor = self.layers(images)
        return logits

    @property
    def architecture(self) -> dict[str, object]:
        """Class and arguments; of classes of others also where they are, and a hash of their source and layers.

        Two of them may have the same name, and one may change.
        """
        own = type(self)
        if own.__module__.partition(".")[0] == __package__.partition(".")[0]:
            return {"class": own.__name__, **self.arguments}
        try:
            source = inspect.getsource(own)
        except (OSError, TypeError):  # as in a notebook or a console
            source = ""
        code = hashlib.sha256(f"{source}\n{self!r}".encode()).hexdigest()[:16]
        return {"class": f"{own.__module__}.{own.__qualname__}", "code": code, **self.arguments}


class ReleasedMLP(ReleasedNetwork):
    """Linear layers with activations between them; initialized by `initialize_lecun`, as in the paper's code.

    Args:
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
        activation: Activation = "elu",
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
        sizes = (prod(image_shape), *hidden)
        layers: list[nn.Module] = [nn.Flatten(), *dense_layers(sizes, activation)]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], n_classes))

    def initialize(self, generator: torch.Generator) -> None:
        initialize_lecun(self, generator)

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
        activation: Activation = "elu",
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


@torch.no_grad()
def initialize_lecun(network: nn.Module, generator: torch.Generator) -> None:
    """Draw weights of variance 1 / inputs from normal distributions truncated at two deviations; biases are 0."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            scale = module.weight[0].numel() ** -0.5 / _TRUNCATED_STD
            module.weight.copy_(_truncated_normal(module.weight.shape, generator).mul_(scale))
            if module.bias is not None:
                module.bias.zero_()


def _truncated_normal(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values within two deviations, float64.

    Those of `torch.nn.init.trunc_normal_` in PyTorch 2.13; earlier versions draw others from the same seed.
    """
    found = torch.empty(shape, dtype=torch.float64).normal_(generator=generator)
    while (beyond := found.abs() > 2).any():
        found = torch.where(beyond, torch.empty_like(found).normal_(generator=generator), found)
    return found
