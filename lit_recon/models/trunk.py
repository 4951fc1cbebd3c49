"""The part of a classifier that turns an image into a feature vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lit_recon.errors import ShapeError

#: A constructor argument that survives a trip through JSON.
Argument = int | float | str | bool | list[int]


class Trunk(nn.Module, ABC):
    """Base of feature extractors. A subclass sets `out_features` and writes `forward`.

    Nothing in a trunk works in place: attacks differentiate it twice.

    Args:
        image_shape: `(c, h, w)` of the images it takes.
        arguments: the other constructor arguments; with `image_shape` they rebuild the trunk from a checkpoint.

    Attributes:
        image_shape: `(c, h, w)`.
        out_features: length `d` of the feature vector.
        arguments: JSON-able constructor arguments, `image_shape` included.

    Raises:
        ShapeError: `image_shape` is not three positive numbers.
    """

    out_features: int

    def __init__(self, image_shape: Sequence[int], arguments: Mapping[str, Argument]) -> None:
        super().__init__()
        if len(image_shape) != 3 or min(image_shape) < 1:
            raise ShapeError(f"image_shape must be (channels, height, width), all positive; got {tuple(image_shape)}")
        channels, height, width = image_shape
        self.image_shape: tuple[int, int, int] = (channels, height, width)
        self.arguments: dict[str, Argument] = {"image_shape": list(image_shape), **arguments}

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features `(n, out_features)` of normalized images `(n, c, h, w)`."""
