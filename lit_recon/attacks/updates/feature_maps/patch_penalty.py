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
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import TokenLayer, unseen_pixels
from lit_recon.attacks.updates.feature_maps.input_map import (
    Passes,
    coupled,
    entries_seen,
    likely_contrast,
    other_contrasts,
    told_apart,
    told_by_statistics,
)
from lit_recon.attacks.updates.feature_maps.matching import EXPLAINED, REACH, SAME, arranged_labels
from lit_recon.attacks.updates.feature_maps.observed_rows import LayerRows, MatchedRows, ObservedRows
from lit_recon.attacks.updates.feature_maps.spans import SpanRows, for_some, misplaced_images, outside_shares, spanned
from lit_recon.attacks.updates.gradient_matching.matching import beside_noise, update_distance
from lit_recon.attacks.updates.gradient_matching.priors import Part, Penalty
from lit_recon.records import Batch, Noise, Observation, Reconstruction

if TYPE_CHECKING:
    from lit_recon.attacks.updates.feature_maps.heavy_tails import HeavyTails

#: Share of the squares of the searched rows from which on iterations are not worth their time; of n images, over n.
SOLVED = 2e-6
#: Share of what images that are not certified leave to which a search goes on; `SOLVED` times its power is the least.
_STRICTER, _TIMES = 0.3, 4
#: Equations of layers, for every pixel of a batch, with which images are sought by these alone.
AMPLE = 2.0
#: Ridge on differences between the patches of several local steps in further searches.
_LESS_ALIKE = 1e-6
#: Growth of the misfit up to which another contrast counts as possible; standard deviations of it up to which images
#: explain the gradients; and its share of that of estimated noise below which they show that there is no such noise.
_NATS, _EXPLAINED, _REFUTED = 10.0, 4.0, 0.01
#: Share of the squares of gradients without noise that the patches of the images may leave; and of the squares of
#: patches outside of their span at which a search of a single image ends.
_LEFT, _ALONE = 1e-6, 1.5e-7
#: Share of the squares that a stuck search leaves, and share of the loss by which its steps lower it at most.
_STUCK, _FALLING = 2e-3, 0.01
#: Share of what a search leaves at which another one from its images ends.
_FURTHER = 0.1
#: Nats per pixel by which a step lowers minus the log-likelihood, below which images are as near as noise allows; and,
#: behind heavy tails, near enough for rows around them, which take longer.
_SETTLED, _NEARLY = 2.5e-4, 1.0
#: Share of the squares at which images of a batch are told apart, so that each can be sought by itself; and the share
#: of the patience after which they are, told apart or not.
_APART, _TOGETHER = 0.05, 0.6
#: Why an image is not certified of which too little is seen.
_SEEN = "one of the first layers sees only {} entries other than zero of it, fewer than its {} pixels"
#: Assumed noise at the first iteration, and least noise, relative to the root mean square of the observed entries.
_FIRST, _LAST = 0.1, 1e-5
#: For local steps, whose weights after the first one are known nearly. A search with weights of training on images
#: found before ends at a share of what these leave, `_LEAST` at least. Single images that leave more than `_NEAR` with
#: weights on a straight line are given up, and other random ones begin.
_LEFT_BY_STEPS, _CLOSER, _LEAST, _NEAR = 1e-5, 0.1, 1e-9, 0.01


@dataclass(frozen=True)
class PatchPenalty(Penalty):
    """The penalty of one victim's candidates.

    Attributes:
        observation: of the victim.
        judged: rows of the layers' gradients, by which found images are judged.
        searched: rows by which images are sought; with noise the same, or the strongest of them.
        noise: in the gradients, treated as normal; None: only rounding errors.
        weight: of minus the log-likelihood, in nats per pixel of the batch.
        tempered: share of the iterations in which more noise is assumed than there is, at least 0.
        patience: share of the iterations after which a search ends that is stuck in a local minimum.
        notes: what was observed.
        enough: share of the squares of `searched`, without noise, at which the search ends.
        given: the noise is that of a known defense, not an estimate.
        tails: rows behind noise of heavy tails; None: its tails are normal.
        exact: without noise, for images that show that there is none, though it was estimated; None: it is known.
    """

    observation: Observation
    judged: MatchedRows[ObservedRows]
    searched: MatchedRows[LayerRows]
    noise: Noise | None
    weight: float
    tempered: float
    patience: float
    notes: tuple[str, ...]
    enough: float = SOLVED
    given: bool = False
    tails: HeavyTails | None = None
    exact: PatchPenalty | None = None

    @cached_property
    def pixels(self) -> int:
        """Number of pixels of the batch."""
        return self.observation.n_examples * math.prod(self.observation.image_shape)

    @cached_property
    def freedom(self) -> int:
        """Expected misfit of the true images, and half its variance."""
        return sum(rows.equations for rows in self.judged.rows)

    @cached_property
    def _expected(self) -> int:
        """Squares that the true images are expected to leave of unit noise: of rows that are not searched all of it."""
        pairs = zip(self.judged.rows, self.searched.rows, strict=True)
        return sum(judged.count - len(own.values) * own.patches for judged, own in pairs)

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
        return self.searched if isinstance(self.searched.rows[0], SpanRows) else self.judged

    @property
    def on_a_line(self) -> bool:
        """Whether weights on the way of local steps are taken from a straight line."""
        return self.local_steps and self.measure is self.judged

    @cached_property
    def stds(self) -> tuple[float, float]:
        """Standard deviations of the noise, that assumed first and that of the update."""
        # rows behind heavy tails change: in the same units in all iterations
        begun: MatchedRows[LayerRows] | MatchedRows[ObservedRows] = self.judged if self.noise else self.searched
        begun = begun if self.tails is None else self.tails.first
        scale = (begun.squares / sum(rows.count for rows in begun.rows)) ** 0.5
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

        Known statistics add their misfit. The images of the least loss with the noise assumed later are the same if
        priors count for less, see `prior_share`; equal units keep a quasi-Newton solver's history of use.
        """
        first, last = self.stds
        excess = self.searched.residual(images, held=True)
        if self.noise:
            left_out = self.judged.squares - self.searched.squares
            excess = excess + left_out - self._expected * last**2
        return (self.weight * 0.5 * excess / (first**2 * self.pixels)).to(images.dtype)

    @property
    def refines(self) -> bool:
        """Not where gradients leave brightness and contrast open: these went further astray with plain pixels."""
        return not coupled(self.observation)

    def ended(self, loss: float, progress: float, fell: float = math.inf, enough: float | None = None) -> bool:
        """Whether gradients are explained nearly to rounding or never will be; or noise hides what is left."""
        if self.noise is not None:
            first, last = self.stds
            return progress > self.tempered and fell * first**2 / last**2 < _SETTLED * self.weight
        joint = self.enough >= _APART
        patience = self.patience * (_TOGETHER if joint else 1.0)
        falling = not (joint or self.on_a_line) and _FALLING * loss < fell < math.inf
        stuck = self._left(loss) > (_NEAR if self.on_a_line else _STUCK) and progress >= patience and not falling
        return self._left(loss) <= (self.enough if enough is None else enough) or stuck

    def _left(self, loss: float) -> float:
        """The share of the squares of `searched` that a loss without noise stands for."""
        return 2 * loss * self.stds[0] ** 2 * self.pixels / (self.weight * self.searched.squares)

    def stricter(self, loss: float, images: Tensor, labels: Tensor) -> float | None:
        tokens = any(isinstance(rows.layer, TokenLayer) for rows in self.judged.rows)  # they are never certified
        left, least = self._left(loss), SOLVED / self.observation.n_examples * _STRICTER**_TIMES
        if self.noise or self.local_steps or self.separable or tokens or not least < left <= self.enough:
            return None
        found = self.settled(images)
        final = self.certificate(found, self.labels(found, labels))[1]
        return None if final else max(least, _STRICTER * left)

    def renews(self, progress: float, fell: float) -> bool:
        first, last = self.stds
        return self.tails is not None and progress > self.tempered and fell * first**2 / last**2 < _NEARLY * self.weight

    def renewed(self, images: Tensor) -> PatchPenalty:
        """Behind heavy tails, the penalty by rows around the best fit of the patches of these images."""
        if self.tails is None:
            return self
        rows = self.tails.around(images)
        return replace(self, judged=rows, searched=rows)

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

    def goes_on(self, found: Reconstruction, fresh: bool) -> bool:
        """Batches, whose random images would end in mixtures; nearly found images, and if of one step `fresh` ones."""
        if self.noise is not None or self.observation.n_examples > 1:
            return self.noise is None  # what leaves more than noise is a local minimum
        if self.on_a_line:
            return self._near(found)
        return (fresh or self.local_steps) and self.measure.left(found.images) <= _STUCK

    def misplaced(self, found: Reconstruction) -> Tensor | None:
        """Images whose patches lie outside the span of rows, and repeated ones; None where no span is known."""
        if self.noise is not None or self.on_a_line or len(found.images) == 1:
            return None
        return misplaced_images(self.searched, found.images, _STUCK)

    @property
    def separable(self) -> bool:
        """Whether patches of every image of the batch, or their differences, lie in known spans by themselves."""
        if self.noise is not None or self.on_a_line or coupled(self.observation) or self.observation.n_examples == 1:
            return False
        return spanned(self.searched)

    @cached_property
    def alone(self) -> MatchedRows[SpanRows]:
        """Rows by which single images are sought: those of the first layer, if they are enough, are the fastest."""
        first, *others = self.searched.rows
        if others and first.count - len(first.values) * first.patches >= AMPLE * self.pixels:
            passes = Passes(self.observation, [first.layer.name], steps=1)
            return for_some(MatchedRows((first,), passes), 1)
        return for_some(self.searched, 1)

    def in_parts(self) -> PatchPenalty:
        return replace(self, enough=_APART) if self.separable else self

    def parts(self, found: Reconstruction, number: int) -> list[Part]:
        """Every image found by itself; after such a search random images for those that are misplaced."""
        if not self.separable:
            return []
        misplaced = self.misplaced(found) if number % 2 == 0 else None
        if misplaced is not None and misplaced.any():
            others = for_some(self.searched, int(misplaced.sum()), found.images[~misplaced])
            return [Part(misplaced.nonzero()[:, 0], replace(self, searched=others), drawn=True)]
        alone, certified = self.alone, found.certified
        places = torch.arange(len(found.images)) if certified is None else (~certified).nonzero()[:, 0]
        left = float(outside_shares(alone, found.images[places]).mean())
        penalty = replace(self, searched=alone, tempered=0.0, enough=min(_ALONE, _FURTHER * left))
        return [Part(places[i : i + 1], penalty) for i in range(len(places))]

    def penalties(self, images: Tensor) -> Tensor:
        # shares of squares and not sines of angles: no basis of every image's patches has to be computed
        searched = cast(MatchedRows[SpanRows], self.searched)
        left = searched.squares * outside_shares(searched, images)
        return self.weight * 0.5 * left / (self.stds[0] ** 2 * self.pixels)

    def _near(self, found: Reconstruction) -> bool:
        """Whether weights of local training on the images found are closer than those on a straight line."""
        return self.judged.left(found.images) <= _NEAR

    def closer(self, before: Reconstruction, after: Reconstruction, what: str) -> Reconstruction:
        """The one that leaves less of the gradients; where images are sought alone, `after` if it certifies as many."""
        old, new = self.measure.left(before.images), self.measure.left(after.images)
        of = "gradients" if self.measure is self.judged else "patches outside the span"
        how = f"{what}: patches leave {new:.1g} of the {of}, those found before {old:.1g}"
        # wrong images of a batch hide what the others leave, and new ones go on alone from where they are
        if after.n_certified < before.n_certified if self.separable else not new < old:
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
        to give those of the whole update, or the patches of each have to lie in known spans by themselves. An image is
        certified if with another contrast it would leave far more: small gradients let wrong images cost little. No
        layer up to the first matched one may see it by fewer entries than it has pixels, and all have to be seen.
        """
        certified, final, notes = self._explanation(images, labels)
        if certified is None or not certified.any():  # searches ask again and again
            return certified, final, notes
        seen = entries_seen(self.observation, images, [rows.layer.name for rows in self.judged.rows])
        few, unseen = seen < images[0].numel(), unseen_pixels(self.observation)
        few = certified & (torch.ones_like(few) if unseen else few)
        why = {i: unseen or _SEEN.format(int(seen[i]), images[0].numel()) for i in few.nonzero().flatten().tolist()}
        said = [f"image {i + 1}: not certified: {reason}" for i, reason in why.items()]
        return certified & ~few, final, (*notes, *said)

    def _explanation(self, images: Tensor, labels: Tensor) -> tuple[Tensor | None, bool, tuple[str, ...]]:
        """The certificate by patches, contrast and the whole update."""
        if self.exact is not None and self.noise is not None:
            std, rows = self.tails.scale if self.tails else self.noise.std, self.exact.judged
            if rows.left(images) * rows.squares < _REFUTED * self.freedom * std**2:
                without = self.exact._explanation(images, labels)
                if without[0] is not None and without[0].all():
                    return without
        if self.tails is not None:
            scale = self.tails.scale_around(images)
            return None, False, (f"around the images found the noise is {scale:.3g} once outliers are pulled in",)
        judged = self.explained_by(images, labels)
        left, none = judged.left(images), torch.zeros(len(images), dtype=torch.bool, device=images.device)
        if self.noise is not None:
            excess = (left * judged.squares / self.noise.std**2 - self.freedom) / (2 * self.freedom) ** 0.5
            stuck = "is more than noise: the search ended too early or in a local minimum"
            does = stuck if excess > _EXPLAINED else "is that of the noise"
            note = f"misfit of the images' patches {does}: {excess:.2g} standard deviations above its mean"
            # known noise: single images that explain less begin anew; batches ended no nearer when they did
            again = self.given and excess > _EXPLAINED and len(images) == 1
            told = self.given and not self.local_steps
            beyond = [beside_noise(self.observation, images, labels, self.noise.std)] if told else []
            return none if again else None, False, (note, *beyond)
        distance = update_distance(self.observation, images, labels, observed_only=self.partial)
        most = _LEFT_BY_STEPS if self.local_steps else _LEFT
        how = f"patches leave {left:.1g} of the gradients, 1 - cos of the updates {distance:.1g}"
        explained = distance <= EXPLAINED and left <= most
        if any(isinstance(rows.layer, TokenLayer) for rows in judged.rows):
            return none, False, (f"not certified: {how}, and norms of tokens hide contrast and brightness",)
        if self.separable:
            return self._alone_certified(images, how, explained)
        if not explained:
            return none, False, (f"not certified: {how}, at most {most:g} and {EXPLAINED:g}",)
        each = list(range(len(images)))
        # statistics of the batch hide what changes in all images together, unless they are known
        told = told_by_statistics(self.observation, images)
        together = self._moved(judged, images, each) if coupled(self.observation) and not told else math.inf
        alone = [math.inf if told and len(each) == 1 else self._moved(judged, images, [i]) for i in each]
        moved = images.new_tensor([min(together, left) for left in alone])
        certified, notes = told_apart(left, moved, REACH, "patches leave {:.1g} of the gradients")
        # other starts do not tell what statistics of the batch hide
        return certified, bool(certified.all()) or (coupled(self.observation) and not told), (how, *notes)

    def _alone_certified(self, images: Tensor, how: str, explained: bool) -> tuple[Tensor, bool, tuple[str, ...]]:
        """The certificate of images by their own patches and the span, which other images do not change.

        Unless all images together are `explained`, by the spans of all layers, and each image once only.
        """
        alone = self.alone if explained else for_some(self.searched, 1)
        with torch.no_grad():
            left = outside_shares(alone, images)
            others = other_contrasts(self.observation, images, REACH, each=True)
            moved = torch.stack([outside_shares(alone, one) for one in others]).amin(0)
        certified, notes = told_apart(left, moved, REACH, "{:.1g} of its patches are outside the span")
        if not explained:
            misplaced = misplaced_images(self.searched, images, _STUCK)
            repeated = torch.zeros_like(certified) if misplaced is None else certified & misplaced
            certified &= ~repeated
            same = "not certified: another image is the same"
            notes += [f"image {i + 1}: {same}" for i in repeated.nonzero().flatten().tolist()]
        return certified, bool(certified.all()), (how, *notes)

    def _moved(self, judged: MatchedRows[ObservedRows], images: Tensor, numbers: list[int]) -> float:
        """The least share left if brightness or contrast of some images, in a channel or all, is another by `REACH`."""
        where, others = images.new_tensor(numbers).long(), other_contrasts(self.observation, images[numbers], REACH)
        return min(judged.left(images.index_copy(0, where, moved)) for moved in others)
