"""Trunks: MLP, LeNet, ConvNet, ResNet-18 and wide residual networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf, prod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.classifiers.backbone import Argument, Trunk
from lit_recon.models.layers import Activation, Norm, activation_layer, dense_layers, initialize_he, norm_layer

#: Norms and activations of residual networks.
ResidualNorm = Literal["batch", "group"]
ResidualActivation = Literal["relu", "elu", "gelu"]


class ConvNet(Trunk):
    """3x3 convolutions with 2x2 pooling after all but the first; the last map is flattened.

    Args:
        image_shape: `(c, h, w)`, with sides of at least `2 ** (len(widths) - 1)`; twice that if `pool_first`.
        widths: channels of each convolution.
        norm: BatchNorm, GroupNorm or none.
        activation: after each norm and each hidden layer.
        pooling: of averages or of the largest values.
        pool_first: pooling follows the first convolution, too.
        hidden: outputs of linear layers behind the last map.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        widths: Sequence[int] = (32, 64, 128),
        norm: Norm = "batch",
        activation: Activation = "relu",
        pooling: Literal["average", "max"] = "average",
        pool_first: bool = False,
        hidden: Sequence[int] = (),
    ) -> None:
        own: dict[str, Argument] = {"widths": list(widths), "norm": norm, "activation": activation}
        super().__init__(image_shape, {**own, "pooling": pooling, "pool_first": pool_first, "hidden": list(hidden)})
        if pooling not in ("average", "max"):
            raise ConfigError(f"pooling must be 'average' or 'max'; got {pooling!r}")
        if any(width < 1 for width in hidden):
            raise ConfigError(f"hidden must be positive numbers of outputs; got {list(hidden)}")
        if not widths or min(widths) < 1:
            raise ConfigError(f"widths must be one or more positive channel numbers; got {list(widths)}")
        times = len(widths) - 1 + pool_first
        halvings = 2**times
        if min(image_shape[1:]) < halvings:
            raise ConfigError(
                f"{len(widths)} convolutions halve the image {times} times and need sides of at least "
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
            if depth > 0 or pool_first:
                pool = nn.MaxPool2d if pooling == "max" else nn.AvgPool2d
                layers.append(pool(2, ceil_mode=True))  # includes an odd last row or column
            channels = width
        self.layers = nn.Sequential(*layers)
        flat = channels * ceil(image_shape[1] / halvings) * ceil(image_shape[2] / halvings)
        self.hidden = nn.Sequential(*dense_layers([flat, *hidden], activation))
        self.out_features = hidden[-1] if hidden else flat

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.hidden(torch.flatten(self.layers(images), 1))
        return features


class LeNet(Trunk):
    """Three 5x5 convolutions of equal width, the first two of stride 2; the last map is flattened.

    Args:
        width: channels of each convolution.
        activation: after each convolution.
        initial_range: initial weights and biases are uniform in plus or minus this. Wide networks with unbounded
            activations diverge at the default, but attacks on untrained LeNets depend on it.

    Source: Zhu et al. 2019, network and initialization of the published code.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        width: int = 12,
        activation: Activation = "sigmoid",
        initial_range: float = 0.5,
    ) -> None:
        super().__init__(image_shape, {"width": width, "activation": activation, "initial_range": initial_range})
        if width < 1:
            raise ConfigError(f"width must be at least 1 channel; got {width}")
        if not 0 < initial_range < inf:
            raise ConfigError(f"initial_range must be above 0 and finite; got {initial_range}")
        layers: list[nn.Module] = []
        channels = image_shape[0]
        for stride in (2, 2, 1):
            layers += [nn.Conv2d(channels, width, 5, stride=stride, padding=2), activation_layer(activation)]
            channels = width
        self.layers = nn.Sequential(*layers)
        self.out_features = width * ceil(image_shape[1] / 4) * ceil(image_shape[2] / 4)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -initial_range, initial_range)

    def forward(self, images: Tensor) -> Tensor:
        return torch.flatten(self.layers(images), 1)


#: Layers of an `MLP` with biases.
Biases = Literal["all", "first", "none"]


class MLP(Trunk):
    """Linear layers on flattened pixels, each followed by an activation.

    With ReLU, biases in the first layer at most, and a backbone without `head_bias` the network is homogeneous: weights
    times c give logits times a power of c.

    Args:
        hidden: neurons of each layer; the last is the number of features.
        activation: after each layer.
        biases: layers with biases: all, the first, or none.
        initial_std: standard deviation of the first layer's initial weights and biases; default: those of PyTorch.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        hidden: Sequence[int] = (256,),
        activation: Activation = "relu",
        biases: Biases = "all",
        initial_std: float | None = None,
    ) -> None:
        arguments: dict[str, Argument] = {"hidden": list(hidden), "activation": activation}
        # arguments that older checkpoints do not name
        arguments |= {} if biases == "all" else {"biases": biases}
        arguments |= {} if initial_std is None else {"initial_std": initial_std}
        super().__init__(image_shape, arguments)
        if not hidden or min(hidden) < 1:
            raise ConfigError(f"hidden must be one or more positive layer sizes; got {list(hidden)}")
        if biases not in get_args(Biases) or not (initial_std is None or 0 < initial_std < inf):
            raise ConfigError(
                f"biases must be one of {', '.join(get_args(Biases))} and initial_std above 0 and finite; got "
                f"{biases!r} and {initial_std}"
            )
        layers = dense_layers((prod(image_shape), *hidden), activation)
        for depth, layer in enumerate(layer for layer in layers if isinstance(layer, nn.Linear)):
            if biases == "none" or (biases == "first" and depth):
                layer.register_parameter("bias", None)
            if initial_std is not None and depth == 0:
                for parameter in layer.parameters():
                    nn.init.normal_(parameter, 0.0, initial_std)
        self.layers = nn.Sequential(*layers)
        self.out_features = hidden[-1]

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images.flatten(1))
        return features


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


def _stages(
    channels: int, widths: Sequence[int], n_blocks: int, block: Callable[[int, int, int], nn.Module]
) -> list[nn.Module]:
    """`n_blocks` blocks of each width; the first of every later width halves the resolution."""
    blocks = []
    for width in widths:
        for number in range(n_blocks):
            blocks.append(block(channels, width, 2 if number == 0 and width != widths[0] else 1))
            channels = width
    return blocks


class ResNet18(Trunk):
    """ResNet-18 for small images: a 3x3 stem of stride 1, no max-pooling, average-pooled features of 8 * `width`.

    Args:
        norm: BatchNorm, or GroupNorm, which has no state and does not mix the images of a batch.
        activation: ReLU in the paper; ELU and GELU are smooth.
        width: channels of the first stage, 64 in the paper; later stages have 2, 4 and 8 times as many.

    Source: He et al. 2016; stem as in their CIFAR networks.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        norm: ResidualNorm = "batch",
        activation: ResidualActivation = "relu",
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
        widths = [width * 2**stage for stage in range(4)]
        self.blocks = nn.Sequential(
            *_stages(width, widths, 2, partial(ResidualBlock, norm=norm, activation=activation))
        )
        initialize_he(self)

    def forward(self, images: Tensor) -> Tensor:
        return torch.mean(self.blocks(self.stem(images)), dim=(2, 3))


class WideBlock(nn.Module):
    """Normalization and activation before each of two 3x3 convolutions, beside an identity or a 1x1 convolution."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, norm: str, activation: str, dropout: float
    ) -> None:
        super().__init__()
        self.before = nn.Sequential(norm_layer(norm, in_channels), activation_layer(activation))
        self.convolutions = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
            norm_layer(norm, out_channels),
            activation_layer(activation),
            nn.Dropout(dropout),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        )
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        activated = self.before(inputs)
        beside = inputs if self.shortcut is None else self.shortcut(activated)
        out: Tensor = self.convolutions(activated) + beside
        return out


class WideResNet(Trunk):
    """WRN-`depth`-`widening` of three stages, average-pooled features of 64 * `widening`.

    Args:
        depth: number of convolutions without shortcuts, 6 n + 4.
        widening: channels are 16, 32 and 64 times this.
        norm: BatchNorm, or GroupNorm.
        activation: ReLU in the paper.
        dropout: probability, between the convolutions of a block.

    Source: [Zagoruyko2016]. Balle et al. 2022 measure KL on CIFAR-10 by one of 94.7 % accuracy, of unknown size.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        depth: int = 28,
        widening: int = 10,
        norm: ResidualNorm = "batch",
        activation: ResidualActivation = "relu",
        dropout: float = 0.0,
    ) -> None:
        arguments = {"depth": depth, "widening": widening, "norm": norm, "activation": activation, "dropout": dropout}
        super().__init__(image_shape, arguments)
        if depth < 10 or (depth - 4) % 6 or widening < 1 or not 0 <= dropout < 1:
            raise ConfigError(
                "depth must be 6 n + 4 (10, 16, 22, ...), widening at least 1 and dropout in [0, 1); got "
                f"{depth}, {widening} and {dropout}"
            )
        self.out_features = 64 * widening
        self.stem = nn.Conv2d(image_shape[0], 16, 3, padding=1, bias=False)
        widths = [16 * widening * 2**stage for stage in range(3)]
        block = partial(WideBlock, norm=norm, activation=activation, dropout=dropout)
        blocks = _stages(16, widths, (depth - 4) // 6, block)
        self.blocks = nn.Sequential(*blocks, norm_layer(norm, widths[-1]), activation_layer(activation))
        initialize_he(self)

    def forward(self, images: Tensor) -> Tensor:
        return torch.mean(self.blocks(self.stem(images)), dim=(2, 3))
