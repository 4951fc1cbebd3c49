"""Dropout inside the network."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.defenses.base import Batch, BatchNormMode, Defense, Stage
from lit_recon.defenses.strength import checked
from lit_recon.defenses.vectors import uniform_like
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.records import Update

_MASK = "dropout_mask"


class NetworkDropout(Defense):
    """Sets inputs of linear layers to zero with probability `rate`, independently per example, in the forward pass.

    Inputs that stay are divided by `1 - rate`, as in `torch.nn.Dropout`. The masks are drawn once per release, one
    `rand` of `(n, features)` per layer, and are the same for every gradient taken of the batch. A rate of 0 is the
    identity.

    `prepare` gives the layers a buffer, by default all ones: the network without dropout, which is evaluated, and which
    an attacker simulates who does not know the defense. One who knows it reads the mask off the layer's gradient: a
    column that is zero belongs to an input that no example used. For one example that is the whole mask; for `n` he
    sets the other inputs to their expectation, `1 / (1 - rate^n)`.

    Args:
        rate: probability that an input is dropped, in [0, 0.999].
        layers: names of linear layers.

    Raises:
        ConfigError: a rate outside its range, or no layer.

    Source: [Srivastava2014]; as a defense, [Zhu2019] and [Huang2021].
    """

    stages = (Stage.BATCH,)

    def __init__(self, rate: float = 0.0, layers: Sequence[str] = ("head",)) -> None:
        self.rate = checked(self, "rate", rate, high=0.999)
        self.layers = list(layers)
        if not self.layers:
            raise ConfigError("NetworkDropout needs at least one layer, for example layers: [head]")

    def prepare(self, model: Backbone, batch_norm: BatchNormMode = "eval") -> Backbone:
        """A copy of the model with a mask before every layer.

        Raises:
            UnsupportedModelError: no linear layer of that name.
            ConfigError: the layer has dropout already.
        """
        prepared = copy.deepcopy(model)
        modules = dict(prepared.named_modules())
        for name in self.layers:
            layer = modules.get(name)
            if not isinstance(layer, nn.Linear):
                linear = [other for other, module in modules.items() if isinstance(module, nn.Linear)]
                raise UnsupportedModelError(f"NetworkDropout needs a linear layer {name!r}; the model has {linear}")
            if hasattr(layer, _MASK):
                raise ConfigError(f"layer {name!r} has dropout already: name it once, with one rate")
            layer.register_buffer(_MASK, layer.weight.new_ones(1, layer.in_features), persistent=False)
            layer.register_forward_pre_hook(_masked)
        return prepared

    def transform_batch(self, batch: Batch, model: Backbone, generator: torch.Generator) -> Batch:
        if self.rate == 0:
            return batch
        masks = dict(batch.masks)
        for name in self.layers:
            ones = model.get_buffer(f"{name}.{_MASK}").expand(len(batch.images), -1)
            kept = uniform_like(ones, generator) >= self.rate
            masks[f"{name}.{_MASK}"] = kept.to(ones.dtype) / (1 - self.rate)
        return batch._replace(masks=masks)

    def counterpart_buffers(
        self, buffers: Mapping[str, Tensor], observed: Update, n_examples: int
    ) -> Mapping[str, Tensor]:
        if self.rate == 0:
            return buffers
        expectation = 1 / (1 - self.rate**n_examples)
        used = {name: (observed[f"{name}.weight"] != 0).any(dim=0, keepdim=True) for name in self.layers}
        masks = {
            f"{name}.{_MASK}": seen.to(observed[f"{name}.weight"].dtype) * expectation for name, seen in used.items()
        }
        return {**buffers, **masks}


def _masked(layer: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    masked: Tensor = inputs[0] * layer.get_buffer(_MASK)
    return masked
