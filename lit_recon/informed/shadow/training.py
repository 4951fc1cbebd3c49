"""How a released model was trained, as one knows who knows everything but one image."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.informed.shadow.private import PrivateDescent

#: Of Adam: decay of the squares, and what is added to their root; PyTorch's defaults.
ADAM_DECAY, ADAM_EPSILON = 0.999, 1e-8


@dataclass(frozen=True)
class GradientDescent:
    """Full-batch descent on the mean cross-entropy.

    Args:
        steps: of descent, each over all images.
        lr: learning rate.
        momentum: `v <- momentum * v + gradient`, `theta <- theta - lr * v`, as in `torch.optim.SGD`; of Adam, the decay
            of the mean gradient.
        optimizer: gradient descent with momentum, or Adam as in `torch.optim.Adam`.
        dp: clipping and noise; default: none.

    Source: Balle, Cherubin and Hayes 2022, table V (MNIST).
    """

    steps: int = 100
    lr: float = 0.2
    momentum: float = 0.9
    optimizer: Literal["sgd", "adam"] = "sgd"
    dp: PrivateDescent | None = None

    @property
    def description(self) -> dict[str, object]:
        """What a store has to agree in; later settings only where they say something, so that old stores stay valid."""
        found: dict[str, object] = {"steps": self.steps, "lr": self.lr, "momentum": self.momentum}
        if self.optimizer != "sgd":
            found["optimizer"] = self.optimizer
        dp = {} if self.dp is None else asdict(self.dp)
        return found | {f"dp.{key}": value for key, value in dp.items() if value is not None}

    @property
    def is_noisy(self) -> bool:
        """Whether every model needs a generator of its own."""
        return self.dp is not None and self.dp.noise(self.steps) > 0

    def torch_optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """PyTorch's own, over all parameters."""
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


@dataclass(frozen=True, eq=False)
class KnownTraining:
    """All about a released model's training but for one image.

    Attributes:
        network: the architecture; its own weights are of no account.
        images: fixed set `(n, c, h, w)`, float in [0, 1].
        labels: int64 `(n,)`.
        descent: the optimizer.

    Raises:
        ShapeError: images and labels do not fit, or their dtype is not that of the network.
        UnsupportedModelError: the network has buffers or random layers, so that a model depends on more than its data.
    """

    network: nn.Module
    images: Tensor
    labels: Tensor
    descent: GradientDescent

    def __post_init__(self) -> None:
        if self.images.dim() < 2 or len(self.images) != len(self.labels) or self.labels.dim() != 1:
            raise ShapeError(
                "the fixed set must be images (n, c, h, w) and labels (n,); "
                f"got {tuple(self.images.shape)} and {tuple(self.labels.shape)}"
            )
        if any(parameter.dtype != self.images.dtype for parameter in self.network.parameters()):
            raise ShapeError(f"network and images must have one dtype; got images of {self.images.dtype}")
        buffers = [name for name, _ in self.network.named_buffers()]
        random = [
            name for name, module in self.network.named_modules() if isinstance(module, nn.modules.dropout._DropoutNd)
        ]
        if buffers or random:
            raise UnsupportedModelError(
                f"shadow models need networks without buffers and dropout; got {(buffers + random)[:3]}: "
                "use GroupNorm instead of BatchNorm and leave dropout out"
            )

    @property
    def n_parameters(self) -> int:
        """Length `p` of a model's flat weights."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    def on(self, device: torch.device | str, dtype: torch.dtype | None = None) -> KnownTraining:
        """The same on another device or in another precision."""
        network = copy.deepcopy(self.network).to(device=device, dtype=dtype)
        return KnownTraining(network, self.images.to(device=device, dtype=dtype), self.labels.to(device), self.descent)

    def check(
        self, initial: Tensor, images: Tensor, labels: Tensor, generators: Sequence[torch.Generator] | None = None
    ) -> None:
        """Refuse what does not fit: initial weights `(p,)` or `(s, p)`, images `(s, c, h, w)` and generators per model.

        Raises:
            ShapeError: they do not fit each other, the network or the fixed set.
        """
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
        if self.descent.is_noisy and len(generators or ()) != len(images):
            raise ShapeError(
                f"noisy training needs one generator per model; got {len(generators or ())} for {len(images)} models"
            )


def flat_weights(network: nn.Module) -> Tensor:
    """All parameters of a network in the order of `named_parameters`, `(p,)`."""
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def unflatten(network: nn.Module, weights: Tensor) -> dict[str, Tensor]:
    """Parameters by name, with the leading axes of `weights` `(..., p)`; views of it.

    Raises:
        ShapeError: `weights` are not those of such a network.
    """
    sizes = [parameter.numel() for parameter in network.parameters()]
    if weights.shape[-1:] != (sum(sizes),):
        raise ShapeError(f"the network has {sum(sizes)} parameters; got weights {tuple(weights.shape)}")
    parts = weights.split(sizes, dim=-1)
    return {
        name: part.unflatten(-1, parameter.shape)
        for (name, parameter), part in zip(network.named_parameters(), parts, strict=True)
    }


@contextmanager
def full_precision() -> Iterator[None]:
    """No product in TF32 or bfloat16: an image moves the weights by a thousandth, which those would round away."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
