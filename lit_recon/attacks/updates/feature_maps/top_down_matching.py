"""Matching of maps that are found from the last layer to the first, from few observed entries of an update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.gradient_matching.matching import update_distance
from lit_recon.attacks.updates.gradient_matching.priors import Penalty
from lit_recon.attacks.updates.labels.head import labels_of
from lit_recon.attacks.updates.noise import noise_of
from lit_recon.clients import LocalSteps
from lit_recon.clients.gradient import pure_copy
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Observation

if TYPE_CHECKING:
    from lit_recon.attacks.updates.feature_maps.partial_gradient import MapEstimate
    from lit_recon.attacks.updates.feature_maps.relu_network import ReluNetwork
    from lit_recon.attacks.updates.feature_maps.top_down import TopDown

#: What priors count for at the end, relative to the first iteration.
_PRIORS = 1e-6
#: Floor of the standard deviations of maps, in root mean squares.
_FLOOR = 3e-3
#: Observed entries of the solved layers for every pixel; with fewer the features tell most, which a strong prior uses.
_ENTRIES = 2.0


@dataclass(frozen=True)
class TopDownPenalty(Penalty):
    """The penalty of one victim's candidates.

    Attributes:
        observation: of the victim.
        network: the public model, with the features of the image, but for their length.
        direction: of the features, `(d,)` of unit norm.
        weight: of the mean over maps of their squared relative distance.
        begins: share of the iterations after which maps are found around the candidates.
        notes: what was found.
        label: of the image, `(1,)`; None: it is not known yet.
        search: finds the maps; None as the label.
        maps: estimates of the outputs of ReLUs by number.
    """

    observation: Observation
    network: ReluNetwork
    direction: Tensor
    weight: float
    begins: float
    notes: tuple[str, ...]
    label: Tensor | None = None
    search: TopDown | None = None
    maps: Mapping[int, MapEstimate] | None = None

    @property
    def partial(self) -> bool:
        return True

    def with_labels(self, labels: Tensor) -> TopDownPenalty:
        """The penalty on the maps that are found with the label `(1,)` from the last layer to the first.

        Raises:
            UnsupportedModelError: the gradient does not tell the length of the features.
        """
        from lit_recon.attacks.updates.feature_maps.top_down import TopDown

        center = self.observation.model.get_buffer("feature_layer.center").detach().cpu().double()
        self.network.features = center + self.direction
        if self.observation.labels is None:  # the features tell more than what is left of the head's gradient alone
            labels = self._label(center + self.direction).to(labels)
        search = TopDown(self.observation, self.network, labels)
        if search.observed < _ENTRIES * math.prod(self.observation.image_shape):
            raise UnsupportedModelError(
                f"too few entries of the gradients are left: {search.observed} of convolutions between ReLUs for "
                f"{math.prod(self.observation.image_shape)} pixels"
            )
        length = search.length(center, self.direction)
        if length is None:
            raise UnsupportedModelError(
                "the length of the features is not known: too few gradients of the last bias are left, or the features "
                "are no averages of a map"
            )
        self.network.features = center + length * self.direction
        found = search.descend()
        misfits = ", ".join(f"{search.name(number)} {misfit:.2g}" for number, misfit in found.misfits.items())
        note = f"{len(found.maps)} maps found from the last layer to the first; relative misfits: {misfits}"
        return replace(self, label=labels, search=search, maps=found.maps, notes=(*self.notes, note))

    def prior_share(self, progress: float) -> float:
        return float(_PRIORS**progress)

    def renews(self, progress: float, fell: float) -> bool:
        return progress >= self.begins

    def renewed(self, images: Tensor) -> TopDownPenalty:
        """The penalty on the maps around those of these images."""
        assert self.search is not None
        return replace(self, maps=self.search.around(images).maps)

    def penalty(self, images: Tensor, targets: Tensor, progress: float) -> Tensor:
        if self.maps is None:
            return images.new_zeros(())
        self.network(images.cpu().float())
        wanted, read = self.network.features, self.network.read
        assert wanted is not None
        assert read is not None
        loss = (read[0] - wanted.float()).square().sum() / wanted.float().square().sum()
        for number, (values, variances) in self.maps.items():
            squares = values.square().mean()
            weights = 1 / (1 + variances / (_FLOOR**2 * squares))
            distance = self.network.relus[number][0] - values.float()
            weights = (weights / (weights.mean() * squares)).float()
            loss = loss + (weights * distance.square()).mean()
        return (self.weight * loss).to(images)

    def _label(self, features: Tensor) -> Tensor:
        """The label `(1,)` that the observed entries of the head's gradient tell with the features."""
        seen, start = self.observation, "feature_layer."
        public = {**seen.parameters, **seen.buffers}
        names = [name for name in public if name.startswith(start)]
        own = {name.removeprefix(start): public[name].detach().cpu().double() for name in names}
        layer = pure_copy(seen.model, "eval").get_submodule("feature_layer")
        neurons: Tensor = torch.func.functional_call(layer, own, (features[None],))
        return labels_of(neurons, seen.update["head.weight"].detach().cpu().double())

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        return labels if self.label is None else self.label.to(labels)

    def certificate(self, images: Tensor, labels: Tensor) -> tuple[Tensor | None, bool, tuple[str, ...]]:
        """Nothing is certified; a note says how far the update of the images is from the observed one."""
        distance = update_distance(self.observation, images, labels, observed_only=True)
        return None, False, (f"1 - cos between the update of the images and the observed entries: {distance:.1g}",)


class TopDownMatching:
    """Finds maps of single images from the last layer to the first, and matches them.

    For ReLU networks with a wide feature layer behind an average of the last map, where so few entries of the update
    are observed that no gradient of a convolution can be completed by its rank. First, maps are found block by block,
    see `TopDown`, and candidates matched to them; later on, they are found anew around the candidates at the beginning
    of every iteration.

    Args:
        weight: above 0, of the sum over maps of their mean squared distance, relative to their mean square.
        begins: in (0, 1), share of the iterations after which maps are found around the candidates.
    """

    def __init__(self, weight: float = 1.0, begins: float = 0.25) -> None:
        if not weight > 0 or not 0 < begins < 1:
            raise ConfigError(
                f"TopDownMatching needs a weight above 0 and begins in (0, 1); got {weight:g} and {begins:g}"
            )
        self.weight, self.begins = weight, begins

    def prepare(self, observation: Observation) -> TopDownPenalty:
        """Recover the features.

        Raises:
            UnsupportedModelError: several images or gradients; norms with statistics of the batch; noise; no wide
                feature layer, or its features are not found exactly; no convolution between ReLUs.
            ThreatModelError: see `layer_gradient`.
        """
        from lit_recon.attacks.updates.feature_maps.relu_network import ReluNetwork

        if observation.n_examples > 1 or isinstance(observation.operator, LocalSteps):
            raise UnsupportedModelError(
                f"TopDownMatching takes the gradient of one image; got {observation.n_examples} images and "
                f"{type(observation.operator).__name__}"
            )
        if observation.operator.batch_norm != "eval":
            raise UnsupportedModelError("TopDownMatching needs BatchNorm with the model's statistics")
        noise, given = noise_of(observation, exact=False)
        if given and noise is not None:
            raise UnsupportedModelError(f"TopDownMatching takes updates without noise; got one of {noise.std:.3g}")
        found = ExactRecovery()(observation)
        if not found.exact or not found.signed:
            raise UnsupportedModelError(
                f"TopDownMatching needs exact features; the certificate of those found is {found.certificate:.1g}"
            )
        network = ReluNetwork(observation, "feature_layer")
        notes = (f"features recovered exactly, certificate {found.certificate:.1g}", *found.notes)
        return TopDownPenalty(observation, network, found.features[0].cpu().double(), self.weight, self.begins, notes)
