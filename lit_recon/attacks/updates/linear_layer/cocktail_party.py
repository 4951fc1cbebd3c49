"""The Cocktail Party Attack: source separation of the images mixed in a first fully connected layer's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.attacks.updates.labels.recovery import LabelRecovery
from lit_recon.attacks.updates.linear_layer.first_layer import (
    LabelledAttack,
    first_layer,
    mean_color,
    to_inputs,
    to_pixels,
)
from lit_recon.attacks.updates.linear_layer.sparse_derivatives import SOLVED, completed, refined
from lit_recon.attacks.updates.linear_layer.unmixing import Mixtures, UnmixingTerms, mixtures_of, rank, unmix
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Observation, Reconstruction


class CocktailPartyAttack(LabelledAttack):
    """Separates the images of a batch that are mixed in the gradient of a fully connected first layer.

    Every row of the weight's gradient is a linear mixture of the batch's images, and the bias's gradient the same
    mixture of ones, which determines scale, sign and brightness of a separated image. After a ReLU, zeros of
    derivatives improve the separation. After a fit to the whole update it is often exact. The layer needs a bias and as
    many neurons as there are images, two or more.

    Args:
        terms: penalties on the separated images.
        steps, lr: of the separation.
        refinements: rounds of the fit to the whole update; 0 returns the separation, without the use of zeros.
        restarts: independent starts; the one that explains the update best is returned.
        labels: recovery of the batch's labels; they are assigned to images by their effect on the gradient.
        seed: of the first start; start i uses `seed + i`.

    Source: [Kariyappa2023]; volume, bounds, the use of the bias and of zeros, and the fit to the update are ours.
    """

    def __init__(
        self,
        terms: UnmixingTerms | None = None,
        steps: int = 1200,
        lr: float = 0.02,
        refinements: int = 40,
        restarts: int = 1,
        labels: LabelRecovery | None = None,
        seed: int = 0,
    ) -> None:
        if steps < 1 or restarts < 1 or refinements < 0 or lr <= 0:
            raise ConfigError(
                "CocktailPartyAttack needs steps and restarts of at least 1, refinements of at least 0 and lr above "
                f"0; got {steps}, {restarts}, {refinements}, {lr:g}"
            )
        super().__init__(labels)
        self.terms = terms or UnmixingTerms()
        self.steps, self.lr, self.refinements, self.restarts, self.seed = steps, lr, refinements, restarts, seed

    def check_one(self, seen: Observation) -> None:
        layer = first_layer(seen)
        if seen.n_examples == 1:
            raise ThreatModelError(
                "CocktailPartyAttack separates the images of a batch, and this client has one: use "
                "AnalyticInversion, which is exact"
            )
        if seen.n_examples > min(layer.weight.shape):
            raise UnsupportedModelError(
                f"CocktailPartyAttack needs at least as many neurons and pixels as images; {layer.name}.weight is "
                f"{tuple(layer.weight.shape)}, and the client has {seen.n_examples} images: attack smaller "
                "batches or a wider layer"
            )
        self.labels.check(seen)

    def reconstruct(self, seen: Observation) -> Reconstruction:
        layer = first_layer(seen)
        labels, notes = self.labels(seen)
        gray = mean_color(seen.n_examples, seen).to(seen.like)
        if rank(layer.rows) < 2:
            nothing = "separation: the first layer's gradient mixes fewer than two images; returned as mean color"
            return Reconstruction(gray, labels, 1.0, notes=(*notes, nothing))
        mixtures = mixtures_of(layer.weight, layer.bias, seen.n_examples)
        missing = seen.n_examples - mixtures.n_sources
        tried = []
        for seed in range(self.seed, self.seed + self.restarts):
            guess = self._images(mixtures, seed, seen)
            if not torch.isfinite(guess).all():
                continue
            guess = torch.cat([guess, mean_color(missing, seen)])
            rounds = 0 if missing else self.refinements
            starts = [(guess, 0)]
            if rounds:

                def separate(rest: Mixtures, attempt: int, seed: int = seed) -> Tensor:
                    return self._images(rest, seed + attempt, seen)

                improved, proved = completed(guess, labels, layer, separate)
                starts = [(improved, proved), *starts] if proved else starts
            for start, proved in starts:
                tried.append((*refined(start, labels, layer, rounds), proved))
                if tried[-1][2] < SOLVED:
                    break
        if not tried:
            lost = "separation: no finite result, as when a defense removes nearly all entries; returned as mean color"
            return Reconstruction(gray, labels, 1.0, notes=(*notes, lost))
        images, labels, loss, curve, proved = min(tried, key=lambda found: found[2])
        state = "solved up to rounding" if loss < SOLVED else f"left a relative residual of {loss:.0e}"
        if proved:
            notes = (*notes, f"separation: derivatives of {proved} of {seen.n_examples} images certified by zeros")
        notes = (*notes, f"separation: {state} after {len(curve) - 1} rounds of the fit to the update")
        if missing:
            mixed = f"the gradient mixes only {mixtures.n_sources} of {seen.n_examples} images independently"
            notes = (*notes, f"separation: {mixed}; the others are returned as the data's mean color")
        trace = {"step": [float(step) for step in range(len(curve))], "loss": curve}
        return Reconstruction(images.to(seen.like), labels, loss, trace, notes)

    def _images(self, mixtures: Mixtures, seed: int, seen: Observation) -> Tensor:
        """Separated images `(j, c, h, w)` in [0, 1]."""
        black = torch.zeros(1, *seen.image_shape, dtype=torch.float64)
        limits = to_inputs(black, seen)[0], to_inputs(black + 1, seen)[0]
        sources = unmix(mixtures, self.terms, seen.image_shape, limits, self.steps, self.lr, seed)
        return to_pixels(sources, seen).clamp(0, 1)
