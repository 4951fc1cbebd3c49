"""Matching of exactly recovered feature maps by candidate images."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.recovery import (
    MapRecovery,
    RecoveredMaps,
    recover_maps,
    unfit,
)
from lit_recon.attacks.updates.feature_maps.upstream import KnownMaps, PinnedNetwork, follow_upstream
from lit_recon.attacks.updates.labels.head import find_head, linear_calls, order_labels, require_cross_entropy
from lit_recon.clients.gradient import pure_copy
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import BatchNormMode, Observation

#: Largest 1 - cos between the maps of an image and the recovered maps for the image to be certified.
ANGLE = 1e-5


def arranged_labels(observation: Observation, images: Tensor, labels: Tensor) -> Tensor:
    """The labels `(n,)`, given in any order, in the order of reconstructed images `(n, c, h, w)` in [0, 1]."""
    if len(labels) == 1:
        return labels
    weight, _ = find_head(observation, "MapMatching")
    logits, calls = linear_calls(observation, images, observation.operator.batch_norm)
    inputs, probabilities = calls[weight.rpartition(".")[0]][-1][0].double().cpu(), logits.double().cpu().softmax(dim=1)
    return order_labels(inputs, probabilities, observation.update[weight].double().cpu(), labels)


class InputMap:
    """Input maps `(n, c h w)` of a convolution for candidate images, of unit norm; later layers are not run.

    Args:
        observation: of the public model; its parameters and buffers are read.
        layer: name of the convolution.
        batch_norm: mode of BatchNorm layers, as in the client.
    """

    def __init__(self, observation: Observation, layer: str, batch_norm: BatchNormMode) -> None:
        self._module = _UpTo(pure_copy(observation.model, batch_norm), layer)
        public = {**observation.parameters, **observation.buffers}
        self._public = {f"model.{name}": value for name, value in public.items()}

    def __call__(self, images: Tensor, norms: Tensor | None = None) -> Tensor:
        """Maps of images `(n, c, h, w)` in [0, 1], divided by `norms (n, 1)` or by their own; differentiable."""
        maps: Tensor = torch.func.functional_call(self._module, self._public, (images,)).flatten(1)
        return nn.functional.normalize(maps, dim=1) if norms is None else maps / norms


@dataclass(frozen=True)
class FeatureMapPenalty:
    """The penalty of one victim's candidates, with the interface of `features.matching.FeaturePenalty`.

    Attributes:
        observation: of the victim.
        recovered: the maps found first.
        maps: of the layer, `(n, c h w)` of unit norm.
        norms: of the maps, `(n, 1)`, where they are known.
        input_map: the same layer's maps of candidates.
        weight: of the mean over examples of 1 - cos.
        notes: the maps found, and their certificate.
        found_labels: labels in the order of the maps, where they are known.
    """

    observation: Observation
    recovered: RecoveredMaps
    maps: Tensor
    norms: Tensor | None
    input_map: InputMap
    weight: float
    notes: tuple[str, ...]
    found_labels: Tensor | None = None

    #: The penalty starts with the first iteration.
    start: float = 0.0
    #: Maps of an inner layer are not scored as features.
    features: Tensor | None = None

    def with_labels(self, labels: Tensor) -> FeatureMapPenalty:
        """The penalty on the maps nearest to the images that follow from these maps and the labels `(n,)`."""
        found = nearest_maps(self.observation, self.recovered, labels)
        if isinstance(found, str):
            return replace(self, notes=(*self.notes, f"maps of earlier layers: none; {found}"))
        *_, layer = found.maps
        maps = found.maps[layer].flatten(1)
        norms = maps.norm(dim=1, keepdim=True)
        where = f"maps followed layer by layer up to {layer}, expected relative error {found.errors[layer]:.1g}"
        return replace(
            self,
            maps=maps / norms,
            norms=norms,
            input_map=InputMap(self.observation, layer, self.observation.operator.batch_norm),
            notes=(*self.notes, f"{where}; {found.stopped}" if found.stopped else where),
            found_labels=found.labels,
        )

    def remarks(self, images: Tensor) -> tuple[str, ...]:
        """Per image, whether its own maps are the recovered ones."""
        with torch.no_grad():
            distances = 0.5 * (self.input_map(images).double() - self.maps.to(images).double()).square().sum(dim=1)
        return tuple(f"image {i}: {_verdict(angle)}" for i, angle in enumerate(distances.tolist(), start=1))

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """The recovered maps, in any order."""
        return self.maps.to(images)

    def condition(self, labels: Tensor) -> Tensor:
        """Unsupported, a ConfigError: maps are too large to condition a network on."""
        raise ConfigError("a network can be conditioned on features but not on maps: set conditioned to false")

    def penalty(self, images: Tensor, targets: Tensor) -> Tensor:
        """Weighted mean over examples of 1 - cos of their maps, a scalar, differentiable in the images."""
        # half the squared distance of unit vectors equals 1 - cos without cancellation
        norms = None if self.norms is None else self.norms.to(images)
        return self.weight * 0.5 * (self.input_map(images, norms) - targets).square().sum(dim=1).mean()

    def for_restart(self, number: int) -> FeatureMapPenalty:
        """The same for every restart."""
        return self

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """The batch's labels `(n,)` in the order of the reconstructed images."""
        if self.found_labels is not None:
            return self.found_labels.to(labels)
        return arranged_labels(self.observation, images, labels)


def _verdict(angle: float) -> str:
    if angle <= ANGLE:
        return f"certified, its maps are the recovered ones (1 - cos {angle:.1g})"
    return f"not certified: its maps are not the recovered ones (1 - cos {angle:.1g}, at most {ANGLE:g})"


def nearest_maps(observation: Observation, recovered: RecoveredMaps, labels: Tensor) -> KnownMaps | str:
    """Maps of the convolutions nearest to the images that the gradient determines, or why there are none.

    Convolutions before the recovered one were tried by the recovery.
    """
    try:
        network = PinnedNetwork(observation)
        names = list(network.convolutions)
        for name in names[names.index(recovered.convolution.name) :]:
            layer = network.convolutions[name]
            if unfit(layer, observation.n_examples) is not None or not network.decides(layer.name):
                continue
            found: RecoveredMaps | str = recovered
            if layer.name != recovered.convolution.name:
                gradient = observation.update[f"{layer.name}.weight"].detach().cpu().double()
                found = recover_maps(layer, gradient, observation.n_examples)
            if isinstance(found, RecoveredMaps):
                return follow_upstream(observation, network, found, labels)
    except UnsupportedModelError as error:  # no head
        return str(error)
    return "no convolution with recovered maps decides the logits"


class MapMatching:
    """Recovers the input maps of a convolution once per victim and penalizes images with other maps.

    The maps are exact, see `MapRecovery`, and have more entries than there are pixels, so nothing else needs to
    be matched: an iteration is one forward and one backward pass through the layers before the convolution. Where the
    whole network behind is known, maps are followed towards the images layer by layer first, see `upstream`.

    Args:
        recovery: of the maps.
        weight: above 0, of the mean over examples of 1 - cos.
    """

    def __init__(self, recovery: MapRecovery | None = None, weight: float = 1000.0) -> None:
        if not weight > 0:
            raise ConfigError(f"MapMatching needs a weight above 0; got {weight:g}")
        self.recovery = recovery if recovery is not None else MapRecovery()
        self.weight = weight

    def prepare(self, observation: Observation) -> FeatureMapPenalty:
        """Recover a victim's maps.

        Raises:
            UnsupportedModelError: see `MapRecovery`; or no linear head, needed to assign labels to images.
            ThreatModelError: several images and another loss than the cross-entropy.
        """
        if observation.n_examples > 1:
            require_cross_entropy(observation, "MapMatching of several images", "attack one image at a time")
            find_head(observation, "MapMatching of several images")
        found = self.recovery(observation)
        where = f"{len(found.maps)} maps recovered from the gradient of {found.convolution.name}"
        note = f"{where}: {found.outside:.1g} of their patches outside its row space, next {found.next_outside:.1g}"
        seen = InputMap(observation, found.convolution.name, observation.operator.batch_norm)
        return FeatureMapPenalty(observation, found, found.maps.flatten(1), None, seen, self.weight, (note,))


class _ReachedError(Exception):
    """Ends the forward pass at the layer."""


class _UpTo(nn.Module):
    """The part of a model before one of its layers."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        self.model = model
        self._input: Tensor | None = None
        model.get_submodule(layer).register_forward_pre_hook(self._stop)

    def forward(self, images: Tensor) -> Tensor:
        with contextlib.suppress(_ReachedError):
            self.model(images)
        reached, self._input = self._input, None
        assert reached is not None  # the recovery has found the layer in a forward pass
        return reached

    def _stop(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        self._input = given[0]
        raise _ReachedError
