"""Matching of exactly recovered feature maps by candidate images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_recon.attacks.updates.feature_maps.convolutions import defense_hides, unseen_pixels
from lit_recon.attacks.updates.feature_maps.input_map import (
    InputMap,
    concatenated,
    contrast_reach,
    coupled,
    known_statistics,
    likely_contrast,
    told_by_statistics,
)
from lit_recon.attacks.updates.feature_maps.recovery import MapRecovery, RecoveredMaps, assigned, each_once
from lit_recon.attacks.updates.gradient_matching.matching import regrouped, update_distance
from lit_recon.attacks.updates.gradient_matching.priors import Penalty
from lit_recon.attacks.updates.labels.head import (
    exact,
    find_head,
    labels_of,
    linear_calls,
    mean_gradient,
    order_labels,
    require_cross_entropy,
)
from lit_recon.attacks.updates.noise import noise_of
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Observation, Reconstruction

if TYPE_CHECKING:
    from lit_recon.attacks.updates.feature_maps.upstream import KnownMaps

#: Largest 1 - cos between the maps of an image and the recovered maps for the image to be certified.
ANGLE = 1e-5
#: Largest RMSE of an image, to first order, along the directions that norms hide, for it to be certified.
REACH = 0.02
#: Largest 1 - cos between the update of a batch and the observed one for its images to be certified.
EXPLAINED = 1e-3
#: Least number of recovered entries above zero for every pixel of a certified image.
_ENTRIES = 1.5
#: Share of the patches of one image outside the row space up to which all layers together do not tell more of it than
#: its maps: the images of maps behind noise err by about four times the root of this share.
_CLEAN = 1e-7
#: The same above which hidden entries distort maps too much for certificates.
_DISTORTED = 1e-5
#: Growth of what images leave unexplained up to which another contrast counts as possible.
SAME = 1.5
#: Maps in a span: share of the iterations in which candidates are kept apart, by this much at first, and the ridge.
_APART, _VOLUME, _ALIKE = 0.5, 1e-2, 1e-6
#: How the note on an image begins.
_NOTE = "image "


def arranged_labels(observation: Observation, images: Tensor, labels: Tensor) -> Tensor:
    """The labels `(n,)`, given in any order, in the order of reconstructed images `(n, c, h, w)` in [0, 1].

    The order that explains the update best: by the head's gradient as it is, or of any scale, which clipping changes;
    for labels that were recovered before the images, which defenses may spoil, also that which the images imply.
    """
    told = observation.labels is not None or observation.loss is not cross_entropy
    if len(labels) == 1 and told:
        return labels
    try:
        weight, _ = find_head(observation, "the order of labels")
    except UnsupportedModelError:
        if len(labels) == 1:
            return labels
        raise
    logits, calls = linear_calls(observation, images, observation.operator.batch_norm)
    inputs = exact(calls[weight.rpartition(".")[0]][-1][0])
    gradient = exact(mean_gradient(observation.update, observation)[weight])
    implied = [] if told else [labels_of(inputs, gradient).to(labels)]
    orders = [*(order_labels(inputs, p, gradient, labels) for p in (exact(logits).softmax(1), 0.0)), *implied]
    alike = all(torch.equal(order, orders[0]) for order in orders)
    return orders[0] if alike else min(orders, key=lambda some: update_distance(observation, images, some, True))


@dataclass(frozen=True)
class FeatureMapPenalty(Penalty):
    """The penalty of one victim's candidates.

    Attributes:
        observation: of the victim.
        recovered: the maps found first.
        maps: of the layer, `(n, c h w)` of unit norm.
        norms: of the maps, `(n, 1)`, where they are known.
        input_map: the same layer's maps of candidates.
        weight: of the mean over examples of 1 - cos.
        notes: the maps found, and their certificate.
        known: maps of this and of later layers with the labels in their order, where they are known.
        lengths: of the parts of `maps` whose images are each in an order of its own; empty: one order.
        later: labels with which maps are followed for a further start only.
        going: whether candidates begin with images that have these maps already.
    """

    observation: Observation
    recovered: RecoveredMaps
    maps: Tensor
    norms: Tensor | None
    input_map: InputMap
    weight: float
    notes: tuple[str, ...]
    known: KnownMaps | None = None
    lengths: tuple[int, ...] = ()
    later: Tensor | None = None
    going: bool = False

    def with_labels(self, labels: Tensor) -> FeatureMapPenalty:
        """The penalty on the maps nearest to the images that follow from these and the labels `(n,)`, if any do."""
        if self.partial or self.spanned:
            return self
        # statistics of the batch make following take longer than the search, which most single images need alone;
        # where they are unknown, contrast shows in accurate maps only
        if len(labels) == 1 and known_statistics(self.observation):
            return replace(self, later=labels)
        return self._followed(labels)

    @cached_property
    def _followed_later(self) -> FeatureMapPenalty:
        return self if self.later is None else self._followed(self.later)

    def _followed(self, labels: Tensor) -> FeatureMapPenalty:
        # loaded only where maps are followed
        from lit_recon.attacks.updates.feature_maps.upstream import nearest_maps

        found = nearest_maps(self.observation, self.recovered, labels)
        if isinstance(found, str):
            return replace(self, notes=(*self.notes, f"maps of earlier layers: none; {found}"))
        *_, layer = found.maps
        where = f"maps followed layer by layer up to {layer}, expected relative error {found.errors[layer]:.1g}"
        notes = (*self.notes, f"{where}; {found.stopped}" if found.stopped else where)
        return replace(self, notes=notes, known=found)._on([layer])

    @property
    def partial(self) -> bool:
        """Whether entries of the update are hidden."""
        return self.recovered.completion is not None

    @property
    def spanned(self) -> bool:
        """Whether `maps` are an orthonormal basis of the span of the batch's maps."""
        return not self.recovered.separated

    def for_further_start(self, found: Reconstruction, going: bool) -> FeatureMapPenalty:
        """The penalty on the mean over all layers whose maps are known; without priors for images that go on."""
        penalty = replace(self._followed_later, going=going)
        known = penalty.known
        return penalty if known is None or len(known.maps) == 1 else penalty._on(list(known.maps))

    def goes_on(self, found: Reconstruction, fresh: bool) -> bool:
        """Images that have the recovered maps, but not yet accurately enough to have the update."""
        return fresh and not self.spanned and bool((self.angles(found.images) <= ANGLE).all())

    def prior_share(self, progress: float) -> float:
        """Priors are for candidates from elsewhere."""
        return 0.0 if self.going else 1.0

    def kept(self, found: Reconstruction) -> Tensor | None:
        """Certified images; of a span, those that have maps in it, each once, unless mixtures have such maps."""
        if not self.spanned:
            return found.certified
        once, mixed = self._told(found.images, self.angles(found.images))
        return once & (mixed <= REACH)

    def _told(self, images: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Of a span: images `(n,)` with maps in it, each once, and by what RMSE mixtures with others stay in it."""
        once = each_once(self.input_map(images).detach(), angles <= ANGLE)
        return once, self.reach(images, angles, mixtures=True)

    def _on(self, layers: list[str]) -> FeatureMapPenalty:
        assert self.known is not None
        maps = [self.known.maps[layer].flatten(1) for layer in layers]
        return replace(
            self,
            maps=concatenated(maps),
            norms=torch.cat([part.norm(dim=1, keepdim=True) for part in maps], dim=1),
            input_map=InputMap(self.observation, layers, self.observation.operator.batch_norm),
        )

    def angles(self, images: Tensor) -> Tensor:
        """1 - cos between the maps of images in any order and the recovered ones, `(n,)`, from rounding errors up to 1.

        Where the norms are known, half the squared relative distance, which is the same for equal norms.
        """
        norms, order = None if self.norms is None else self.norms.to(images), self.in_order(images)
        with torch.no_grad():
            own = self.input_map(images[order], norms).double()
            apart = own - self._ordered(self.maps.to(images).double(), own)
            return 0.5 * apart.square().sum(dim=1)[order.argsort()]

    def _ordered(self, targets: Tensor, own: Tensor) -> Tensor:
        """The recovered maps, those of further layers in the order that is closest to the images' `own` maps.

        Of a span, the maps inside it that are closest.
        """
        if self.spanned:
            return (own.detach() @ targets.T) @ targets
        if len(self.lengths) < 2 or len(targets) == 1:
            return targets
        parts, theirs = targets.split(self.lengths, dim=1), own.detach().split(self.lengths, dim=1)
        orders = [assigned(a, b) for a, b in zip(theirs[1:], parts[1:], strict=True)]
        return torch.cat([parts[0], *(part[order] for part, order in zip(parts[1:], orders, strict=True))], dim=1)

    def certificate(self, images: Tensor, labels: Tensor) -> tuple[Tensor, bool, tuple[str, ...]]:
        """Which images are certified, `(n,)` bool, whether no other start can do better, and why some are not.

        An image is certified if its own maps are the recovered ones, and something else in the update confirms those:
        the update of the whole batch, or, where other images of it have other maps, the head's gradient, see
        `measured_maps`. Moreover, the maps have to determine its brightness and contrast, see `reach`. In a span it has
        to be the only one with its map, and its mixtures with other images have to leave the span.
        """
        angles = self.angles(images)
        own, reason = angles <= ANGLE, self._too_few(images)
        if own.all() and not reason:
            distance = update_distance(self.observation, images, labels, observed_only=self.partial)
            if not distance <= EXPLAINED:
                reason = f"the update of the images is not the observed one (1 - cos {distance:.1g})"
        elif self.known is None and not reason:
            reason = "other images of its batch have other maps, so that the update cannot confirm these"
        order = self.in_order(images)
        reach = self.reach(images[order], angles[order])[order.argsort()]
        once, mixed = self._told(images, angles) if self.spanned else (own, torch.zeros_like(reach))
        told = once & (mixed <= REACH)
        unseen = unseen_pixels(self.observation)
        certified = torch.zeros_like(own) if reason or unseen else told & (reach <= REACH)
        notes = []
        for i in (~certified).nonzero().flatten().tolist():
            why = f"other brightness or contrast has the same maps (RMSE {reach[i]:.2g}, at most {REACH:g})"
            if not told[i]:
                why = f"mixtures with other images stay in the span (RMSE {mixed[i]:.2g}, at most {REACH:g})"
                why = why if once[i] else "another image has the same map"
            why = reason or unseen or why
            if not own[i]:
                why = f"its maps are not the recovered ones (1 - cos {angles[i]:.1g}, at most {ANGLE:g})"
            notes.append(f"{_NOTE}{i + 1}: not certified: {why}")
        return certified, bool(told.all()) and (not reason or self.known is not None), tuple(notes)

    def _too_few(self, images: Tensor) -> str:
        """Why the recovered entries cannot determine the images; empty if they can."""
        active, pixels = int((self.maps.abs() > 0).sum(1).min()), images[0].numel()
        if active >= _ENTRIES * pixels:
            return ""
        return f"its maps have {active} recovered entries above zero for {pixels} pixels"

    def reach(self, images: Tensor, angles: Tensor, mixtures: bool = False) -> Tensor:
        """RMSE `(n,)` by which brightness and contrast, or mixtures, of ordered images may differ while maps do so."""
        # of several images they tell the contrast of all together only
        if len(images) == 1 and told_by_statistics(self.observation, images):
            return torch.zeros_like(angles)
        norms = None if self.norms is None else self.norms.double().cpu()
        error = self.recovered.outside**0.5 if self.known is None else list(self.known.errors.values())[-1]
        misfit = 2 * angles.double().cpu() + error**2
        together = coupled(self.observation)
        span = self.maps.double().cpu() if self.spanned else None
        found = contrast_reach(partial(self.input_map.doubled(), norms=norms), images, misfit, together, span, mixtures)
        return found.to(images.device)

    def settled(self, images: Tensor) -> Tensor:
        if not coupled(self.observation):
            return images
        likely = likely_contrast(self.observation, images)
        same = self.angles(likely) <= SAME * self.angles(images)
        return likely if same.all() else images

    def closer(self, before: Reconstruction, after: Reconstruction, what: str) -> Reconstruction:
        """`before` with the images of `after` whose maps are closer to the recovered ones; a note says how many."""
        first, second = (one.ordered(self.in_order(one.images)) for one in (before, after))
        angles = self.angles(first.images)
        better = self.angles(second.images) < angles
        if self.spanned:  # candidates may have found the same image, which the update of the whole batch tells
            far = [update_distance(self.observation, found.images, found.labels) for found in (before, after)]
            better = torch.full_like(better, far[1] < far[0])
        images = torch.where(better.view(-1, 1, 1, 1), second.images, first.images)
        # statistics of a batch depend on all of its images
        if not better.any() or (not self.spanned and float(self.angles(images).sum()) > float(angles.sum())):
            return replace(before, notes=(*before.notes, f"{what}: no image is closer"))
        labels = self.labels(images, torch.where(better, second.labels, first.labels))
        order = regrouped(self.observation, images, labels, self.partial, 0)
        images, labels = images[order], labels[order]
        certified, final, notes = self.certificate(images, labels)
        kept = [note for note in before.notes if not note.startswith(_NOTE)]
        won = f"{what}: {int(better.sum())} of {len(labels)} images closer, {int(certified.sum())} certified"
        new = replace(before, images=images, labels=labels, loss=after.loss, certified=certified, final=final)
        return replace(new, notes=(*kept, won, *notes))

    def in_order(self, images: Tensor) -> Tensor:
        """The permutation `(n,)` of images `(n, c, h, w)` that brings their maps closest to the recovered ones."""
        if self.spanned:
            return super().in_order(images)
        width = self.lengths[0] if self.lengths else self.maps.shape[1]
        with torch.no_grad():
            return assigned(self.maps.to(images)[:, :width], self.input_map(images)[:, :width])

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """The recovered maps, in any order."""
        return self.maps.to(images)

    def penalty(self, images: Tensor, targets: Tensor, progress: float) -> Tensor:
        """Weighted mean over examples of 1 - cos of their maps, a scalar, differentiable in the images.

        In a span all candidates could find the same image: at first they are kept apart, by the volume of their maps.
        """
        # half the squared distance of unit vectors equals 1 - cos without cancellation
        norms = None if self.norms is None else self.norms.to(images)
        own = self.input_map(images, norms)
        matched = self.weight * 0.5 * (own - self._ordered(targets, own)).square().sum(dim=1).mean()
        if not self.spanned or progress >= _APART:
            return matched
        inside = nn.functional.normalize(own @ targets.T, dim=1)
        volume = torch.logdet(inside @ inside.T + _ALIKE * torch.eye(len(own)).to(own))
        return matched - self.weight * _VOLUME * (1 - progress / _APART) * volume

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """The batch's labels `(n,)` in the order of the reconstructed images."""
        if self.known is not None:
            return self.known.labels.to(labels)
        return arranged_labels(self.observation, images, labels)


class MapMatching:
    """Recovers the input maps of a convolution once per victim and penalizes images with other maps.

    The maps are exact, see `MapRecovery`, and have more entries than there are pixels, so nothing else needs to
    be matched: an iteration is one forward and one backward pass through the layers before the convolution. Where the
    whole network behind is known, maps are followed towards the images layer by layer first, see `upstream`.

    Args:
        recovery: of the maps.
        weight: above 0, of the mean over examples of 1 - cos.
        further: further starts while images are not certified, each with the maps of all known layers, as many again
            after one that certifies another image; certified images stay as they are.
        approach: iterations of gradient matching from whose images the first further start begins, in turn with random
            images; 0: random images alone.
    """

    def __init__(
        self, recovery: MapRecovery | None = None, weight: float = 1000.0, further: int = 2, approach: int = 200
    ) -> None:
        if not weight > 0 or further < 0 or approach < 0:
            raise ConfigError(
                "MapMatching needs a weight above 0, and further and approach of at least 0; "
                f"got {weight:g}, {further} and {approach}"
            )
        self.recovery = recovery if recovery is not None else MapRecovery()
        self.weight, self.further, self.approach = weight, further, approach

    def prepare(self, observation: Observation) -> FeatureMapPenalty:
        """Recover a victim's maps.

        Raises:
            UnsupportedModelError: see `MapRecovery`; no linear head for labels; or a defense is known to distort maps.
            ThreatModelError: several images and another loss than the cross-entropy.
        """
        if observation.n_examples > 1:
            require_cross_entropy(observation, "MapMatching of several images", "attack one image at a time")
            find_head(observation, "MapMatching of several images")
        found = self.recovery(observation)
        if found.completion is not None:
            return self._completed(observation, found)
        name, left = found.convolution.name, f"{found.outside:.1g} of their patches outside its row space"
        if found.outside > _DISTORTED and defense_hides(observation, f"{name}.weight"):
            raise UnsupportedModelError(f"hidden entries distort the maps of {name}, {left}: match patches instead")
        if len(found.maps) == 1 and found.outside > _CLEAN:
            noise, given = noise_of(observation, exact=False)
            if given and noise is not None:
                by = f"noise of known standard deviation {noise.std:.3g} distorts the map of {name}"
                raise UnsupportedModelError(f"{by}, {left}: match patches instead")
        what = "maps" if found.separated else "directions that span the maps"
        note = f"{len(found.maps)} {what} recovered from the gradient of {name}: {left}, next {found.next_outside:.1g}"
        seen = InputMap(observation, name, observation.operator.batch_norm)
        return FeatureMapPenalty(observation, found, found.maps.flatten(1), None, seen, self.weight, (note,))

    def _completed(self, observation: Observation, found: RecoveredMaps) -> FeatureMapPenalty:
        """The penalty on the covered entries of the maps of all layers."""
        layers, notes = (found, *found.others), []
        for layer in layers:
            assert layer.completion is not None
            share, completion = float(layer.cover.double().mean()), layer.completion
            notes.append(
                f"{len(layer.maps)} maps recovered on {share:.0%} of their entries from the gradient of "
                f"{layer.convolution.name}, completed from its {completion.observed:.1%} that are not hidden: relative "
                f"misfit {completion.misfit:.1g}, of entries left out of the fit {completion.predicted:.1g}; "
                f"{layer.outside:.1g} of the patches outside, next {layer.next_outside:.1g}"
            )
        names, covers = [layer.convolution.name for layer in layers], [layer.cover for layer in layers]
        seen = InputMap(observation, names, observation.operator.batch_norm, covers)
        parts = [layer.maps.flatten(1) for layer in layers]
        lengths = tuple(part.shape[1] for part in parts)
        return FeatureMapPenalty(
            observation, found, concatenated(parts), None, seen, self.weight, tuple(notes), None, lengths
        )
