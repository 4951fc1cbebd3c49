"""A small convolutional network that trains in seconds and keeps enough of an image to be attacked in minutes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, prod
from typing import Literal

from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.classifiers.backbone import Trunk
from lit_recon.models.layers import activation_layer, norm_layer


class ConvNet(Trunk):
    """3x3 convolutions, each but the first followed by 2x2 average pooling; the last map is flattened, not pooled.

    Args:
        image_shape: `(c, h, w)`; every side at least `2 ** (len(widths) - 1)`, so 4 and up by default.
        widths: channels of each convolution.
        norm: BatchNorm, GroupNorm or none.
        activation: after each norm.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        widths: Sequence[int] = (32, 64, 128),
        norm: Literal["batch", "group", "none"] = "batch",
        activation: Literal["relu", "elu", "gelu", "tanh", "sigmoid", "softplus"] = "relu",
    ) -> None:
        super().__init__(image_shape, {"widths": list(widths), "norm": norm, "activation": activation})
        if not widths or min(widths) < 1:
            raise ConfigError(f"widths must be one or more positive channel numbers; got {list(widths)}")
        halvings = 2 ** (len(widths) - 1)
        if min(image_shape[1:]) < halvings:
            raise ConfigError(
                f"{len(widths)} convolutions halve the image {len(widths) - 1} times and need sides of at least "
                f"{halvings} pixels; got {image_shape[1]}x{image_shape[2]}: give fewer widths"
            )
        layers: list[nn.Module] = []
        channels = image_shape[0]
        for depth, width in enumerate(widths):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1, bias=norm == "none"),
                norm_layer(norm, width),
                activation_layer(activation),
            ]
            if depth > 0:
                # ceil_mode: an odd last row or column of pixels reaches the features too
                layers.append(nn.AvgPool2d(2, ceil_mode=True))
            channels = width
        self.layers = nn.Sequential(*layers)
        self.out_features = channels * ceil(image_shape[1] / halvings) * ceil(image_shape[2] / halvings)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layers(images)
        return maps.flatten(1)


#: The paper's; attacks on untrained LeNets depend on it.
INITIAL_RANGE = 0.5


class LeNet(Trunk):
    """Three 5x5 convolutions of equal width, the first two of stride 2; the last map is flattened.

    Args:
        image_shape: `(c, h, w)`.
        width: channels of each convolution; 12 in the paper, hence 768 features of a 32x32 image.
        activation: sigmoid in the paper, whose attack needs a network with second derivatives.
        initial_range: weights and biases start uniform in plus or minus this. Wide networks whose activations are not
            bounded diverge at the paper's 0.5.

    Source: Zhu et al. 2019, network and initialization of the published code.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        width: int = 12,
        activation: Literal["relu", "elu", "gelu", "tanh", "sigmoid", "softplus"] = "sigmoid",
        initial_range: float = INITIAL_RANGE,
    ) -> None:
        super().__init__(image_shape, {"width": width, "activation": activation, "initial_range": initial_range})
        if width < 1:
            raise ConfigError(f"width must be at least 1 channel; got {width}")
        if not 0 < initial_range < math.inf:
            raise ConfigError(f"initial_range must be above 0 and finite; got {initial_range}")
        layers: list[nn.Module] = []
        channels = image_shape[0]
        for stride in (2, 2, 1):
            layers += [nn.Conv2d(channels, width, 5, stride=stride, padding=2), activation_layer(activation)]
            channels = width
        self.layers = nn.Sequential(*layers)
        self.out_features = width * math.ceil(image_shape[1] / 4) * math.ceil(image_shape[2] / 4)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -initial_range, initial_range)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layers(images)
        return maps.flatten(1)


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
