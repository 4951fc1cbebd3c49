"""A small convolutional network that trains in seconds and keeps enough of an image to be attacked in minutes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal

from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.layers import activation_layer, norm_layer
from lit_recon.models.trunk import Trunk


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
