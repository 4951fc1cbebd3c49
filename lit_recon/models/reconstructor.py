"""Networks that turn the weights of a released model into an image of its training set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from lit_recon.errors import ConfigError


class ReconstructorMLP(nn.Module):
    """Weights through hidden layers with ReLU to pixels in (0, 1).

    Args:
        n_inputs: weights of a released model `p`.
        image_shape: `(c, h, w)` of the images.
        hidden: neurons of each hidden layer.

    Source: Balle, Cherubin and Hayes 2022, table V, MNIST; the sigmoid at the end is that of the authors' code.
    """

    def __init__(self, n_inputs: int, image_shape: tuple[int, int, int], hidden: Sequence[int] = (1000, 1000)) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ConfigError(f"hidden must be one or more positive layer sizes; got {list(hidden)}")
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((n_inputs, *hidden)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        head = nn.Linear(hidden[-1], prod(image_shape))
        self.layers = nn.Sequential(*layers, head, nn.Sigmoid(), nn.Unflatten(1, image_shape))

    def forward(self, features: Tensor) -> Tensor:
        """Images `(m, c, h, w)` in (0, 1) of features `(m, n_inputs)`."""
        images: Tensor = self.layers(features)
        return images
