"""Defenses of the batch: mixtures of images, and dropout in the network."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_recon.defenses.base import Buffers, Defense, checked
from lit_recon.defenses.vectors import uniform_like
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Batch, BatchNormMode, Update


class MixUp(Defense):
    """Replaces every image and its label by a mixture with another example of the batch.

    `l x_i + (1 - l) x_p(i)`, and the same for the labels as probabilities, with one weight `l` from Beta(alpha, alpha)
    and one permutation `p` per batch: one `randint` as seed of NumPy's Beta, then one `randperm`. The attacker
    reconstructs the mixtures. Privacy accounting of a `DPSGD` after it does not cover that an image is in two of them.

    Args:
        alpha: concentration; 1 gives uniform weights, larger values weights near one half, 0 changes nothing.

    Source: [Zhang2018], eq. 1 and its reference code.
    """

    neutral = (("alpha", 0.0),)

    def __init__(self, alpha: float = 0.0) -> None:
        self.alpha = checked(self, "alpha", alpha)

    def transform_batch(self, batch: Batch, model: nn.Module, generator: torch.Generator) -> Batch:
        if self.alpha == 0:
            return batch
        device = generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        weight = float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
        partner = torch.randperm(len(batch.images), generator=generator, device=device).to(batch.images.device)

        def mixed(values: Tensor) -> Tensor:
            return weight * values + (1 - weight) * values[partner]

        labels = batch.labels
        if labels.dim() == 1:
            n_classes = model.n_classes
            if not isinstance(n_classes, int):
                name = type(model).__name__
                raise UnsupportedModelError(f"MixUp needs the number of classes of {name}: wrap it in a Client")
            labels = nn.functional.one_hot(labels, n_classes).to(batch.images.dtype)
        return batch._replace(images=mixed(batch.images), labels=mixed(labels))


_MASK = "dropout_mask"
#: Chance of no zero column below which chance does not explain it; above, the expectations hardly differ from 1.
_BY_CHANCE = 0.01


class NetworkDropout(Defense):
    """Sets inputs of linear layers to zero with probability `rate`, independently per example, in the forward pass.

    The other inputs are divided by `1 - rate`, as in `torch.nn.Dropout`. The masks are drawn once per release, one
    `rand` of `(n, features)` per layer, and are the same for every gradient of the batch and, in a layer of tokens
    `(n, ..., features)`, for all tokens of an example. A rate of 0 changes nothing.

    `prepare` adds a mask buffer to the layers, all ones for evaluation and for attackers who do not know the defense.
    One who does takes the mask from the layer's gradient: a zero column belongs to an input that no example used. For
    one example that is the whole mask; for `n` the other inputs are set to their expectation, `1 / (1 - rate^n)`.
    Without the layer's gradient all are set to theirs, 1; so they are where no column is zero though nearly every
    release has one, because noise of another defense hides the mask.

    Args:
        rate: probability that an input is dropped, in [0, 0.999].
        layers: names of linear layers, at least one.

    Source: [Srivastava2014]; as a defense, [Zhu2019] and [Huang2021].
    """

    neutral = (("rate", 0.0),)

    def __init__(self, rate: float = 0.0, layers: Sequence[str] = ("head",)) -> None:
        self.rate = checked(self, "rate", rate, high=0.999)
        self.layers = list(layers)
        if not self.layers:
            raise ConfigError("NetworkDropout needs at least one layer, for example layers: [head]")

    @property
    def drops_inputs(self) -> bool:
        """Unless the rate is 0."""
        return self.rate > 0

    def prepare(self, model: nn.Module, batch_norm: BatchNormMode = "eval") -> nn.Module:
        """A copy of the model with a mask before every layer."""
        from lit_recon.models.layers import layers_with_weights  # commands without this defense do not load it

        prepared = copy.deepcopy(model)
        linear = {name: own for name, own in layers_with_weights(prepared).items() if isinstance(own, nn.Linear)}
        for name in self.layers:
            layer = linear.get(name)
            if layer is None:
                raise UnsupportedModelError(
                    f"NetworkDropout needs a linear layer {name!r} with a weight of its own, neither parametrized nor "
                    f"tied to another; the model has {[*linear]}: name some of these in layers"
                )
            if hasattr(layer, _MASK):
                raise ConfigError(f"NetworkDropout: layer {name!r} already has dropout: list each layer once")
            layer.register_buffer(_MASK, layer.weight.new_ones(1, layer.in_features), persistent=False)
            layer.register_forward_pre_hook(_masked)
        return prepared

    def transform_batch(self, batch: Batch, model: nn.Module, generator: torch.Generator) -> Batch:
        if self.rate == 0:
            return batch
        masks = dict(batch.masks)
        for name in self.layers:
            ones = model.get_buffer(f"{name}.{_MASK}").expand(len(batch.images), -1)
            kept = uniform_like(ones, generator) >= self.rate
            masks[f"{name}.{_MASK}"] = kept.to(ones.dtype) / (1 - self.rate)
        return batch._replace(masks=masks)

    def simulate_buffers(self, buffers: Buffers, observed: Update, n_examples: int) -> Buffers:
        if self.rate == 0:
            return buffers
        expectation, masks = 1 / (1 - self.rate**n_examples), {}
        for name in self.layers:
            gradient = observed[f"{name}.weight"]
            used = (gradient != 0).any(dim=0, keepdim=True)
            # a gradient that was not released tells of no input, nor does one without the zeros that dropout leaves
            zeros_hidden = (1 - self.rate**n_examples) ** used.shape[1] < _BY_CHANCE
            told = used.any() & ~used.all() if zeros_hidden else used.any()
            masks[f"{name}.{_MASK}"] = torch.where(told, used.to(gradient.dtype) * expectation, 1.0)
        return {**buffers, **masks}

    def require_shares(self) -> None:
        return  # the examples of all clients have independent masks: the same as in one large batch


def _masked(layer: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    values: Tensor = inputs[0]
    mask = layer.get_buffer(_MASK)
    if mask.shape[0] not in (1, values.shape[0]):
        raise UnsupportedModelError(
            f"NetworkDropout needs a linear layer with inputs (n, ..., {mask.shape[1]}) of the {mask.shape[0]} "
            f"examples; got {tuple(values.shape)}: name another layer in layers"
        )
    # any axes between are the tokens of an example
    return values * mask.view(mask.shape[0], *[1] * (values.dim() - 2), mask.shape[1])
