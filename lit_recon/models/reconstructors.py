"""Networks that turn the weights of a released model into an image of its training set."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.layers import Activation, dense_layers

#: Channels of the first feature map, and of the second.
_CHANNELS = 64, 32
#: Channels and strides of the discriminator's convolutions but for the last one.
_PATCH_LAYERS = ((64, 2), (128, 2), (256, 2), (512, 1))


class ReconstructorMLP(nn.Module):
    """An MLP from weights `(m, n_inputs)` to images `(m, c, h, w)` in (0, 1).

    Args:
        n_inputs: weights of a released model `p`.
        hidden: neurons of each hidden layer.
        activation: after each hidden layer; ReLU in the paper.

    Source: Balle, Cherubin and Hayes 2022, table V, MNIST; the sigmoid is that of the authors' code.
    """

    def __init__(
        self,
        n_inputs: int,
        image_shape: tuple[int, int, int],
        hidden: Sequence[int] = (1000, 1000),
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ConfigError(f"hidden must be one or more positive layer sizes; got {list(hidden)}")
        layers = [*dense_layers((n_inputs, *hidden), activation), nn.Linear(hidden[-1], prod(image_shape))]
        self.layers = nn.Sequential(*layers, nn.Sigmoid(), nn.Unflatten(1, image_shape))

    def forward(self, features: Tensor) -> Tensor:
        images: Tensor = self.layers(features)
        return images


class ReconstructorCNN(nn.Module):
    """One wide linear layer and two transposed convolutions from weights `(m, n_inputs)` to images in (0, 1).

    Height and width are multiples of 4.

    Source: Balle, Cherubin and Hayes 2022, table VII: 4,096 units, read as 64 maps of 8 x 8, then 5x5 transposed
    convolutions of stride 2 to 32 channels and to the image. The sigmoid, not in the table, is as for MNIST.
    """

    def __init__(self, n_inputs: int, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = image_shape
        if height % 4 or width % 4 or min(image_shape) < 1:
            raise ConfigError(f"ReconstructorCNN needs images whose sides are multiples of 4; got {height} x {width}")
        first, second = _CHANNELS
        positions = (height // 4, width // 4)
        self.layers = nn.Sequential(
            nn.Linear(n_inputs, first * prod(positions)),
            nn.ReLU(),
            nn.Unflatten(1, (first, *positions)),
            nn.ConvTranspose2d(first, second, 5, stride=2, padding=2, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(second, channels, 5, stride=2, padding=2, output_padding=1),
            nn.Sigmoid(),
        )

    def forward(self, features: Tensor) -> Tensor:
        images: Tensor = self.layers(features)
        return images


class PatchDiscriminator(nn.Module):
    """Scores overlapping patches: 1 for those of a real image, 0 for others. Sides are at least 24 pixels.

    Source: Balle, Cherubin and Hayes 2022, table VIII: 4x4 convolutions with 64, 128, 256, 512 and 1 filters and
    strides 2, 2, 2, 1, 1. Padding of 1 and leaky ReLU are those of Isola et al. 2017, which the paper follows.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, stride in _PATCH_LAYERS:
            layers += [nn.Conv2d(channels, width, 4, stride=stride, padding=1), nn.LeakyReLU(0.2)]
            channels = width
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, 1, 4, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        """Scores `(m, 1, i, j)` of the patches of images `(m, c, h, w)`."""
        scores: Tensor = self.layers(images * 2 - 1)
        return scores
