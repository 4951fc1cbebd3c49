"""The training procedure of released and shadow models, as an informed adversary knows it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.privacy.noisy_sgd import PrivateDescent

#: Adam's second decay and epsilon; PyTorch's defaults.
ADAM_DECAY, ADAM_EPSILON = 0.999, 1e-8


@dataclass(frozen=True)
class GradientDescent:
    """Gradient descent on the mean cross-entropy, over all images or mini-batches; ConfigError for wrong settings.

    With mini-batches, every epoch shuffles all images, including the unknown one, and splits them into batches; the
    last one may be smaller.

    Args:
        steps: number of steps, each over one batch.
        lr: learning rate.
        momentum: as in `torch.optim.SGD`, `v <- momentum * v + gradient`; for Adam, the decay of the mean gradient.
        optimizer: gradient descent with momentum, or Adam as in `torch.optim.Adam`.
        dp: clipping and noise, for full batches only; default: none.
        batch_size: images per batch; default: all of them.
        order: of mini-batches: `known`: the same for released and shadow models; `unknown`: every model draws its own.
        epochs: number of epochs, instead of `steps`; for mini-batches.
        snapshots: ascending numbers of steps, or of epochs if that is set, after which the model is also released.

    Source: Balle, Cherubin and Hayes 2022, table V (MNIST); mini-batches: section VI-B.

    >>> GradientDescent(batch_size=32, epochs=10, snapshots=[1, 5]).kept_steps(100)
    [4, 20, 40]
    """

    steps: int = 100
    lr: float = 0.2
    momentum: float = 0.9
    optimizer: Literal["sgd", "adam"] = "sgd"
    dp: PrivateDescent | None = None
    batch_size: int | None = None
    order: Literal["known", "unknown"] = "known"
    epochs: int | None = None
    snapshots: Sequence[int] = ()

    @property
    def description(self) -> dict[str, object]:
        """Cache key: fields that must match to reuse stored models; newer ones only if set, as old stores lack them."""
        length: dict[str, object] = {"steps": self.steps} if self.epochs is None else {"epochs": self.epochs}
        found = length | {"lr": self.lr, "momentum": self.momentum}
        if self.optimizer != "sgd":
            found["optimizer"] = self.optimizer
        if self.batch_size is not None:
            found |= {"batch_size": self.batch_size, "order": self.order}
        if self.snapshots:
            found["snapshots"] = list(self.snapshots)
        dp = {} if self.dp is None else asdict(self.dp)
        return found | {f"dp.{key}": value for key, value in dp.items() if value is not None}

    @property
    def is_noisy(self) -> bool:
        """Whether noise is added, for which every model has a generator of its own."""
        return self.dp is not None and self.dp.noise(self.steps) > 0

    @property
    def without_noise(self) -> GradientDescent:
        """The same with the clipping of `dp` alone: what adversaries train who do not know the noise."""
        return self if self.dp is None else replace(self, dp=self.dp.with_noise(0.0))

    @property
    def has_own_order(self) -> bool:
        """Whether every model draws its own mini-batches."""
        return self.batch_size is not None and self.order == "unknown"

    def n_generators(self, n_models: int) -> int:
        """Number of generators that `n_models` models need: one each, one for a common order, or none."""
        if self.is_noisy or self.has_own_order:
            return n_models
        return int(self.batch_size is not None)

    def n_steps(self, n_images: int) -> int:
        """Steps of a training on `n_images` images."""
        return self.steps if self.epochs is None else self.epochs * self._steps_per_count(n_images)

    def kept_steps(self, n_images: int) -> list[int]:
        """Steps after which the model is released, the end of training included."""
        return [count * self._steps_per_count(n_images) for count in self.snapshots] + [self.n_steps(n_images)]

    def _steps_per_count(self, n_images: int) -> int:
        """Steps per unit of `snapshots`: 1, or those of an epoch."""
        return 1 if self.epochs is None else -(-n_images // (self.batch_size or n_images))

    def torch_optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """PyTorch's optimizer of a network."""
        if self.optimizer == "adam":
            betas = (self.momentum, ADAM_DECAY)
            return torch.optim.Adam(network.parameters(), lr=self.lr, betas=betas, eps=ADAM_EPSILON)
        return torch.optim.SGD(network.parameters(), lr=self.lr, momentum=self.momentum)

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ConfigError(
                "descent.steps must be at least 1, descent.lr above 0 and descent.momentum in [0, 1); "
                f"got {self.steps}, {self.lr} and {self.momentum}"
            )
        if self.batch_size is None and (self.order != "known" or self.epochs is not None):
            raise ConfigError(
                "descent.order and descent.epochs are for mini-batches; got no descent.batch_size: full batches have "
                "no order, and their epochs are descent.steps"
            )
        if any(count is not None and count < 1 for count in (self.batch_size, self.epochs)):
            raise ConfigError(
                f"descent.batch_size and descent.epochs must be at least 1; got {self.batch_size} and {self.epochs}"
            )
        if self.batch_size is not None and self.dp is not None:
            raise ConfigError(
                f"descent.dp needs full batches, for which epsilon is exact; got descent.batch_size={self.batch_size}: "
                "leave one of them out"
            )
        end = self.steps if self.epochs is None else self.epochs
        if list(self.snapshots) != sorted({count for count in self.snapshots if 0 < count < end}):
            raise ConfigError(
                f"descent.snapshots must be different ascending numbers from 1 to {end - 1}, before the end of "
                f"training; got {list(self.snapshots)}"
            )


@dataclass(frozen=True, eq=False)
class KnownTraining:
    """Everything about a released model's training but one image.

    ShapeError for images that do not fit labels or network, ConfigError for mini-batches larger than the training set,
    UnsupportedModelError for networks with buffers or random layers: data do not determine their training; and for
    frozen weights, which only some of the ways to train would leave as they are.
    """

    network: nn.Module  # its weights are not used
    images: Tensor  # fixed set, float `(n, c, h, w)` in [0, 1]
    labels: Tensor  # int64 `(n,)`
    descent: GradientDescent

    def __post_init__(self) -> None:
        if self.images.dim() < 2 or len(self.images) != len(self.labels) or self.labels.dim() != 1:
            raise ShapeError(
                "the fixed set must be images (n, c, h, w) and labels (n,); "
                f"got {tuple(self.images.shape)} and {tuple(self.labels.shape)}"
            )
        if any(parameter.dtype != self.images.dtype for parameter in self.network.parameters()):
            raise ShapeError(f"network and images must have one dtype; got images of {self.images.dtype}")
        if (self.descent.batch_size or 0) > len(self.images) + 1:
            raise ConfigError(
                f"descent.batch_size must be at most {len(self.images) + 1}, the fixed set and one image; "
                f"got {self.descent.batch_size}"
            )
        wrong = [name for name, _ in self.network.named_buffers()]
        wrong += [
            name for name, module in self.network.named_modules() if isinstance(module, nn.modules.dropout._DropoutNd)
        ]
        if wrong:
            raise UnsupportedModelError(
                f"shadow models need networks without buffers and dropout; got {wrong[:3]}: "
                "use GroupNorm instead of BatchNorm and leave dropout out"
            )
        frozen = [name for name, parameter in self.network.named_parameters() if not parameter.requires_grad]
        if frozen:
            raise UnsupportedModelError(
                f"shadow models need networks whose weights are all trained; got requires_grad=False for {frozen[:3]}: "
                "set it to True"
            )

    @property
    def n_parameters(self) -> int:
        """Length `p` of a model's flat weights."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    @property
    def kept_steps(self) -> list[int]:
        return self.descent.kept_steps(len(self.images) + 1)

    @property
    def n_steps(self) -> int:
        return self.descent.n_steps(len(self.images) + 1)

    def on(self, device: torch.device | str, dtype: torch.dtype | None = None) -> KnownTraining:
        """A copy on another device or in another precision."""
        network = copy.deepcopy(self.network).to(device=device, dtype=dtype)
        return KnownTraining(network, self.images.to(device=device, dtype=dtype), self.labels.to(device), self.descent)

    def check(
        self, initial: Tensor, images: Tensor, labels: Tensor, generators: Sequence[torch.Generator] | None = None
    ) -> None:
        """Raise ShapeError for arguments of `train_models` that do not fit each other, the network or the fixed set."""
        if images.shape[1:] != self.images.shape[1:] or labels.shape != images.shape[:1]:
            raise ShapeError(
                f"one image of shape {tuple(self.images.shape[1:])} and one label per model are needed; "
                f"got {tuple(images.shape)} and {tuple(labels.shape)}"
            )
        if initial.shape not in ((self.n_parameters,), (len(images), self.n_parameters)):
            raise ShapeError(
                f"initial weights must be ({self.n_parameters},) or ({len(images)}, {self.n_parameters}); "
                f"got {tuple(initial.shape)}"
            )
        if not torch.isfinite(initial).all():
            raise ShapeError("initial weights hold NaN or infinite values; they must be finite")
        given, n = len(generators or ()), self.descent.n_generators(len(images))
        if n and given != n:
            what = "training by batches in a known order needs one generator for all models"
            if self.descent.is_noisy:
                what = "noisy training needs one generator per model"
            elif self.descent.has_own_order:
                what = "an unknown order needs one generator per model"
            raise ShapeError(f"{what}; got {given} for {len(images)} models")


def flat_weights(network: nn.Module) -> Tensor:
    """All parameters of a network in the order of `named_parameters`, `(p,)`."""
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def unflatten(network: nn.Module, weights: Tensor) -> dict[str, Tensor]:
    """Views of `weights` `(..., p)` by parameter; ShapeError if the network has another number of weights."""
    sizes = [parameter.numel() for parameter in network.parameters()]
    if weights.shape[-1:] != (sum(sizes),):
        raise ShapeError(f"the network has {sum(sizes)} parameters; got weights {tuple(weights.shape)}")
    parts = zip(network.named_parameters(), weights.split(sizes, dim=-1), strict=True)
    return {name: part.unflatten(-1, parameter.shape) for (name, parameter), part in parts}


def cross_entropy(
    network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor, reduction: str = "mean"
) -> Tensor:
    """Of a network with weights `(p,)` on images `(n, ...)` with labels `(n,)`; differentiable in the first two."""
    return F.cross_entropy(functional_call(network, unflatten(network, weights), images), labels, reduction=reduction)


def of_own_images(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], weights: Tensor, images: Tensor, labels: Tensor, chunk: int
) -> Tensor:
    """A function of a model's weights, images and labels, for models `(m, p)` with one image and label `(m,)` each.

    `chunk` models are computed at a time.
    """
    if not len(weights) == len(images) == len(labels) > 0:
        raise ShapeError(
            f"every model needs one image and one label; got {len(weights)} models, {len(images)} images and "
            f"{len(labels)} labels"
        )
    parts = zip(weights.split(chunk), images[:, None].split(chunk), labels[:, None].split(chunk), strict=True)
    return torch.cat([vmap(function)(*part) for part in parts])


#: Images whose convolutions are held at a time on a CPU: all of 5,000 take twice the time, outside its caches.
_IN_CACHE = 250


def add_gradient(network: nn.Module, images: Tensor, labels: Tensor, divisor: int) -> None:
    """Add the gradient of the cross-entropy, summed over images and divided, to that of the network's parameters."""
    convolves = any(isinstance(module, nn.Conv2d) for module in network.modules())
    size = _IN_CACHE if convolves and not images.is_cuda else max(1, len(images))
    with torch.enable_grad():
        for some, theirs in zip(images.split(size), labels.split(size), strict=True):
            F.cross_entropy(network(some), theirs, reduction="sum").div(divisor).backward()


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32 and bfloat16: one image changes the weights by a thousandth, which these would round away."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
