"""Networks on mean-subtracted pixels whose training sets are reconstructed from their weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.classifiers.networks import ResNet18
from lit_recon.models.layers import Activation, activation_layer, checked_shape


class CenteredMLP(nn.Module):
    """Linear layers on images in [0, 1] minus a public mean image, with biases in the first layer only.

    With ReLU it is homogeneous: weights times c give outputs times a power of c. Without hidden layers it is affine.

    Args:
        image_shape: `(c, h, w)`.
        n_outputs: logits; 1 for two classes or regression.
        hidden: neurons of each hidden layer.
        activation: after each hidden layer.
        initial_std: standard deviation of the first layer's initial weights and biases; None: those of PyTorch. All
            other layers start as PyTorch has it.
        mean: image `(c, h, w)` that is subtracted; default: zero.

    Source: Haim et al. 2022, section 5 and appendix: D-1000-1000-1, standard deviation 1e-4.
    """

    mean: Tensor

    def __init__(
        self,
        image_shape: Sequence[int],
        n_outputs: int = 1,
        hidden: Sequence[int] = (1000, 1000),
        activation: Activation = "relu",
        initial_std: float | None = 1e-4,
        mean: Tensor | None = None,
    ) -> None:
        super().__init__()
        if n_outputs < 1 or min(hidden, default=1) < 1 or not (initial_std is None or initial_std > 0):
            raise ConfigError(
                "n_outputs and all of hidden must be at least 1 and initial_std above 0; got "
                f"{n_outputs}, {list(hidden)} and {initial_std}"
            )
        self.image_shape, self.n_outputs, self.initial_std = checked_shape(image_shape), n_outputs, initial_std
        sizes = (prod(image_shape), *hidden, n_outputs)
        layers: list[nn.Module] = []
        for depth in range(len(sizes) - 1):
            layers += [activation_layer(activation)] if depth else []
            layers.append(nn.Linear(sizes[depth], sizes[depth + 1], bias=depth == 0))
        self.layers = nn.Sequential(nn.Flatten(), *layers)
        self.register_buffer("mean", torch.zeros(self.image_shape) if mean is None else mean.clone())

    def forward(self, images: Tensor) -> Tensor:
        """Outputs `(n, n_outputs)` of images `(n, c, h, w)` in [0, 1]."""
        outputs: Tensor = self.layers(images - self.mean)
        return outputs

    @property
    def first_layer(self) -> nn.Linear:
        """The layer on the pixels."""
        layer = self.layers[1]
        assert isinstance(layer, nn.Linear)
        return layer

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw new weights."""
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                own = layer is self.first_layer and self.initial_std is not None
                for parameter in layer.parameters():
                    if own:
                        parameter.normal_(0.0, self.initial_std or 0.0, generator=generator)
                    else:
                        bound = layer.in_features**-0.5
                        parameter.uniform_(-bound, bound, generator=generator)


class CenteredResNet18(nn.Module):
    """ResNet-18 with GroupNorm, on images in [0, 1] minus a public mean image, with a head without bias.

    With ReLU it is homogeneous of degree 2, up to the constant under the root in GroupNorm: every normalized sum is
    multiplied by the factor on GroupNorm's own weights, and the head by one more.

    Args:
        image_shape: `(c, h, w)`.
        n_outputs: logits; 1 for two classes or regression.
        width: channels of the first stage, 64 in the paper.

    Source: He et al. 2016, as in `ResNet18`.
    """

    mean: Tensor

    def __init__(self, image_shape: tuple[int, int, int], n_outputs: int = 1, width: int = 16) -> None:
        super().__init__()
        if n_outputs < 1:
            raise ConfigError(f"n_outputs must be at least 1; got {n_outputs}")
        self.trunk = ResNet18(image_shape, norm="group", width=width)
        self.head = nn.Linear(self.trunk.out_features, n_outputs, bias=False)
        self.register_buffer("mean", torch.zeros(image_shape))

    def forward(self, images: Tensor) -> Tensor:
        """Outputs `(n, n_outputs)` of images `(n, c, h, w)` in [0, 1]."""
        outputs: Tensor = self.head(self.trunk(images - self.mean))
        return outputs
