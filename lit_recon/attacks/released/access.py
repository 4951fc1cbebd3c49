"""The adversary's access to a released model: all weights, the weights of some layers, or its outputs alone.

Every access is a function of the weights, so that one store of shadow models serves all.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.attacks.shadow.training import unflatten
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, ShapeError

#: From differences of weights `(s, p)`, with snapshots `(s, t * p)`, to the features that are seen, `(s, f)`.
FeatureExtractor = Callable[[Tensor], Tensor]


class AccessDescription(NamedTuple):
    """The parts of a released model that are shown and hidden, in words."""

    shown: str
    hidden: str = ""


class ModelAccess(ABC):
    """The part of every released model that an adversary sees, and computes of each of the shadow models."""

    #: Whether all weights are seen, which a reconstructor that repeats the training needs.
    whole = False

    @abstractmethod
    def describe(self, network: nn.Module, public: ImageSet) -> AccessDescription:
        """In words, for an adversary who holds the `public` images; ConfigError if these or the network do not fit."""

    @abstractmethod
    def feature_map(self, plan: ShadowPlan, public: ImageSet) -> FeatureExtractor:
        """The map from models of a plan to features, of all snapshots concatenated; raises as `describe`."""


@dataclass(frozen=True)
class WholeModel(ModelAccess):
    """All weights, as in the paper's main experiments."""

    whole = True

    def describe(self, network: nn.Module, public: ImageSet) -> AccessDescription:
        return AccessDescription("its weights")

    def feature_map(self, plan: ShadowPlan, public: ImageSet) -> FeatureExtractor:
        return lambda differences: differences


@dataclass(frozen=True)
class LayersOnly(ModelAccess):
    """The weights of some layers.

    Args:
        layers: `first` or `last` of those with weights, or names of modules or parameters, such as `layers.3`.

    Source: Balle, Cherubin and Hayes 2022, section VI-B, Layers: the last of the MLP, the convolutions of the CNN.
    """

    layers: Sequence[str] = ("last",)

    def describe(self, network: nn.Module, public: ImageSet) -> AccessDescription:
        seen = self._chosen(network)
        shown = f"the weights of {' and '.join(self._names(network))}, {int(seen.sum())} of {len(seen)}"
        return AccessDescription(shown, "" if seen.all() else "The weights of its other layers.")

    def feature_map(self, plan: ShadowPlan, public: ImageSet) -> FeatureExtractor:
        chosen = self._chosen(plan.network)

        return lambda differences: differences.unflatten(1, (-1, len(chosen)))[:, :, chosen].flatten(1)

    def _names(self, network: nn.Module) -> list[str]:
        """The layers without repetitions, `first` and `last` by their names."""
        layers = [name for name, module in network.named_modules() if list(module.parameters(recurse=False))]
        known = {"first": layers[0], "last": layers[-1]}
        return list(dict.fromkeys(known.get(name, name) for name in self.layers))

    def _chosen(self, network: nn.Module) -> Tensor:
        """Mask of the flat weights that are seen, bool `(p,)`."""
        wanted, parts = self._names(network), []
        unmet = set(wanted)
        for name, parameter in network.named_parameters():
            within = {layer for layer in wanted if f"{name}.".startswith(f"{layer}.")}
            unmet -= within
            parts.append(torch.full((parameter.numel(),), bool(within)))
        if not wanted or unmet:
            there = ", ".join(name for name, _ in network.named_parameters())
            raise ConfigError(
                f"access.layers must name first, last, or layers with weights among {there}; got "
                f"{sorted(unmet) or 'none'}"
            )
        return torch.cat(parts)


@dataclass(frozen=True)
class BlackBox(ModelAccess):
    """The model's outputs on the first shadow targets, minus those of the reference: what the unknown image changed.

    Args:
        output: the model's `logits`, or the `probabilities` that follow from them.
        images: number of query images; [Balle2022], section VI-C, takes 200 for MNIST and 500 for CIFAR-10.
    """

    output: Literal["logits", "probabilities"] = "logits"
    images: int = 200

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ConfigError(f"access.images must be at least 1; got {self.images}")

    def describe(self, network: nn.Module, public: ImageSet) -> AccessDescription:
        if self.images > len(public):
            raise ConfigError(
                f"access.images come from the shadow targets: at most split.shadow={len(public)}; got {self.images}"
            )
        return AccessDescription(f"its {self.output} for {self.images} images", "Its weights.")

    def feature_map(self, plan: ShadowPlan, public: ImageSet) -> FeatureExtractor:
        self.describe(plan.network, public)
        network = copy.deepcopy(plan.network).to(plan.device, torch.float64)
        queries = public.subset(torch.arange(self.images)).pixels().to(plan.device, torch.float64)
        reference = plan.reference()
        size = sum(parameter.numel() for parameter in network.parameters())

        @torch.no_grad()
        def outputs(weights: Tensor) -> Tensor:
            snapshots = weights.to(plan.device).unflatten(0, (-1, size))
            logits = torch.stack([functional_call(network, unflatten(network, own), (queries,)) for own in snapshots])
            return (logits if self.output == "logits" else logits.softmax(dim=2)).flatten()

        usual = outputs(reference)

        def extract(differences: Tensor) -> Tensor:
            if differences.shape[1:] != reference.shape:
                raise ShapeError(f"models must have {len(reference)} weights; got {tuple(differences.shape)}")
            # In double precision: outputs change by a thousandth of their size.
            return torch.stack([outputs(reference + own.double()) - usual for own in differences]).float().cpu()

        return extract
