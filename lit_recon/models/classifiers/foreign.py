"""Classifiers of other libraries as victim models: any module that takes images `(n, c, h, w)` and returns logits."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.io.tensors import read_state
from lit_recon.models.classifiers.backbone import Backbone
from lit_recon.models.layers import checked_shape
from lit_recon.records import Normalization

_SHOWN = 5  # largest number of tensor names in a message


class PublicModel(NamedTuple):
    """A classifier, from images `(n, c, h, w)` in [0, 1] to logits `(n, k)`, which normalizes pixels itself."""

    model: nn.Module
    image_shape: tuple[int, int, int]
    normalization: Normalization
    n_classes: int


def public_model(
    model: nn.Module, image_shape: Sequence[int] | None = None, normalization: Normalization | None = None
) -> PublicModel:
    """`model` as a classifier of images in [0, 1].

    A `Backbone` is returned as it is; of any other module a copy in evaluation mode, with the attributes `image_shape`,
    `normalization` and `n_classes`. It normalizes in a forward hook, so that the names of parameters do not change.

    Args:
        model: from images `(n, c, h, w)` to logits `(n, k)`.
        image_shape: `(c, h, w)`; default: the attribute of that name.
        normalization: applied to the pixels before the module. Default: the module's attribute `normalization`, which
            states what the module does itself; without one the module takes pixels in [0, 1].

    Raises:
        ConfigError: no image shape, or a normalization for a module that normalizes by itself.
        ShapeError: shape or normalization contradict the module or each other.
        UnsupportedModelError: no parameters, or some in half precision; a forward pass that fails on images, or outputs
            other than `(n, k)`.
    """
    own_shape, own = getattr(model, "image_shape", None), getattr(model, "normalization", None)
    name = type(model).__name__
    dtypes = {value.dtype for value in model.parameters() if value.is_floating_point()}
    if low := dtypes - {torch.float32, torch.float64}:
        found = ", ".join(sorted(map(str, low)))
        raise UnsupportedModelError(f"{name} has parameters of {found}; attacks need float32 or float64: call .float()")
    if image_shape is None and not isinstance(own_shape, tuple):
        raise ConfigError(f"{name} has no attribute image_shape: give image_shape=(channels, height, width)")
    shape = checked_shape(own_shape if image_shape is None else image_shape)  # type: ignore[arg-type]  # one is given
    if isinstance(own_shape, tuple) and own_shape != shape:
        raise ShapeError(f"{name} takes images {own_shape}, but image_shape is {shape}: leave image_shape out")
    if isinstance(own, Normalization) and normalization is not None:
        raise ConfigError(f"{name} normalizes its input by itself, see its attribute `normalization`: give none")
    if isinstance(model, Backbone):
        return PublicModel(model, model.image_shape, model.normalization, model.n_classes)
    applied = normalization or (own if isinstance(own, Normalization) else None)
    applied = applied or Normalization((0.0,) * shape[0], (1.0,) * shape[0])
    if len(applied.mean) != shape[0]:
        raise ShapeError(
            f"normalization has {len(applied.mean)} channels, but images are {shape}: give one per channel"
        )
    like = next((value for value in model.parameters() if value.is_floating_point()), None)
    if like is None:
        raise UnsupportedModelError(f"{name} has no parameters, so there is no update to attack: give a classifier")
    copied: Any = copy.deepcopy(model).eval()
    if normalization is not None:
        mean, std = normalization.tensors(like.detach())
        copied.register_buffer("_pixel_mean", mean, persistent=False)
        copied.register_buffer("_pixel_std", std, persistent=False)
        copied.register_forward_pre_hook(_normalize)
    elif like.dtype is torch.float64:  # attacks draw candidates in float32
        copied.register_forward_pre_hook(_in_double)
    n_classes = _count_classes(copied, like.new_zeros(2, *shape) + 0.5)
    copied.image_shape, copied.normalization, copied.n_classes = shape, applied, n_classes
    return PublicModel(copied, shape, applied, n_classes)


def _normalize(model: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return ((given[0] - model._pixel_mean) / model._pixel_std, *given[1:])


def _in_double(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (given[0].double(), *given[1:])


def _count_classes(model: nn.Module, images: Tensor) -> int:
    """`k` of a module that returns logits `(n, k)`, by a forward pass."""
    name, shape = type(model).__name__, tuple(images.shape)
    try:
        with torch.no_grad():
            logits = model(images)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} must take images {shape} and return logits (2, k), but its forward pass fails: {_reason(error)}; "
            "give a module that takes images, and the image_shape that it was built for"
        ) from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(images) or logits.shape[1] < 2:
        got = f"a tensor {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedModelError(
            f"{name} must return logits (2, k) of k >= 2 classes for images {shape}; it returns {got}: give a "
            "module that returns the logits only, such as one around it"
        )
    return logits.shape[1]


def build_module(class_path: str, arguments: Mapping[str, Any], seed: int) -> nn.Module:
    """The module made by the class or function at an import path, with random weights from `seed`, or a ConfigError."""
    import lit_recon._torchvision

    path, _, name = class_path.rpartition(".")
    try:
        made_by = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.class_path {class_path!r} cannot be imported ({_reason(error)}): give the import path of a class "
            "or function, such as torchvision.models.resnet18, whose package is installed or on PYTHONPATH"
        ) from error
    wanted = f"model.class_path {class_path!r} must be a torch.nn.Module, or a function that returns one"
    if not callable(made_by) or (inspect.isclass(made_by) and not issubclass(made_by, nn.Module)):
        raise ConfigError(f"{wanted}; it is {_kind(made_by)}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = made_by(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ConfigError(f"{class_path}({given}) fails: {_reason(error)}; change model.init_args") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{wanted}; it returned {_kind(made)}")
    return made


def load_weights(model: nn.Module, path: Path) -> None:
    """Load tensors named as in `model.state_dict()`, also from under the key `state_dict` of a `.pt` file.

    Only tensors and plain containers are unpickled.

    Raises:
        MissingDataError: no file at `path`.
        CorruptFileError: truncated, of another format, or with content other than tensors.
        ShapeError: names or shapes of the tensors do not fit the model.
        ConfigError: a tensor holds NaN or infinite values.
    """
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ConfigError(f"model.weights must be a .safetensors, .pt or .pth file; got {path}: save it as one of them")
    remedy = "save model.state_dict() with torch.save or safetensors, or give another file as model.weights"
    found = read_state(path, "weights", remedy)
    expected = model.state_dict()
    shapes = {
        name: f"{name} {tuple(found[name].shape)} instead of {tuple(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    }
    problems = {
        "missing": [name for name in expected if name not in found],
        "superfluous": [name for name in found if name not in expected],
        "of another shape": list(shapes.values()),
        "of another type": [
            f"{name}, {found[name].dtype} instead of {value.dtype}"
            for name, value in expected.items()
            if name in found and _kind_of_number(found[name]) != _kind_of_number(value)
        ],
    }
    if any(problems.values()):
        told = "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names)
        raise ShapeError(f"the weights in {path} do not fit {type(model).__name__}: {told}; change model.init_args")
    diverged = [name for name, value in found.items() if not value.isfinite().all()]
    if diverged:
        raise ConfigError(
            f"the weights in {path} are NaN or infinite in {len(diverged)} tensors: {_listed(diverged)}; their "
            "training has diverged: train again with a lower learning rate"
        )
    model.load_state_dict(found)


def _kind_of_number(value: Tensor) -> tuple[bool, bool]:
    return value.is_floating_point(), value.is_complex()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"of type {type(value).__name__}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
