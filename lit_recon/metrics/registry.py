"""The interface of metrics, and their names: a registered one, or an import path."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.measures import Measure

#: Metrics of a run that does not choose.
DEFAULT_METRICS: tuple[str, ...] = (
    "mse",
    "rmse",
    "psnr",
    "ssim",
    "lpips",
    "label_accuracy",
    "feature_error",
    "feature_cosine",
)
#: Columns of `victims.csv` and of `evaluation.csv`, and endings of keys in `metrics.json`, that have another meaning.
_RESERVED = (
    "batch",
    "id",
    "label",
    "recovered_label",
    "certified",
    "loss",
    "n",
    "n_batches",
    "notes",
    "seconds",
    "seed",
    "formats",
    "defense",
    "strength",
    "attack",
    "aware",
    "batch_size",
    "nearest_public_rmse",
    "mean_image_rmse",
    "paper",
    "rmse_error",
    "strongest",
    "strongest_honest",
    "accuracy",
    "final_train_loss",
    "bound_rmse",
    "unbiased_bound_rmse",
    "bound_notes",
    "folder",
    "applicable",
    "reason",
)
_ENDINGS = ("_std", "_low", "_high", "_reason")


@dataclass(frozen=True)
class Unavailable:
    """The reason why a metric is not available, which reports show in place of a value."""

    reason: str


class Metric(ABC):
    """A score of reconstructions. Subclasses set `measure` and implement `__call__`; nothing else is needed.

    Attributes:
        measure: how the metric is named and printed.
        of: whether it compares matched images, labels, or features with the true ones.
    """

    measure: ClassVar[Measure]
    of: ClassVar[Literal["images", "labels", "features"]] = "images"

    def unavailable(self) -> str:
        """Why the metric cannot be computed on this machine; empty where it can. A run asks once."""
        return ""

    @abstractmethod
    def __call__(self, found: Tensor, truth: Tensor, /) -> Tensor:
        """The score of every image of a batch, `(n,)`, without NaN.

        Args:
            found: reconstructed images `(n, c, h, w)` in [0, 1], in the order of the targets; or recovered labels
                `(n,)`, or recovered features `(r, d)`.
            truth: target images of the same shape; or true labels `(n,)`, or true features `(n, d)`.
        """


_Class = TypeVar("_Class", bound=type[Metric])
_registered: dict[str, type[Metric]] = {}


def register(metric: _Class) -> _Class:
    """Class decorator: let settings name the metric by its key; a ConfigError if the key is taken or cannot be one."""
    key = metric.measure.key
    there = _registered.setdefault(key, metric)
    if (there.__module__, there.__qualname__) != (metric.__module__, metric.__qualname__):
        raise ConfigError(f"the metric {there.__qualname__} is registered as '{key}' already: choose another key")
    _check_key(key)
    return metric


def metrics_of(
    chosen: Sequence[str | Metric | type[Metric]] = DEFAULT_METRICS, configured: Sequence[Metric] = ()
) -> list[Metric]:
    """The named metrics in order; RMSE comes first where it is not named, since reports rank by it.

    Args:
        chosen: names of registered metrics, import paths of `Metric` subclasses, such subclasses, or metrics.
        configured: metrics that names stand for; others are built without arguments.

    Raises:
        ConfigError: there is no such metric, or two have the same key.

    >>> [metric.measure.key for metric in metrics_of(["psnr", "lit_recon.metrics.SSIM"])]
    ['rmse', 'psnr', 'ssim']
    """
    own = {metric.measure.key: metric for metric in configured}
    found = [_built(one, own) for one in chosen]
    keys = [metric.measure.key for metric in found]
    for key in keys:
        _check_key(key)
        if keys.count(key) > 1:
            raise ConfigError(f"metrics must have different keys; '{key}' is there {keys.count(key)} times: remove one")
    return found if "rmse" in keys else [_built("rmse", own), *found]


def _built(one: str | Metric | type[Metric], own: dict[str, Metric]) -> Metric:
    if isinstance(one, str):
        metric: object = own.get(one) or _registered.get(one) or _imported(one)
    else:
        metric = one
    if isinstance(metric, Metric):
        return metric
    if not (isinstance(metric, type) and issubclass(metric, Metric)):
        raise ConfigError(f"a metric must be a subclass of lit_recon.metrics.Metric; {one} is {metric!r}")
    try:
        return metric()
    except TypeError as error:
        raise ConfigError(
            f"the metric {one} cannot be built without arguments ({error}): give them under class_path and init_args"
        ) from error


def _imported(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        if not module:
            raise ImportError("it is not registered")
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the latter two: it is no path
        raise ConfigError(
            f"there is no metric {path} ({error}): name one of {', '.join(_registered)}, or the import path of a "
            "subclass of lit_recon.metrics.Metric"
        ) from error
    return found


def _check_key(key: str) -> None:
    if not key.isidentifier() or key in _RESERVED or key.endswith(_ENDINGS) or key.startswith("baseline_"):
        raise ConfigError(
            f"the key of a metric must be a name such as 'rmse' that no other column has; got {key!r}: avoid "
            f"{', '.join(_RESERVED)}, the endings {', '.join(_ENDINGS)} and the beginning baseline_"
        )


def check_images(name: str, images: Tensor) -> None:
    """Raise a ShapeError unless `images` are finite floats `(n, c, h, w)` in [0, 1]; `n` may be 0."""
    if images.dim() != 4 or not images.is_floating_point():
        raise ShapeError(
            f"{name} must be float images (n, c, h, w); got {images.dtype} of shape {tuple(images.shape)}: "
            "convert with unit_images()"
        )
    if not torch.isfinite(images).all():
        raise ShapeError(f"{name} holds NaN or infinite pixels: scores need finite images in [0, 1]")
    if ((images < 0) | (images > 1)).any():
        least, most = float(images.min()), float(images.max())
        bytes_ = least >= 0 and 1 < most <= 255 and bool((images == images.round()).all())
        remedy = "divide by 255, or give bytes" if bytes_ else "undo the normalization first, or clamp"
        raise ShapeError(f"{name} must lie in [0, 1]; got pixels from {least:.4g} to {most:.4g}: {remedy}")


def check_pairs(images: Tensor, targets: Tensor) -> None:
    """Raise a ShapeError unless both batches are images as for `check_images`, of equal shape."""
    check_images("images", images)
    check_images("targets", targets)
    if images.shape != targets.shape:
        raise ShapeError(
            f"images and targets must pair up; got shapes {tuple(images.shape)} and {tuple(targets.shape)}"
        )


def unit_images(images: Tensor) -> Tensor:
    """Float images in [0, 1] from bytes; others are returned as they are, or refused as by `check_images`."""
    unit = images.float() / 255 if images.dtype == torch.uint8 else images
    check_images("images", unit)
    return unit
