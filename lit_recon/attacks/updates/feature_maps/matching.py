"""Matching of exactly recovered feature maps by candidate images."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.recovery import MapRecovery, RecoveredMaps
from lit_recon.attacks.updates.labels.head import find_head, require_cross_entropy
from lit_recon.clients.gradient import pure_copy
from lit_recon.errors import ConfigError
from lit_recon.records import BatchNormMode, Observation


def arranged_labels(observation: Observation, images: Tensor, labels: Tensor) -> Tensor:
    """The labels `(n,)` in the order of reconstructed images `(n, c, h, w)`.

    The gradient of the head's weights is the mean over examples of (p_i - y_i) h_i^T. Head inputs h_i and probabilities
    p_i follow from the images, so the indicators y_i of the labels solve a linear system; an assignment makes the
    solution robust to inexact images.

    Args:
        observation: of the victim; one gradient.
        images: in [0, 1].
        labels: of the batch, in any order.
    """
    from scipy.optimize import linear_sum_assignment

    if len(labels) == 1:
        return labels
    weight, _ = find_head(observation, "MapMatching")
    model = pure_copy(observation.model, observation.operator.batch_norm)
    seen: list[Tensor] = []
    model.get_submodule(weight.rpartition(".")[0]).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        logits = torch.func.functional_call(model, {**observation.parameters, **observation.buffers}, (images,))
    inputs, probabilities = seen[0].double().cpu(), nn.functional.softmax(logits.double().cpu(), dim=1)
    gradient = observation.update[weight].double().cpu()
    # p_i - y_i for every example, from n G = sum_i (p_i - y_i) h_i^T
    residuals = torch.linalg.lstsq(inputs.T, len(labels) * gradient.T, driver="gelsd").solution
    indicators = probabilities - residuals
    rows, columns = linear_sum_assignment(-indicators[:, labels.cpu()].numpy())
    order = torch.empty(len(labels), dtype=torch.int64)
    order[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return labels[order.to(labels.device)]


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

    def __call__(self, images: Tensor) -> Tensor:
        """Maps of images `(n, c, h, w)` in [0, 1]; differentiable."""
        maps: Tensor = torch.func.functional_call(self._module, self._public, (images,))
        return nn.functional.normalize(maps.flatten(1), dim=1)


@dataclass(frozen=True)
class FeatureMapPenalty:
    """The penalty of one victim's candidates, with the interface of `features.matching.FeaturePenalty`."""

    observation: Observation
    recovered: RecoveredMaps
    input_map: InputMap
    weight: float

    #: The penalty starts with the first iteration.
    start: float = 0.0
    #: Maps of an inner layer are not scored as features.
    features: Tensor | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The maps found, and their certificate."""
        found = self.recovered
        where = f"{len(found.maps)} maps recovered from the gradient of {found.convolution.name}"
        return (f"{where}: {found.outside:.1g} of their patches outside its row space, next {found.next_outside:.1g}",)

    @property
    def choice(self) -> tuple[str, ...]:
        """Empty: restarts do not differ."""
        return ()

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """The recovered maps, in any order."""
        return self.recovered.maps.flatten(1).to(images)

    def condition(self, labels: Tensor) -> Tensor:
        """Unsupported: maps are too large to condition a network on.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a network can be conditioned on features but not on maps: set conditioned to false")

    def penalty(self, images: Tensor, targets: Tensor) -> Tensor:
        """Weighted mean over examples of 1 - cos of their maps, a scalar, differentiable in the images."""
        # half the squared distance of unit vectors equals 1 - cos without cancellation
        return self.weight * 0.5 * (self.input_map(images) - targets).square().sum(dim=1).mean()

    def for_restart(self, number: int) -> FeatureMapPenalty:
        """The same for every restart."""
        return self

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """The batch's labels `(n,)` in the order of the reconstructed images."""
        return arranged_labels(self.observation, images, labels)


class MapMatching:
    """Recovers the input maps of a convolution once per victim and penalizes images with other maps.

    The maps are exact, see `MapRecovery`, and have more entries than there are pixels, so nothing else needs to
    be matched: an iteration is one forward and one backward pass through the layers before the convolution.

    Args:
        recovery: of the maps.
        weight: of the mean over examples of 1 - cos.

    Raises:
        ConfigError: a weight that is not positive.
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
        recovered = self.recovery(observation)
        seen = InputMap(observation, recovered.convolution.name, observation.operator.batch_norm)
        return FeatureMapPenalty(observation, recovered, seen, self.weight)


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
