"""Convolutions whose released gradients may determine their input maps.

The gradient of a convolution's weights, `(channels, c k k)`, is a sum over examples i and positions p of an outer
product: the derivative of the loss in the output at p, times the input patch under the kernel at p. With fewer patches
than output channels its row space is the span of all patches. Neighbouring patches overlap, so hardly any other map has
only patches in this span: maps with this property form a linear space, for a kernel of stride 1 the span of the batch's
own maps.

Where BatchNorm uses the statistics of the batch, the derivatives in its input sum to zero over all patches. The row
space then contains differences of patches only, and patches of the maps lie in it up to one common vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.clients.gradient import pure_copy
from lit_recon.models.layers import layers_with_weights
from lit_recon.records import Observation

#: Number of noise images for a forward pass that records the layers' inputs.
_PROBES = 4


@dataclass(frozen=True)
class Convolution:
    """A 2-d convolution and its input.

    Attributes:
        name: of the module.
        shape: `(c, h, w)` of an input map.
        channels: of its output.
        kernel, stride, padding: `(rows, columns)`.
        places: `P`, positions of the kernel on one map.
        sparse: inputs are non-negative and often zero, as after a ReLU.
    """

    name: str
    shape: tuple[int, int, int]
    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    places: int
    sparse: bool

    @property
    def patch_size(self) -> int:
        """Entries of the patch under the kernel."""
        return self.shape[0] * self.kernel[0] * self.kernel[1]

    @property
    def overlaps(self) -> bool:
        """Whether neighbouring patches share entries in both directions."""
        return self.kernel[0] > self.stride[0] and self.kernel[1] > self.stride[1]

    @property
    def every_step(self) -> bool:
        """Whether the stride is 1."""
        return self.stride == (1, 1)

    def patches(self, maps: Tensor) -> Tensor:
        """The patches under the kernel, `(n, c kernel, places)`, of input maps `(n, c, h, w)`."""
        return nn.functional.unfold(maps, self.kernel, padding=self.padding, stride=self.stride)

    def fold(self, patches: Tensor) -> Tensor:
        """Maps `(n, c, h, w)` whose entries are the sums of those of patches, as from `patches`, that they are in."""
        return nn.functional.fold(patches, self.shape[1:], self.kernel, padding=self.padding, stride=self.stride)

    def holds(self, n_examples: int) -> bool:
        """Whether there are at least as many channels as patches in `n_examples` maps."""
        return self.places * n_examples <= min(self.channels, self.patch_size - 1)


@dataclass(frozen=True)
class TokenLayer:
    """A linear layer that is applied to every token, such as those of a transformer: its tokens are its patches.

    Attributes:
        name: of the module.
        patch_size: entries of a token.
        places: tokens of one image.
    """

    name: str
    patch_size: int
    places: int

    def patches(self, inputs: Tensor) -> Tensor:
        """The tokens, `(n, patch_size, places)`, of inputs `(n, places, patch_size)`."""
        return inputs.transpose(1, 2)


def find_convolutions(observation: Observation) -> list[Convolution]:
    """Plain convolutions that are called once per forward pass, in order."""
    return [_described(name, module, *call) for name, module, call in _called_once(observation) if _is_plain(module)]


def called_until(observation: Observation, layers: Sequence[str]) -> list[str]:
    """Names of the plain convolutions that are called before the first of some and itself, in order."""
    names = [convolution.name for convolution in find_convolutions(observation)]
    return names[: min((names.index(name) for name in layers if name in names), default=-1) + 1]


def find_token_layers(observation: Observation) -> list[TokenLayer]:
    """Linear layers of tokens that are called once per forward pass, in order."""
    found = [(name, given.shape[1:]) for name, module, (given, _) in _called_once(observation) if _is_linear(module)]
    return [TokenLayer(name, shape[1], shape[0]) for name, shape in found if len(shape) == 2]


class PatchEmbedding(NamedTuple):
    """A first convolution whose patches do not overlap, and a parameter that is added to its outputs, the tokens.

    For one image the gradient of the added positions is the derivative of the loss in the tokens.

    Attributes:
        convolution: of the normalized image, with `P` places.
        positions: name of the parameter.
        first: row of its gradient, `(rows, channels)`, that belongs to the first place.
        last_axis: its channels are the last axis; otherwise they come before the places.
    """

    convolution: Convolution
    positions: str
    first: int
    last_axis: bool

    def derivatives(self, gradient: Tensor) -> Tensor:
        """Derivatives in the tokens, `(P, channels)`, from the gradient of the positions."""
        return self._rows(gradient)[self.first : self.first + self.convolution.places]

    def _rows(self, gradient: Tensor) -> Tensor:
        channels = self.convolution.channels
        return gradient.reshape(-1, channels) if self.last_axis else gradient.reshape(channels, -1).T


def find_patch_embedding(observation: Observation) -> PatchEmbedding | None:
    """The patch embedding of a vision transformer, found by the equality of gradients for a random image."""
    layers = find_convolutions(observation)
    if not layers or layers[0].kernel != layers[0].stride or layers[0].padding != (0, 0):
        return None
    layer, model = layers[0], pure_copy(observation.model, "eval")
    seen: list[tuple[Tensor, Tensor]] = []
    model.get_submodule(layer.name).register_forward_hook(lambda _, given, returned: seen.append((given[0], returned)))
    own = {name: value.detach().clone().requires_grad_() for name, value in observation.parameters.items()}
    image = torch.rand(1, *observation.image_shape, generator=torch.Generator().manual_seed(0)).to(observation.like)
    with torch.enable_grad():
        logits = torch.func.functional_call(model, {**own, **observation.buffers}, (image,))
        wanted, *gradients = torch.autograd.grad(
            logits.square().sum(), [seen[0][1], *own.values()], allow_unused=True, materialize_grads=True
        )
    mean, std = observation.normalization.tensors(image)
    of_image = seen[0][0].shape == image.shape and torch.allclose(seen[0][0], (image - mean) / std, atol=1e-5)
    if not of_image or not wanted.any():
        return None
    tokens = wanted.flatten(2)[0].T
    same = partial(torch.isclose, atol=float(1e-5 * tokens.abs().max()))
    for name, gradient in zip(own, gradients, strict=True):
        if gradient.numel() % layer.channels or name not in observation.update:
            continue
        for last_axis in (True, False):
            rows = PatchEmbedding(layer, name, 0, last_axis)._rows(gradient)
            # the first token alone leaves few places where all are compared
            for first in same(rows, tokens[0]).all(1).nonzero()[:, 0].tolist():
                own_rows = rows[first : first + layer.places]
                if own_rows.shape == tokens.shape and same(own_rows, tokens).all():
                    return PatchEmbedding(layer, name, first, last_axis)
    return None


def _called_once(observation: Observation) -> Iterator[tuple[str, nn.Module, tuple[Tensor, Tensor]]]:
    """Convolutions and linear layers with names, inputs and outputs for noise images, in the order of their calls."""
    model = pure_copy(observation.model, "eval")
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def listen(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            # copies, since later operations may be in place
            calls.setdefault(name, []).append((given[0].clone(), returned.clone()))

        module.register_forward_hook(note)

    own = layers_with_weights(model).items()
    layers = {name: module for name, module in own if _is_plain(module) or _is_linear(module)}
    for name, module in layers.items():
        listen(name, module)
    with torch.no_grad():
        torch.func.functional_call(model, {**observation.parameters, **observation.buffers}, (_probes(observation),))
    return ((name, layers[name], seen[0]) for name, seen in calls.items() if len(seen) == 1)


def _probes(observation: Observation) -> Tensor:
    images = torch.rand(_PROBES, *observation.image_shape, generator=torch.Generator().manual_seed(0))
    return images.to(next(iter(observation.parameters.values())))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _is_plain(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _described(name: str, module: nn.Module, inputs: Tensor, outputs: Tensor) -> Convolution:
    assert isinstance(module, nn.Conv2d)
    assert not isinstance(module.padding, str)
    c, h, w = inputs.shape[1:]
    return Convolution(
        name=name,
        shape=(c, h, w),
        channels=outputs.shape[1],
        kernel=(module.kernel_size[0], module.kernel_size[1]),
        stride=(module.stride[0], module.stride[1]),
        padding=(module.padding[0], module.padding[1]),
        places=outputs[0, 0].numel(),
        sparse=bool((inputs >= 0).all()) and bool((inputs == 0).double().mean() > 0.05),
    )


#: Threshold on the ratio of successive singular values that marks the rank.
GAP = 30.0


class PatchSpan(NamedTuple):
    """The row space of a convolution's weight gradient.

    Attributes:
        basis: `(patch_size, r)`, orthonormal.
        gap: last singular value inside over first outside; infinite if there is none outside.
        differences: the span is that of differences of patches, with one dimension less.
        known: `(patch_size,)` bool, entries of a patch on which the basis is known, zero on the others; None: on all.
    """

    basis: Tensor
    gap: float
    differences: bool
    known: Tensor | None = None


def patch_span(gradient: Tensor, n_patches: int) -> PatchSpan:
    """Row space of a convolution's weight gradient, with the rank of all patches or of their differences.

    Args:
        gradient: `(channels, ...)`, float64, with at least as many channels as patches. With just as many, and no gap
            before the last, noise cannot be distinguished from signal.
        n_patches: in the whole batch.
    """
    rows = gradient.flatten(1)
    # channels without gradient are left out: with many of them LAPACK may fail to converge
    used = (rows != 0).any(1)
    values, vectors = rows.new_zeros(len(rows)), rows.new_zeros(len(rows), len(rows))
    if used.any():
        found = torch.linalg.eigh(rows[used] @ rows[used].T)
        values[-len(found[0]) :] = found[0]
        vectors[used, -len(found[0]) :] = found[1]
    least = (torch.finfo(values.dtype).eps * values[-1]).clamp_min(torch.finfo(values.dtype).tiny)
    singular = values.flip(0).clamp_min(least).sqrt()
    falls = torch.cat([singular[:-1] / singular[1:], singular.new_tensor([float("inf")])])
    differences = n_patches > 1 and bool(falls[n_patches - 2] > GAP)
    rank = n_patches - 1 if differences else n_patches
    basis, _ = torch.linalg.qr(rows.T @ vectors.flip(1)[:, :rank])
    return PatchSpan(basis, float(falls[rank - 1]), differences)


class PatchProjection:
    """Projection of all patches of a map into a span, as a symmetric map of `(c h w,)` vectors with eigenvalues <= 1.

    Vectors are maps scaled by the square root of the number of patches that cover an entry. Eigenvalue 1: every patch
    lies in the span; the distance from 1 is the mean squared share of the patches outside.

    Where the span is known on some entries of a patch only, patches are compared on these. An entry of the map that no
    patch covers with a known entry does not enter, and is zero in all maps.

    Args:
        convolution: with these input maps; covers every entry.
        span: of the patches, or of their differences; then the projection keeps the patches' mean.

    Attributes:
        covered: `(c, h, w)` bool, entries of a map that enter.
    """

    def __init__(self, convolution: Convolution, span: PatchSpan) -> None:
        self.convolution, self.basis, self.differences = convolution, span.basis, span.differences
        known = span.basis.new_ones(convolution.patch_size) if span.known is None else span.known.to(span.basis)
        self._known = None if span.known is None else known[:, None]
        counts = self.convolution.fold(known[:, None].expand(-1, convolution.places)[None])
        self.covered = counts[0] > 0
        self._scale = torch.where(counts > 0, counts.clamp_min(1).rsqrt(), 0.0)

    def __call__(self, vectors: Tensor) -> Tensor:
        """The projected vectors, `(v, c h w)`."""
        patches = self.convolution.patches(self.maps(vectors))
        if self._known is not None:
            patches = patches * self._known
        mean = patches.mean(2, keepdim=True) if self.differences else patches.new_zeros(())
        inside = self.basis @ (self.basis.T @ (patches - mean)) + mean
        return (self.convolution.fold(inside) * self._scale).flatten(1)

    def maps(self, vectors: Tensor) -> Tensor:
        """Maps `(v, c, h, w)` of vectors `(v, c h w)`."""
        return vectors.view(-1, *self.convolution.shape) * self._scale

    def dense(self) -> Tensor:
        """Factor F `(P r, c h w)` of the projection `F^T F` on a span of patches."""
        places, (size, r) = self.convolution.places, self.basis.shape
        rows = []
        for place in range(places):
            patches = self.basis.new_zeros(r, size, places)
            patches[:, :, place] = self.basis.T
            rows.append((self.convolution.fold(patches) * self._scale).flatten(1))
        return torch.cat(rows)


def without_constants(convolution: Convolution, span: PatchSpan) -> PatchSpan:
    """A span of differences that is unknown on channels whose known entries are the same in all patches of a constant.

    Differences of patches do not show such a constant: where the padding reaches no known entry, any would be a map.
    """
    if not span.differences or span.known is None:
        return span
    ones = span.basis.new_ones(1, *convolution.shape)
    patches = convolution.patches(ones)[0]
    varies = (patches != patches[:, :1]).any(1) & span.known
    shown = varies.view(convolution.shape[0], -1).any(1).repeat_interleave(len(varies) // convolution.shape[0])
    known = span.known & shown
    basis = torch.linalg.qr(span.basis * known[:, None])[0]
    return span._replace(basis=basis * known[:, None], known=known)


def _reached(convolution: Convolution) -> Tensor:
    """Which entries `(h, w)` of a map are under the kernel somewhere, bool; the same in every channel."""
    return convolution.fold(convolution.patches(torch.ones(1, *convolution.shape)))[0, 0] > 0


def covers_everything(convolution: Convolution) -> bool:
    """Whether the kernel reaches every entry of a map."""
    return bool(_reached(convolution).all())


def unseen_pixels(observation: Observation) -> str:
    """How many pixels of an image no plain convolution of images reaches; empty if none, or if none takes images."""
    inputs = _probes(observation)
    mean, std = observation.normalization.tensors(inputs)
    inputs, reached = (inputs - mean) / std, []
    for name, module, (given, returned) in _called_once(observation):
        if _is_plain(module) and given.shape == inputs.shape and torch.allclose(given, inputs, atol=1e-4):
            reached.append(_reached(_described(name, module, given, returned)))
    left = inputs.shape[1] * int((~torch.stack(reached).any(0)).sum()) if reached else 0
    return f"no layer sees {left} of its {inputs[0].numel()} pixels" if left else ""


def patch_system(layer: Convolution, derivative: Tensor) -> Tensor:
    """Matrix `(channels kernel, n h w)` from one channel of the inputs to its part of the weight gradient.

    Args:
        layer: the convolution.
        derivative: of the loss in its output, `(n, channels, rows, columns)`.
    """
    n, channels = derivative.shape[:2]
    h, w = layer.shape[1:]
    entries = torch.arange(1, h * w + 1, dtype=torch.float64).view(1, 1, h, w)
    index = layer.patches(entries)[0].long()
    system = derivative.new_zeros(channels, len(index), n, h * w + 1)  # entry 0: the padding
    values = derivative.flatten(2).transpose(0, 1)[:, None].expand(-1, len(index), -1, -1)
    system.scatter_(3, index[None, :, None].expand(channels, -1, n, -1), values)
    return system[..., 1:].reshape(channels * len(index), n * h * w)


def hidden_entries(gradient: Tensor) -> Tensor:
    """Zeros of a matrix, bool, outside of rows and columns that vanish altogether.

    A whole row or column vanishes where a ReLU is never active; single entries vanish by pruning or dropping.
    """
    zero = gradient == 0
    return zero & ~zero.all(1, keepdim=True) & ~zero.all(0)


def defense_hides(observation: Observation, name: str) -> bool:
    """Whether the defense is known and hides entries of this tensor of the update."""
    if observation.defense is None:
        return False
    seen = observation.update[name]
    return not bool(observation.defense.simulate({name: torch.ones_like(seen)}, {name: seen})[name].all())
