"""The search for images whose patches explain the gradients of layers: its layers, rows and noise."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import find_convolutions, find_token_layers
from lit_recon.attacks.updates.feature_maps.input_map import Passes, coupled, passed_images
from lit_recon.attacks.updates.feature_maps.observed_rows import (
    Layer,
    MatchedRows,
    ObservedRows,
    completed_rows,
    enough_layers,
    few_patches,
    observed_rows,
)
from lit_recon.attacks.updates.feature_maps.patch_penalty import AMPLE, SOLVED, PatchPenalty
from lit_recon.attacks.updates.feature_maps.spans import spans_of_first_step
from lit_recon.attacks.updates.noise import edge, hidden_shares, noise_of, singular_values
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Noise, Observation

#: Number of layers with completed rows from which on the search leaves rows with hidden entries out.
_ENOUGH_LAYERS = 2
#: Share of the patches' span that noise hides in a layer, below which a search keeps its strongest rows alone.
_FAINT = 0.5
#: Share of the squares at which a search on a straight line of weights of local steps ends.
_ROUGHLY = 1e-3


class PatchMatching:
    """Matches patches of candidates to the gradients of all convolutions and token layers with few enough of them.

    Entries of the gradients may be hidden, or have normal noise of known or unknown scale, for which the likelihood is
    that of `PatchPenalty`; with Laplace noise of known scale it is least squares, and with unknown noise of heavy tails
    that of `HeavyTails`. With `FeaturesOnly` as objective no update is computed at all, and an iteration is one forward
    and one backward pass up to the last of these layers.

    Args:
        layers: their names; default: all with fewer patches in the batch than entries of a patch.
        weight: above 0, of minus the log-likelihood in nats per pixel of the batch.
        tempered: above 0 and at most 1, share of the iterations over which the assumed noise falls to that of the
            update.
        patience: above 0 and at most 1, share of the iterations after which a search ends that is stuck.
        further: number of further starts while images are not certified, or while a single image leaves more of the
            gradients than known noise. It is counted anew after a start that certifies more images than those before.
            Without noise, a start begins with the images found if the batch has several, or if a single image nearly
            explains the gradients: with local steps every time, otherwise once from the same image. Otherwise see
            `approach`.
        approach: iterations of gradient matching from whose images the first further start of a single image begins, in
            turn with random images; 0: random images alone.
        least_hidden: not applicable if noise is expected to hide a smaller share of the patches' span (mean over
            layers); for attacks meant for strong noise only, as others find more behind weak noise.
        most_hidden: not applicable if noise is expected to hide at least this share, above `least_hidden`, at most 1;
            null: no limit, as the likelihood of all entries and a strong prior may tell more than singular values.
    """

    def __init__(
        self,
        layers: list[str] | None = None,
        weight: float = 1.0,
        tempered: float = 0.4,
        patience: float = 0.33,
        further: int = 1,
        approach: int = 200,
        least_hidden: float = 0.0,
        most_hidden: float | None = 1.0,
    ) -> None:
        valid = weight > 0 and 0 < tempered <= 1 and 0 < patience <= 1
        if (layers is not None and not layers) or not valid:
            raise ConfigError(
                "PatchMatching needs a weight above 0, tempered and patience above 0 and at most 1, and at least one "
                f"layer, or null for all; got {weight:g}, {tempered:g}, {patience:g} and {layers}"
            )
        if further < 0 or approach < 0:
            raise ConfigError(f"PatchMatching needs further and approach of at least 0; got {further} and {approach}")
        limit = 1.0 if most_hidden is None else most_hidden
        if not 0 <= least_hidden < limit <= 1:
            raise ConfigError(
                "PatchMatching needs least_hidden of at least 0 and below most_hidden, which is at most 1 or null; got "
                f"{least_hidden:g} and {most_hidden}"
            )
        self.layers, self.weight, self.tempered, self.patience = layers, weight, tempered, patience
        self.least_hidden, self.most_hidden = least_hidden, most_hidden
        self.further, self.approach = further, approach

    def prepare(self, observation: Observation) -> PatchPenalty:
        """Choose the layers and their rows with enough observed entries, and find the noise.

        Raises:
            UnsupportedModelError: no layer has few enough patches; too few entries are observed; or noise hides too
                much, by default everything: no singular value of the gradients is larger than those of noise.
            ConfigError: a layer is neither a plain convolution nor one of tokens, or has too many patches.
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
        defense, update = observation.defense, observation.update
        largest = None if defense is None else defense.largest_hidden(update)
        found = [observed_rows(observation, fit[name], n, largest) for name in self.layers or fit]
        repeats = n / observation.n_examples
        rows = tuple(replace(one, passes=int(repeats) if repeats.is_integer() else 1) for one in found if one)
        # fully observed, layers with as many patches as channels cost much and add little to others
        rows = tuple(one for one in rows if one.observed is not None or one.patches < len(one.values)) or rows
        # bounds on hidden entries only guide the search
        unbounded = tuple(replace(one, bound=None) for one in rows)
        judged = MatchedRows(unbounded, Passes(observation, [one.layer.name for one in rows]))
        enough = SOLVED / observation.n_examples
        settings = self.weight, self.tempered, self.patience
        penalty = PatchPenalty(observation, judged, judged, None, *settings, notes=(), enough=enough)
        if penalty.freedom < penalty.pixels:
            raise UnsupportedModelError(
                f"too few entries of the gradients are left: {penalty.freedom} equations for {penalty.pixels} pixels, "
                f"from {len(rows)} of {len(found)} layers"
            )
        note = f"patches matched to {penalty.freedom} equations from {len(rows)} layers"
        if penalty.partial:
            shares = [one.count / one.values.numel() for one in rows]
            note += f", in rows with {min(shares):.0%} to {max(shares):.0%} of their entries observed"
        noise, given = noise_of(observation, exact=False)
        if noise is None or (not given and (penalty.partial or penalty.local_steps or noise.std < penalty.stds[1])):
            # behind hidden entries and local steps small singular values are not those of noise
            if self.least_hidden:
                raise UnsupportedModelError("there is no noise to hide the maps")
            return _without_noise(penalty, unbounded if penalty.local_steps else rows, f"{note}; no noise")
        return self._behind_noise(penalty, rows, noise, given, note)

    def _behind_noise(
        self, penalty: PatchPenalty, rows: tuple[ObservedRows, ...], noise: Noise, given: bool, note: str
    ) -> PatchPenalty:
        """The same with noise, if it hides neither too much of the maps nor too little; `given`: it is known."""
        # an estimate may be the small singular values of gradients without noise
        exact = None if given else _without_noise(penalty, rows, note)
        how = f"{'known' if given else 'estimated'} standard deviation {noise.std:.3g}"
        if not given:
            # loaded only behind noise that is not known
            from lit_recon.attacks.updates.feature_maps.heavy_tails import UNIT, HeavyTails

            if tails := HeavyTails.of(penalty.judged, penalty.observation.update):
                penalty = replace(penalty, judged=tails.first, searched=tails.first, tails=tails)
                rows, noise = penalty.judged.rows, UNIT
                how = f"heavy tails, {tails.scale:.3g} once outliers are pulled in; rows are matched in units of it"
        hidden = {one.layer.name: hidden_span(one, noise.std) for one in rows if one.observed is None}
        share = mean(float(shares.mean()) for shares in hidden.values()) if hidden else 0.0
        if self.most_hidden is not None and share >= self.most_hidden:
            left = f"nothing is left of the maps: no layer's gradient has singular values above noise of {how}"
            if share < 1:
                left = (
                    f"too little is left of the maps: {share:.0%} of their span, at least "
                    f"most_hidden={self.most_hidden:g}, is hidden by noise of {how}"
                )
            raise UnsupportedModelError(f"{left}: match gradients with an image prior")
        if share < self.least_hidden:
            raise UnsupportedModelError(
                f"only {share:.0%} of the maps' span, less than least_hidden={self.least_hidden:g}, is hidden by noise "
                f"of {how}: take PatchMatching with least_hidden 0"
            )
        note = f"{note}; noise of {how}"
        if told := [f"{name} {float(shares.mean()):.2g}" for name, shares in hidden.items()]:
            note += f"; expected share of the patches' span that it hides: {', '.join(told)}"
        if penalty.tails is None:
            kept = [
                one.strongest() if one.layer.name in hidden and float(hidden[one.layer.name].mean()) < _FAINT else one
                for one in penalty.judged.rows
            ]
            penalty = replace(penalty, searched=MatchedRows(tuple(kept), penalty.judged.passes))
        return replace(penalty, noise=noise, notes=(note,), given=given, exact=exact)


def _without_noise(penalty: PatchPenalty, rows: tuple[ObservedRows, ...], note: str) -> PatchPenalty:
    """The same with the rows by which images are sought where gradients have no noise."""
    observation, chosen = penalty.observation, enough_layers(rows)
    if spans := spans_of_first_step(chosen, observation):
        first = MatchedRows(tuple(spans), Passes(observation, [one.layer.name for one in spans], steps=1))
        return replace(penalty, searched=first, notes=(f"{note}; sought by their patches in the first local step",))
    chosen = list(rows) if penalty.local_steps else chosen
    several = observation.n_examples > 1 and not penalty.local_steps
    completed = [completed_rows(one, observation) for one in chosen]
    if searched := [one for one in completed if one]:
        note += f"; hidden entries of {len(searched)} layers completed"
    if several and not coupled(observation):
        pairs = zip(completed, chosen, strict=True)
        known = [one or own.condensed(True) for one, own in pairs if one or own.observed is None]
        # images are told apart and sought one by one where spans are known
        if sum(one.equations for one in known) >= AMPLE * penalty.pixels:
            return _searching(penalty, known, note)
    if len(searched) < _ENOUGH_LAYERS:
        # single images are found more often with rows as they are; the weights on the way of steps are known nearly
        searched = [one or own.condensed(several) for one, own in zip(completed, chosen, strict=True)]
    elif observation.n_examples == 1 and not penalty.local_steps:
        ample = [one for one in searched if one.equations >= AMPLE * penalty.pixels]
        if ample:  # layers behind the first of them need not be passed
            searched = ample[:1]
            note += f"; sought by the patches of {searched[0].layer.name}"
    return _searching(penalty, searched, note)


def _searching(penalty: PatchPenalty, rows: list[ObservedRows], note: str) -> PatchPenalty:
    enough = _ROUGHLY if penalty.local_steps else penalty.enough
    passes = Passes(penalty.observation, [one.layer.name for one in rows])
    return replace(penalty, searched=MatchedRows(tuple(rows), passes), notes=(note,), enough=enough)


def hidden_span(rows: ObservedRows, std: float) -> Tensor:
    """Expected shares that noise hides of the patches' span, one per patch and row at most."""
    height, width = rows.values.shape
    found = singular_values(rows.values.cpu().double())[-rows.patches :]
    # finite matrices have singular values a little above the edge
    return torch.where(found > 1.05 * std * edge(height, width), hidden_shares(found, height, width, std), 1.0)
