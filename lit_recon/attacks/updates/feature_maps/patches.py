"""Images whose patches explain the gradients of layers, with entries hidden, with noise, or exact.

The gradient of a convolution's weights, `(channels, c k k)`, is D^T P: one row per place of every image in P, the patch
under the kernel, and in D, the derivative of the loss in the output there. With the D of least squares, the residual of
the observed entries depends on the candidate images alone, by a forward pass (variable projection,
[GolubPereyra1973]; the derivative of the residual is that at a fixed D). That needs neither labels nor second
derivatives, holds for any loss, any activation, clipped gradients and sums over clients, and is continuous in the
images where the gradient jumps with every ReLU that switches. Every row of the gradient is spanned by the same patches,
so that it says something about them as soon as more of its entries are observed than there are patches, however many
others pruning or dropping has hidden. The same holds for a linear layer of tokens, whose patches are the tokens.

Noise enters by its likelihood. The search begins as if there were more: the assumed standard deviation falls to that of
the update, and the prior's influence with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import TokenLayer, find_convolutions, find_token_layers
from lit_recon.attacks.updates.feature_maps.input_map import (
    Passes,
    coupled,
    likely_contrast,
    passed_images,
    told_by_statistics,
)
from lit_recon.attacks.updates.feature_maps.matching import EXPLAINED, REACH, SAME, arranged_labels
from lit_recon.attacks.updates.feature_maps.observed_rows import (
    FirstStepSpan,
    Layer,
    LayerRows,
    MatchedRows,
    ObservedRows,
    completed_rows,
    enough_layers,
    few_patches,
    observed_rows,
    spans_of_first_step,
)
from lit_recon.attacks.updates.gradient_matching.matching import update_distance
from lit_recon.attacks.updates.gradient_matching.priors import Penalty
from lit_recon.attacks.updates.noise import edge, hidden_shares, noise_of, singular_values
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Batch, Noise, Observation, Reconstruction

#: Ridge on differences between the patches of several local steps in further searches.
_LESS_ALIKE = 1e-6
#: Growth of the misfit up to which another contrast counts as possible.
_NATS = 10.0
#: Standard deviations of the misfit up to which images explain the gradients.
_EXPLAINED = 4.0
#: Share of the squares of gradients without noise that the patches of the images may leave.
_LEFT = 1e-6
#: The same, relative to what they would leave with another brightness or contrast. A search that has not ended errs
#: most where gradients tell least: 15 times as far as along these directions where this was measured.
_DETERMINED = 2e-3
#: Share of the squares of the rows searched by from which on further iterations are not worth their time; in a batch of
#: n images, whose smallest gradients count little, over n.
_SOLVED = 2e-6
#: Share of the iterations after which a search ends in a local minimum that still leaves a share of the squares.
_PATIENCE, _STUCK = 0.33, 2e-3
#: Share of what a search leaves at which another one from its images ends.
_FURTHER = 0.1
#: RMSE up to which two images of a batch are the same.
_REPEATED = 0.05
#: Number of layers with completed rows from which on the search leaves rows with hidden entries out.
_ENOUGH_LAYERS = 2
#: Assumed noise at the first iteration, and least noise, relative to the root mean square of the observed entries.
_FIRST, _LAST = 0.1, 1e-5
#: For local steps, whose weights after the first one are known nearly. A search on a straight line of weights ends at
#: `_ROUGHLY`, one with weights of training on images found before at a share of what these leave, `_LEAST` at least.
#: Single images that leave more than `_NEAR` on the line are given up, and other random ones begin.
_LEFT_BY_STEPS, _ROUGHLY, _CLOSER, _LEAST, _NEAR = 1e-5, 1e-3, 0.1, 1e-9, 0.01


@dataclass(frozen=True)
class PatchPenalty(Penalty):
    """The penalty of one victim's candidates.

    Attributes:
        observation: of the victim.
        judged: rows of the layers' gradients, by which found images are judged.
        searched: rows by which images are sought; with noise the same.
        noise: in the gradients, treated as normal; None: only rounding errors.
        weight: of minus the log-likelihood, in nats per pixel of the batch.
        tempered: share of the iterations in which more noise is assumed than there is, at least 0.
        notes: what was observed.
        enough: share of the squares of `searched`, without noise, at which the search ends.
    """

    observation: Observation
    judged: MatchedRows[ObservedRows]
    searched: MatchedRows[LayerRows]
    noise: Noise | None
    weight: float
    tempered: float
    notes: tuple[str, ...]
    enough: float = _SOLVED

    @cached_property
    def pixels(self) -> int:
        """Number of pixels of the batch."""
        return self.observation.n_examples * math.prod(self.observation.image_shape)

    @cached_property
    def freedom(self) -> int:
        """Expected misfit of the true images, and half its variance."""
        return sum(rows.equations for rows in self.judged.rows)

    @property
    def partial(self) -> bool:
        """Whether entries of the gradients are hidden."""
        return any(rows.observed is not None for rows in self.judged.rows)

    @property
    def local_steps(self) -> bool:
        """Whether the gradients are summed over several local steps."""
        return self.judged.passes.local_steps

    @property
    def measure(self) -> MatchedRows[LayerRows]:
        """What tells how far images are before training on them is simulated."""
        return self.searched if isinstance(self.searched.rows[0], FirstStepSpan) else self.judged

    @property
    def on_a_line(self) -> bool:
        """Whether weights on the way of local steps are taken from a straight line."""
        return self.local_steps and self.measure is self.judged

    @cached_property
    def stds(self) -> tuple[float, float]:
        """Standard deviations of the noise, that assumed first and that of the update."""
        scale = (self.searched.squares / sum(rows.count for rows in self.searched.rows)) ** 0.5
        last = max(_LAST * scale, self.noise.std if self.noise else 0.0)
        return max(_FIRST * scale, last), last

    def prior_share(self, progress: float) -> float:
        """What priors count for after a share of the iterations, in units of the noise assumed first."""
        first, last = self.stds
        return float((last / first) ** (2 * min(1.0, progress / self.tempered if self.tempered else 1.0)))

    def explained_by(self, images: Tensor, labels: Tensor) -> MatchedRows[ObservedRows]:
        """The rows of all layers; of local steps, with the weights of training on these images and labels."""
        if not self.local_steps:
            return self.judged
        rows = tuple(replace(one, ridge=_LESS_ALIKE) for one in self.judged.rows)
        return MatchedRows(rows, Passes(self.observation, [one.layer.name for one in rows], Batch(images, labels)))

    def penalty(self, images: Tensor, targets: Tensor, progress: float) -> Tensor:
        """Weighted minus log-likelihood per pixel with the noise assumed first, less that of the true images.

        The images of the least loss with the noise assumed later are the same if priors count for less,
        see `prior_share`; equal units in all iterations keep a quasi-Newton solver's history of use.
        """
        first, last = self.stds
        excess = self.searched.residual(images, held=True) - self.freedom * (last**2 if self.noise else 0.0)
        return (self.weight * 0.5 * excess / (first**2 * self.pixels)).to(images.dtype)

    def ended(self, loss: float, progress: float) -> bool:
        """Whether images with this penalty explain gradients without noise nearly to rounding, or never will."""
        left = 2 * loss * self.stds[0] ** 2 * self.pixels / (self.weight * self.searched.squares)
        stuck = left > (_NEAR if self.on_a_line else _STUCK) and progress >= _PATIENCE
        return self.noise is None and (left <= self.enough or stuck)

    def for_further_start(self, found: Reconstruction, going: bool) -> PatchPenalty:
        """The penalty with the weights of local training on the images found, if they moved.

        Images that go on and are all in their places do so without more noise than there is, and further.
        """
        if not (self.on_a_line and self._near(found)):
            misplaced = self.misplaced(found)
            if not going or (len(found.images) > 1 if misplaced is None else bool(misplaced.any())):
                return self
            return replace(self, tempered=0.0, enough=min(self.enough, _FURTHER * self.searched.left(found.images)))
        judged = self.explained_by(found.images, found.labels)
        rows = [replace(one, ridge=_LESS_ALIKE) for one in self.searched.rows if isinstance(one, ObservedRows)]
        searched = replace(judged, rows=tuple(rows))
        return replace(self, judged=judged, searched=searched, enough=max(_LEAST, _CLOSER * judged.left(found.images)))

    def goes_on(self, found: Reconstruction, number: int) -> bool:
        """Batches, whose random images would end in mixtures; nearly found images, and once only if of one step."""
        if self.observation.n_examples > 1:
            return True
        if self.on_a_line:
            return self._near(found)
        return (number == 1 or self.local_steps) and self.measure.left(found.images) <= _STUCK

    def misplaced(self, found: Reconstruction) -> Tensor | None:
        """Images whose patches lie outside the span of rows, and repeated ones; None where no span is known."""
        rows, images = self.searched.rows, found.images
        known = [one.observed is None for one in rows]
        unknown = self.noise is not None or self.on_a_line or not any(known)
        if unknown or len(images) == 1:
            return None
        with torch.no_grad():
            patches = self.searched.patches(images)
        if coupled(self.observation):  # statistics of the batch take the mean patch out of the span
            patches = [own - own.mean(0) for own in patches]
        pairs = [(one, own) for one, own, all_of_it in zip(rows, patches, known, strict=True) if all_of_it]
        shares = [one.outside(own).view(len(images), -1).mean(1) for one, own in pairs]
        misplaced = torch.stack(shares).mean(0) > _STUCK
        for i in range(1, len(images)):
            same = (images[:i] - images[i]).square().flatten(1).mean(1).sqrt() < _REPEATED
            misplaced[i] |= (same & ~misplaced[:i]).any()
        return misplaced

    def _near(self, found: Reconstruction) -> bool:
        """Whether weights of local training on the images found are closer than those on a straight line."""
        return self.judged.left(found.images) <= _NEAR

    def closer(self, before: Reconstruction, after: Reconstruction, what: str) -> Reconstruction:
        """The reconstruction of the two whose patches leave less of the gradients."""
        old, new = self.measure.left(before.images), self.measure.left(after.images)
        of = "gradients" if self.measure is self.judged else "patches outside the span"
        how = f"{what}: patches leave {new:.1g} of the {of}, those found before {old:.1g}"
        if not new < old:
            return replace(before, notes=(*before.notes, how))
        return replace(after, notes=(*self.notes, how, *after.notes))

    def settled(self, images: Tensor) -> Tensor:
        if not coupled(self.observation):
            return images
        likely = likely_contrast(self.observation, images)
        before, after = self.measure.left(images), self.measure.left(likely)
        same = after <= (before + _NATS * self.noise.std**2 / self.measure.squares if self.noise else SAME * before)
        return likely if same else images

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """The batch's labels `(n,)` in the order of the reconstructed images."""
        return arranged_labels(self.observation, images, labels)

    def certificate(self, images: Tensor, labels: Tensor) -> tuple[Tensor | None, bool, tuple[str, ...]]:
        """Whether the images explain the update: a certificate `(n,)` without noise, a note with it.

        Without noise the patches of the images have to span the observed entries of the gradients, and the images have
        to give the observed entries of the whole update. An image is certified if with another brightness or contrast
        it would leave far more: in a batch, images with small gradients can be wrong at little cost.
        """
        judged = self.explained_by(images, labels)
        left = judged.left(images)
        if self.noise is not None:
            excess = (left * judged.squares / self.noise.std**2 - self.freedom) / (2 * self.freedom) ** 0.5
            does = "is that of the noise"
            if excess > _EXPLAINED:
                does = "is more than noise: the search ended too early or in a local minimum"
            note = f"misfit of the images' patches {does}: {excess:.2g} standard deviations above its mean"
            return None, False, (note,)
        distance = update_distance(self.observation, images, labels, observed_only=self.partial)
        most = _LEFT_BY_STEPS if self.local_steps else _LEFT
        how = f"patches leave {left:.1g} of the gradients, 1 - cos of the updates {distance:.1g}"
        none = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        if not (distance <= EXPLAINED and left <= most):
            return none, False, (f"not certified: {how}, at most {most:g} and {EXPLAINED:g}",)
        if any(isinstance(rows.layer, TokenLayer) for rows in judged.rows):
            return none, False, (f"not certified: {how}, but norms of tokens hide contrast and brightness",)
        each = list(range(len(images)))
        # statistics of the batch hide what changes in all images together, unless they are known
        told = told_by_statistics(self.observation, images)
        together = self._moved(judged, images, each) if coupled(self.observation) and not told else math.inf
        alone = [math.inf if told and len(each) == 1 else self._moved(judged, images, [i]) for i in each]
        moved = images.new_tensor([min(together, left) for left in alone])
        certified = left <= _DETERMINED * moved
        notes = [
            f"image {i + 1}: not certified: with another brightness or contrast (RMSE {REACH:g}) patches leave "
            f"{moved[i]:.1g} of the gradients, at least {left / _DETERMINED:.1g} is asked"
            for i in (~certified).nonzero().flatten().tolist()
        ]
        # other starts do not tell what statistics of the batch hide
        return certified, bool(certified.all()) or (coupled(self.observation) and not told), (how, *notes)

    def _moved(self, judged: MatchedRows[ObservedRows], images: Tensor, numbers: list[int]) -> float:
        """The least share left if brightness or contrast of some images, in a channel or all, is another by `REACH`."""
        own, (mean, _) = images[numbers], self.observation.normalization.tensors(images)
        flat, where = own - own.mean((0, 2, 3), keepdim=True), images.new_tensor(numbers).long()
        channels = torch.eye(own.shape[1]).to(own)[:, None, :, None, None]
        directions = (*(channels * torch.ones_like(own)), *(channels * flat), own - mean)
        steps = [REACH * own.numel() ** 0.5 * one / one.norm().clamp_min(1e-12) for one in directions]
        return min(judged.left(images.index_copy(0, where, own + sign * step)) for step in steps for sign in (1, -1))


class PatchMatching:
    """Matches patches of candidates to the gradients of all convolutions and token layers with few enough of them.

    Entries of the gradients may be hidden, or have normal noise of known or unknown scale, for which the likelihood is
    that of `PatchPenalty`; with Laplace noise it is least squares. With `FeaturesOnly` as objective no update is
    computed at all, and an iteration is one forward and one backward pass up to the last of these layers.

    Args:
        layers: their names; default: all with fewer patches in the batch than entries of a patch.
        weight: above 0, of minus the log-likelihood in nats per pixel of the batch.
        tempered: above 0 and at most 1, share of the iterations over which the assumed noise falls to that of the
            update.
        further: further starts for images that are not certified, where there is no noise; of several images, of local
            steps, and the first one where the gradients are nearly explained, from those found so far.
        approach: iterations of gradient matching from whose images the first further start of a single image begins, in
            turn with random images; 0: random images alone.
    """

    def __init__(
        self,
        layers: list[str] | None = None,
        weight: float = 1.0,
        tempered: float = 0.4,
        further: int = 1,
        approach: int = 200,
    ) -> None:
        if (layers is not None and not layers) or not weight > 0 or not 0 < tempered <= 1:
            raise ConfigError(
                "PatchMatching needs a weight above 0, tempered above 0 and at most 1, and at least one layer, or null "
                f"for all; got {weight:g}, {tempered:g} and {layers}"
            )
        if further < 0 or approach < 0:
            raise ConfigError(f"PatchMatching needs further and approach of at least 0; got {further} and {approach}")
        self.layers, self.weight, self.tempered = layers, weight, tempered
        self.further, self.approach = further, approach

    def prepare(self, observation: Observation) -> PatchPenalty:
        """Choose the layers and their rows with enough observed entries, and find the noise.

        Raises:
            UnsupportedModelError: no layer has few enough patches; too few entries are observed; or no singular
                value of the gradients is larger than those of noise.
            ConfigError: a layer is neither a plain convolution nor one of tokens, or has too many patches.
            ThreatModelError: the noise of the defense is neither normal nor Laplace.
        """
        n = passed_images(observation)
        known: tuple[Layer, ...] = (*find_convolutions(observation), *find_token_layers(observation))
        fit = {one.name: one for one in known if few_patches(one, n)}
        for name in self.layers or ():
            if name not in fit:
                raise ConfigError(f"{name!r} is no convolution or token layer with few patches: {', '.join(fit)}")
        if not fit:
            raise UnsupportedModelError(
                f"no layer has fewer patches in a batch of {observation.n_examples} ({n} with all local steps) "
                "than entries of a patch: attack smaller batches, or match gradients instead"
            )
        found = [observed_rows(observation, fit[name], n) for name in self.layers or fit]
        repeats = n / observation.n_examples
        rows = tuple(replace(one, passes=int(repeats) if repeats.is_integer() else 1) for one in found if one)
        # fully observed, layers with as many patches as channels cost much and add little to others
        rows = tuple(one for one in rows if one.observed is not None or one.patches < len(one.values)) or rows
        judged = MatchedRows(rows, Passes(observation, [one.layer.name for one in rows]))
        enough = _SOLVED / observation.n_examples
        penalty = PatchPenalty(observation, judged, judged, None, self.weight, self.tempered, (), enough)
        if penalty.freedom < penalty.pixels:
            raise UnsupportedModelError(
                f"too few entries of the gradients are left: {penalty.freedom} equations for {penalty.pixels} pixels, "
                f"from {len(rows)} of {len(found)} layers"
            )
        note = f"patches matched to {penalty.freedom} equations from {len(rows)} layers"
        if penalty.partial:
            shares = [one.count / one.values.numel() for one in rows]
            note += f", in rows with {min(shares):.0%} to {max(shares):.0%} of their entries observed"
        noise, given = noise_of(observation)
        if noise is None or (not given and (penalty.partial or penalty.local_steps or noise.std < penalty.stds[1])):
            # behind hidden entries and local steps small singular values are not those of noise
            return _without_noise(penalty, f"{note}; no noise")
        how = f"{'known' if given else 'estimated'} standard deviation {noise.std:.3g}"
        hidden = {one.layer.name: _hidden(one, noise.std) for one in rows if one.observed is None}
        if hidden and all(bool((shares == 1).all()) for shares in hidden.values()):
            raise UnsupportedModelError(
                f"nothing is left of the maps: no layer's gradient has singular values above noise of {how}"
            )
        note = f"{note}; noise of {how}"
        if told := [f"{name} {float(shares.mean()):.2g}" for name, shares in hidden.items()]:
            note += f"; expected share of the patches' span that it hides: {', '.join(told)}"
        return replace(penalty, noise=noise, notes=(note,))


def _without_noise(penalty: PatchPenalty, note: str) -> PatchPenalty:
    """The same with the rows by which images are sought where gradients have no noise."""
    observation, rows, chosen = penalty.observation, penalty.judged.rows, enough_layers(penalty.judged.rows)
    if spans := spans_of_first_step(chosen, observation):
        first = MatchedRows(tuple(spans), Passes(observation, [one.layer.name for one in spans], steps=1))
        return replace(penalty, searched=first, notes=(f"{note}; sought by their patches in the first local step",))
    chosen = list(rows) if penalty.local_steps else chosen
    completed = [completed_rows(one, observation) for one in chosen]
    if searched := [one for one in completed if one]:
        note += f"; hidden entries of {len(searched)} layers completed"
    if len(searched) < _ENOUGH_LAYERS:
        # single images are found more often with rows as they are; the weights on the way of steps are known nearly
        several = observation.n_examples > 1 and not penalty.local_steps
        searched = [one or own.condensed(several) for one, own in zip(completed, chosen, strict=True)]
    enough = _ROUGHLY if penalty.local_steps else penalty.enough
    passes = Passes(observation, [one.layer.name for one in searched])
    return replace(penalty, searched=MatchedRows(tuple(searched), passes), notes=(note,), enough=enough)


def _hidden(rows: ObservedRows, std: float) -> Tensor:
    """Expected shares that noise hides of the patches' span, one per patch and row at most."""
    height, width = rows.values.shape
    found = singular_values(rows.values.cpu().double())[-rows.patches :]
    # finite matrices have singular values a little above the edge
    return torch.where(found > 1.05 * std * edge(height, width), hidden_shares(found, height, width, std), 1.0)
