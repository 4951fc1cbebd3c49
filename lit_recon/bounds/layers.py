"""Gradients of weights of single layers: their changes, adjoints of these, and rows with the same inner products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import fold, unfold

from lit_recon.records import Update

#: Entries of the changes of a weight that are computed at once.
_CACHED = 4_000_000


def weighted(vectors: Update, weights: Update | float) -> Update:
    """Every entry times its weight."""
    return {name: v * (weights if isinstance(weights, float | int) else weights[name]) for name, v in vectors.items()}


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a convolution or linear layer that `WeightLayer` knows."""
    if not {name for name, _ in module.named_parameters()} <= {"weight", "bias"}:
        return False  # the weight is computed from others, as by `torch.nn.utils.spectral_norm`
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


@contextmanager
def hooked(modules: Mapping[str, nn.Module], hook: Callable[[str, Tensor, Tensor], Tensor | None]) -> Iterator[None]:
    """Calls `hook(name, input, output)` after every call of the modules; what it returns replaces the output."""
    handles = [
        module.register_forward_hook(lambda _, given, output, name=name: hook(name, given[0], output))
        for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class WeightLayer:
    """A convolution or linear layer at a batch; the gradient of its weight is `D A^T`, `(o, K)`.

    `patches` are `A`, `(K, P)`, and `slopes` are `D`, `(o, P)`: the layer's inputs, and the derivatives of the loss in
    its outputs, at all `P` positions in all images.
    """

    def __init__(self, module: nn.Module, inputs: Tensor, slopes: Tensor) -> None:
        self.module: Any = module
        self.parts = tuple(name for name, _ in module.named_parameters())
        self.inputs, self._input_shape, self._slope_shape = inputs, inputs.shape, slopes.shape
        self.patches, self.slopes = self.unfolded(inputs[None])[0], self.flat(slopes[None])[0]
        (size, positions), channels = self.patches.shape, len(self.slopes)
        # multiplications of the two ways of `normal`
        self._few = 3 * positions * (size + channels) < 4 * size * channels
        if self._few:
            self._patch_products = self.patches.T @ self.patches
            self._slope_products = self.slopes.T @ self.slopes

    def gradient(self) -> Update:
        return self._parts((self.slopes @ self.patches.T)[None], self.slopes.sum(dim=1)[None], lead=())

    def along(self, inputs: Tensor, slopes: Tensor) -> Update:
        """Changes of the gradients `(m, ...)` with those of inputs and derivatives, `(m, n, ...)`."""
        moved, bent = self.unfolded(inputs), self.flat(slopes)
        weight = torch.matmul(bent, self.patches.T)
        weight += self.slopes @ moved.transpose(1, 2)
        return self._parts(weight, bent.sum(dim=2), lead=(len(inputs),))

    def back(self, vectors: Update) -> tuple[Tensor, Tensor]:
        """The adjoint of `along`."""
        weight = vectors["weight"].flatten(2)
        slopes = weight @ self.patches
        if "bias" in self.parts:
            slopes = slopes + vectors["bias"][:, :, None]
        return self.folded(weight.transpose(1, 2) @ self.slopes), self.unflat(slopes)

    def normal(self, inputs: Tensor, slopes: Tensor, weights: Update | float) -> tuple[Tensor, Tensor]:
        """`back` of the weighted `along`."""
        if not (self._few and isinstance(weights, float | int)):
            # few weights' changes at a time: they stay in the cache
            step = max(1, _CACHED // self.module.weight.numel())
            pairs = zip(inputs.split(step), slopes.split(step), strict=True)
            backs, bends = zip(*(self.back(weighted(self.along(*pair), weights)) for pair in pairs), strict=True)
            return torch.cat(backs), torch.cat(bends)
        moved, bent = self.unfolded(inputs), self.flat(slopes)
        back = self.patches @ (bent.transpose(1, 2) @ self.slopes) + moved @ self._slope_products
        bend = bent @ self._patch_products + self.slopes @ (moved.transpose(1, 2) @ self.patches)
        if "bias" in self.parts:
            bend = bend + bent.sum(dim=2, keepdim=True)
        return self.folded(weights * back), self.unflat(weights * bend)

    def _parts(self, weight: Tensor, bias: Tensor, lead: tuple[int, ...]) -> Update:
        found = {"weight": weight.reshape(*lead, *self.module.weight.shape)}
        return found | ({"bias": bias.reshape(*lead, -1)} if "bias" in self.parts else {})

    @property
    def _window(self) -> dict[str, Any]:
        names = ("kernel_size", "dilation", "padding", "stride")
        return {name: getattr(self.module, name) for name in names}

    def unfolded(self, inputs: Tensor) -> Tensor:
        """Patches `(m, K, P)` of inputs `(m, n, ...)`."""
        if isinstance(self.module, nn.Linear):
            return inputs.flatten(1, -2).transpose(1, 2)
        columns = unfold(inputs.flatten(0, 1), **self._window)
        return columns.view(*inputs.shape[:2], *columns.shape[1:]).transpose(1, 2).flatten(2)

    def folded(self, patches: Tensor) -> Tensor:
        """The adjoint of `unfolded`."""
        m, n = len(patches), self._input_shape[0]
        if isinstance(self.module, nn.Linear):
            return patches.transpose(1, 2).reshape(m, *self._input_shape)
        columns = patches.view(m, -1, n, patches.shape[2] // n).transpose(1, 2).flatten(0, 1)
        return fold(columns, self._input_shape[2:], **self._window).view(m, *self._input_shape)

    def flat(self, slopes: Tensor) -> Tensor:
        """Derivatives `(m, o, P)` in outputs `(m, n, ...)`."""
        if isinstance(self.module, nn.Linear):
            return slopes.flatten(1, -2).transpose(1, 2)
        return slopes.flatten(3).transpose(1, 2).flatten(2)

    def unflat(self, slopes: Tensor) -> Tensor:
        """The adjoint of `flat`."""
        m, n = len(slopes), self._slope_shape[0]
        if isinstance(self.module, nn.Linear):
            return slopes.transpose(1, 2).reshape(m, *self._slope_shape)
        return slopes.view(m, len(slopes[0]), n, -1).transpose(1, 2).reshape(m, *self._slope_shape)

    def by_channel(self, inputs: Tensor) -> Tensor:
        """Inputs `(m, n, ...)` as `(m, c, positions of all images)`."""
        if isinstance(self.module, nn.Linear):
            return inputs.flatten(1, -2).transpose(1, 2)
        return inputs.transpose(1, 2).flatten(2)

    def root(self) -> Tensor:
        """`R`, with `|D dA^T| = |R dX|` for changes `dX` of the input by channel and position."""
        products = self.slopes.double().T @ self.slopes.double()
        if not isinstance(self.module, nn.Linear):
            n, _, h, w = self._input_shape
            # the position of every entry of a patch, 0 outside of the image
            numbers = torch.arange(1, n * h * w + 1, dtype=torch.float64, device=self.inputs.device).view(n, 1, h, w)
            places = unfold(numbers, **self._window).long().transpose(0, 1).flatten(1)
            total = products.new_zeros(n * h * w + 1, n * h * w + 1)
            for place in places:
                total[place[:, None], place] += products
            products = total[1:, 1:]
        values, vectors = torch.linalg.eigh(products)
        seen = values > 1e-14 * values[-1]
        root: Tensor = (values[seen].sqrt()[:, None] * vectors[:, seen].T).to(self.inputs)
        return root


class PlainRows:
    """The part of a `WeightLayer`'s change that comes from its input, as rows `(m, n_rows)` with its inner products.

    Either `D dA^T` itself, or `R dX` for `dX` by channel and position, where `R^T R` adds up `D^T D` over the places of
    the kernel: whichever takes fewer multiplications for `q` changes.

    Attributes:
        own: inner products `(z, z)` of the gradients `G_z` for the derivatives `(z, n, ...)` of single logits.
        across: `(z, ...)`, whose inner product with an input's change is that of `G_z` with the weight's change.
    """

    def __init__(self, layer: WeightLayer, derivatives: Tensor, q: int) -> None:
        self._layer = layer
        flat = layer.flat(derivatives)
        gradients = flat @ layer.patches.T
        self.own = gradients.flatten(1) @ gradients.flatten(1).T
        if "bias" in layer.parts:
            self.own += flat.sum(dim=2) @ flat.sum(dim=2).T
        self.across = layer.folded(gradients.transpose(1, 2) @ layer.slopes).flatten(1)
        (channels, positions), (size, _) = layer.slopes.shape, layer.patches.shape
        lines, places = layer.by_channel(layer.inputs[None])[0].shape
        direct = size * channels * (positions + q / 2)
        self._root: Tensor | None = None
        self.n_rows = size * channels
        rank = min(places, size // lines * positions)
        if lines * rank * (places + q / 2) < direct:
            self._root = layer.root()
            self.n_rows = lines * len(self._root)

    def rows(self, inputs: Tensor) -> Tensor:
        """Rows of changes `(m, n, ...)` of the inputs."""
        if self._root is None:
            return (self._layer.slopes @ self._layer.unfolded(inputs).transpose(1, 2)).flatten(1)
        return (self._layer.by_channel(inputs) @ self._root.T).flatten(1)


class NormRows:
    """As `PlainRows`, for BatchNorm with fixed statistics."""

    def __init__(self, module: nn.Module, inputs: Tensor, slopes: Tensor, derivatives: Tensor) -> None:
        norm: Any = module
        shape = (-1, *[1] * (inputs.dim() - 2))
        self._axes = [axis for axis in range(inputs.dim()) if axis != 1]
        scale = torch.rsqrt(norm.running_var.to(inputs) + norm.eps).view(shape)
        self._slopes = slopes * scale
        normal = (inputs - norm.running_mean.to(inputs).view(shape)) * scale
        gradients, shifts = self._summed(derivatives * normal), self._summed(derivatives)
        self.own = gradients @ gradients.T + shifts @ shifts.T
        self.across = (gradients.view(len(gradients), 1, *shape) * self._slopes).flatten(1)
        self.n_rows = gradients.shape[1]

    def rows(self, inputs: Tensor) -> Tensor:
        """Rows of changes `(m, n, ...)` of the inputs."""
        return self._summed(inputs * self._slopes)

    def _summed(self, values: Tensor) -> Tensor:
        """Sums `(m, c)` over images and positions."""
        return values.sum(dim=[axis + 1 for axis in self._axes])
