"""ResNet-18 with the stem that small images need."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.layers import activation_layer, initialize_he, norm_layer
from lit_recon.models.trunk import Trunk


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside an identity, or beside a strided 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str, activation: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, out_channels)
        self.activation = activation_layer(activation)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), norm_layer(norm, out_channels)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.activation(self.norm1(self.conv1(inputs)))
        out: Tensor = self.activation(self.norm2(self.conv2(inner)) + self.shortcut(inputs))
        return out


class ResNet18(Trunk):
    """ResNet-18 for small images: a 3x3 stem of stride 1, no max-pooling, average-pooled features of 8 * `width`.

    Args:
        image_shape: `(c, h, w)`.
        norm: BatchNorm, or GroupNorm, which has no state and does not mix the images of a batch.
        activation: ELU and GELU are smooth; ReLU is the paper's.
        width: channels of the first stage; later stages have 2, 4 and 8 times as many. 64 is the published network.

    Source: He et al. 2016; stem as in their CIFAR networks.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        norm: Literal["batch", "group"] = "batch",
        activation: Literal["relu", "elu", "gelu"] = "relu",
        width: int = 64,
    ) -> None:
        super().__init__(image_shape, {"norm": norm, "activation": activation, "width": width})
        if width < 1:
            raise ConfigError(f"width must be at least 1 channel; got {width}")
        self.out_features = 8 * width
        self.stem = nn.Sequential(
            nn.Conv2d(image_shape[0], width, 3, padding=1, bias=False),
            norm_layer(norm, width),
            activation_layer(activation),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(4):
            for block in range(2):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(ResidualBlock(channels, width * 2**stage, stride, norm, activation))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        initialize_he(self)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.blocks(self.stem(images))
        return maps.mean(dim=(2, 3))
