"""The smooth LeNet on which gradient inversion was first shown."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.models.layers import activation_layer
from lit_recon.models.trunk import Trunk

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
