"""The classifier that a federation trains: normalization, trunk, optional wide feature layer, linear head."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.models.classifiers.feature_layer import WideFeatureLayer
from lit_recon.models.layers import checked_shape
from lit_recon.records import Normalization

#: A constructor argument that can be stored as JSON.
Argument = int | float | str | bool | list[int]


class Trunk(nn.Module, ABC):
    """Base of feature extractors. A subclass sets `out_features` and writes `forward`.

    Trunks have no in-place operations: attacks differentiate them twice.

    Args:
        image_shape: `(c, h, w)` of its inputs; a ShapeError unless it is three positive numbers.
        arguments: the other constructor arguments, JSON-able; with `image_shape` they rebuild the trunk.

    Attributes:
        out_features: length `d` of the feature vector.
    """

    out_features: int

    def __init__(self, image_shape: Sequence[int], arguments: Mapping[str, Argument]) -> None:
        super().__init__()
        self.image_shape = checked_shape(image_shape)
        self.arguments: dict[str, Argument] = {"image_shape": list(image_shape), **arguments}

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features `(n, out_features)` of normalized images `(n, c, h, w)`."""


#: Import path of this package's trunks.
_OWN_TRUNKS = "lit_recon.models"


def trunk_path(trunk: type[Trunk]) -> str:
    """Import path of a trunk's class, as stored in checkpoints."""
    own = getattr(importlib.import_module(_OWN_TRUNKS), trunk.__name__, None) is trunk
    return f"{_OWN_TRUNKS if own else trunk.__module__}.{trunk.__qualname__}"


def find_trunk(path: str) -> type[Trunk]:
    """The trunk class at an import path, or an UnsupportedModelError; a bare name is one of `lit_recon.models`."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or _OWN_TRUNKS), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the latter two: it is no path
        raise UnsupportedModelError(
            f"the trunk {path!r} cannot be imported ({error}): put the package that defines it on PYTHONPATH"
        ) from error
    if not isinstance(found, type) or not issubclass(found, Trunk):
        raise UnsupportedModelError(f"{path!r} is no subclass of lit_recon.models.Trunk: give the class of a trunk")
    return found


class Backbone(nn.Module):
    """Logits of images in [0, 1], by a trunk, an optional feature layer and a linear head.

    Args:
        trunk: extracts features.
        n_classes: `k`, at least 2.
        normalization: channel statistics applied to the pixels; fixed, and not part of the state dict.
        feature_layer: between trunk and head.
        head_bias: the head adds a bias to every logit.

    Raises:
        ConfigError: fewer than two classes.
        ShapeError: the sizes of the parts do not match.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        trunk: Trunk,
        n_classes: int,
        normalization: Normalization,
        feature_layer: WideFeatureLayer | None = None,
        head_bias: bool = True,
    ) -> None:
        super().__init__()
        if n_classes < 2:
            raise ConfigError(f"a classifier needs at least 2 classes; got n_classes={n_classes}")
        if len(normalization.mean) != trunk.image_shape[0]:
            raise ShapeError(
                f"normalization has {len(normalization.mean)} channels but the trunk takes images of shape "
                f"{trunk.image_shape}: measure it on the same data"
            )
        if feature_layer is not None and feature_layer.in_features != trunk.out_features:
            raise ShapeError(
                f"the feature layer takes {feature_layer.in_features} features but the trunk gives "
                f"{trunk.out_features}: build it with in_features={trunk.out_features}"
            )
        self.n_classes, self.normalization, self.image_shape = n_classes, normalization, trunk.image_shape
        self.trunk = trunk
        self.feature_layer = feature_layer
        features = trunk.out_features if feature_layer is None else feature_layer.n_neurons
        self.head = nn.Linear(features, n_classes, bias=head_bias)
        # buffers: no copy to the device at every call
        mean, std = normalization.tensors(torch.empty(0))
        self.register_buffer("pixel_mean", mean, persistent=False)
        self.register_buffer("pixel_std", std, persistent=False)

    def features(self, images: Tensor) -> Tensor:
        """Trunk features `(n, d)` of images `(n, c, h, w)` in [0, 1]; a ShapeError for images of another shape."""
        if images.dim() != 4 or tuple(images.shape[1:]) != self.image_shape:
            raise ShapeError(f"images must be (n, {', '.join(map(str, self.image_shape))}); got {tuple(images.shape)}")
        features: Tensor = self.trunk((images - self.pixel_mean) / self.pixel_std)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, k)` of images `(n, c, h, w)` in [0, 1]."""
        features = self.features(images)
        if self.feature_layer is not None:
            features = self.feature_layer(features)
        logits: Tensor = self.head(features)
        return logits
