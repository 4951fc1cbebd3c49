"""Searches in a known span of patches, in which those of every image of the batch lie by themselves.

Where the span of a layer's patches is known, from fully observed or completed rows, images can be sought one by one. A
quasi-Newton solver then learns the curvature of each by itself, and needs no steps that suit all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.input_map import centered
from lit_recon.attacks.updates.feature_maps.observed_rows import RIDGE, SHORT, LayerRows, MatchedRows, ObservedRows
from lit_recon.attacks.updates.noise import edge
from lit_recon.clients import LocalSteps
from lit_recon.clients.aggregate import one_client
from lit_recon.records import Observation

#: Singular values that are not those of rounding errors in weights, as a multiple of the largest of these.
_ROUNDED = 2.0
#: Length of rows, relative to the longest, that stand for no direction; those of rounding have about 1e-3.
_NOTHING = 0.01
#: RMSE up to which two images of a batch are the same.
_REPEATED = 0.05


@dataclass(frozen=True)
class SpanRows(LayerRows):
    """Orthonormal rows in whose span patches lie, besides others, such as those of other images or later local steps.

    Attributes:
        patches: number of those that lie in it.
        centered: number of groups of as many patches of which the span has only the differences from their mean, as
            behind statistics of a batch; 0: it has all of them.
        known: orthonormal rows that are taken out of patches, and are not in the span: patches of images that are
            known; None: no images are.
    """

    centered: int = 0
    known: Tensor | None = None

    @classmethod
    def of_first_step(cls, rows: ObservedRows, patches: int, centered: int, least: float) -> SpanRows:
        """The span of rows without hidden entries, but for directions with singular values up to `least`.

        Directions of rounding errors and weak ones of later steps make searches end in local minima.
        """
        exact = rows.condensed(False).values.double()
        lengths = exact.norm(dim=1)
        chosen = exact[lengths > max(least, SHORT * float(lengths.max()))]
        basis = torch.linalg.qr(chosen.T)[0].T.contiguous()
        return cls(rows.layer, basis.to(rows.values), None, patches - centered, centered=centered)

    @classmethod
    def of_some(cls, rows: LayerRows, patches: int, centered: int = 0, others: Tensor | None = None) -> SpanRows:
        """The span of rows without hidden entries, for some of its `patches`, less those of `others` `(m, c k k)`.

        `centered`: number of images that the patches are of, if the span has differences between those of each alone.
        """
        exact, known = rows.values.double(), None
        if centered:  # one direction less than patches: the last one is rounding
            lengths = exact.norm(dim=1)
            exact = exact[lengths > _NOTHING * lengths.max()]
        basis = torch.linalg.qr(exact.T)[0].T
        if others is not None and len(others):
            known = torch.linalg.qr(rows.seen(others).double().T)[0].T
            rest = basis - (basis @ known.T) @ known
            # the directions of the patches of others vanish, but for their errors
            basis = torch.linalg.svd(rest, full_matrices=False)[2][: max(patches, len(basis) - len(known))]
            known = known.contiguous().to(rows.values)
        values = basis.contiguous().to(rows.values)
        return cls(rows.layer, values, None, patches - centered, rows.columns, centered, known)

    @property
    def count(self) -> int:
        """Number of entries of the patches."""
        return self.patches * self.values.shape[1]

    @property
    def squares(self) -> float:
        return float(self.patches)

    def seen(self, patches: Tensor) -> Tensor:
        own = super().seen(patches)
        return own if self.known is None else own - (own @ self.known.T) @ self.known

    def residual(self, patches: Tensor, held: bool = False) -> Tensor:
        """Sum of the squared sines of the angles between the span of patches and that of the rows; differentiable once.

        Of an orthonormal basis of the patches' span, it is what lies outside the other one.
        """
        patches = self.seen(patches)
        if self.centered:
            patches = _differences(patches, len(patches) // self.centered)
        with torch.no_grad():
            exact = patches.double()
            gram = exact @ exact.T
            size = gram.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
            factor = torch.linalg.cholesky(gram + RIDGE * size * torch.eye(len(gram)).to(gram))
            basis = torch.linalg.solve_triangular(factor, exact, upper=False).to(patches)
            rows = self.values.to(patches)
            outside = torch.addmm(basis, basis @ rows.T, rows, alpha=-1)
            turned = torch.addmm(outside, outside @ basis.T, basis, alpha=-1)
            slope = 2.0 * torch.linalg.solve_triangular(factor.T, turned.double(), upper=True).to(patches)
        residual: Tensor = outside.square().sum() + (slope * (patches - patches.detach())).sum()
        return residual

    def shares(self, patches: Tensor) -> Tensor:
        """Shares `(n,)` of the squares of patches `(n m, c k k)` of `n` images that are outside of the span.

        Where it has differences, of those between the patches of each image and their mean.
        """
        own = self.seen(patches).unflatten(0, (-1, self.patches + self.centered))
        own = own - own.mean(1, keepdim=True) if self.centered else own
        outside = own - (own @ self.values.T) @ self.values
        left, whole = (one.square().sum((1, 2)) for one in (outside, own))
        shares: Tensor = left / whole.clamp_min(torch.finfo(own.dtype).tiny)
        return shares


def _differences(patches: Tensor, size: int) -> Tensor:
    """Patches less the mean of their group of `size`; without the last of each group, which follows from the others."""
    groups = patches.unflatten(0, (-1, size))
    differences: Tensor = (groups - groups.mean(1, keepdim=True))[:, :-1].flatten(0, 1)
    return differences


def for_some(searched: MatchedRows[LayerRows], n: int, others: Tensor | None = None) -> MatchedRows[SpanRows]:
    """A search for `n` images of the batch by themselves, as others `(m, c, h, w)` are known.

    Where statistics of the batch take the mean patch out of the span, differences of each image stay in it.
    """
    passes = searched.passes.of(n)
    patches: list[Tensor] | list[None] = [None] * len(searched.rows)
    if others is not None and len(others):
        with torch.no_grad():
            patches = MatchedRows(searched.rows, searched.passes.of(len(others))).patches(others)
    pairs = zip(searched.rows, patches, strict=True)
    rows = [SpanRows.of_some(one, one.layer.places * n, passes.means, own) for one, own in pairs]
    return MatchedRows(tuple(rows), passes)


def spanned(searched: MatchedRows[LayerRows]) -> bool:
    """Whether rows span the patches of all images, or differences of them, and those of single ones say something."""
    rows, centered = searched.rows, searched.passes.means > 0
    return all(_spans(one, centered) and one.layer.places > centered for one in rows)


def _spans(rows: LayerRows, missing: int) -> bool:
    """Whether rows as long as singular values span all patches, or their differences, of fewer directions.

    Channels that are inactive in all images, and places without a derivative, leave rows of zero or of rounding.
    """
    lengths = rows.values.norm(dim=1)
    rank = int((lengths > _NOTHING * lengths.max()).sum())
    return rows.observed is None and rank >= rows.patches - missing


def outside_shares(searched: MatchedRows[SpanRows], images: Tensor) -> Tensor:
    """Shares `(n,)` of the patches of single images `(n, c, h, w)` outside of their spans, the mean over layers."""
    pairs = zip(searched.rows, searched.passes.of(len(images))(images), strict=True)
    shares = [one.shares(one.layer.patches(maps).transpose(1, 2).flatten(0, 1)) for one, maps in pairs]
    return torch.stack(shares).mean(0)


def misplaced_images(searched: MatchedRows[LayerRows], images: Tensor, most: float) -> Tensor | None:
    """Images `(n,)` with more than a share of their patches outside the known spans of rows, and repeated ones.

    None where no layer's rows span all patches.
    """
    missing = searched.passes.lost
    if not any(_spans(one, missing) for one in searched.rows):
        return None
    with torch.no_grad():
        patches = searched.patches(images)
    if searched.passes.means:  # statistics of the batch take the mean patch out of the span
        groups = [own.unflatten(0, (searched.passes.means, -1)) for own in patches]
        patches = [(own - own.mean(1, keepdim=True)).flatten(0, 1) for own in groups]
    pairs = [(one, own) for one, own in zip(searched.rows, patches, strict=True) if _spans(one, missing)]
    shares = [one.outside(own).view(len(images), -1).mean(1) for one, own in pairs]
    misplaced = torch.stack(shares).mean(0) > most
    for i in range(1, len(images)):
        same = (images[:i] - images[i]).square().flatten(1).mean(1).sqrt() < _REPEATED
        misplaced[i] |= (same & ~misplaced[:i]).any()
    return misplaced


def spans_of_first_step(rows: Sequence[ObservedRows], observation: Observation) -> list[SpanRows]:
    """The spans of layers' gradients that hold the patches of the first local step of all images; empty: none do.

    The update is the sum over steps of derivatives times patches. Its rows span those of every step as long as there
    are no more of them together than rows, whatever the rate: no other weights need to be known than the first ones.
    """
    rule, clients = one_client(observation.operator)
    if not isinstance(rule, LocalSteps) or rule.optimizer != "sgd" or rule.batches > 1:
        return []
    groups, spans = clients if centered(observation) else 0, []
    for one in rows:
        if one.observed is None and one.patches <= len(one.values):
            name = f"{one.layer.name}.weight"
            change = rule.least_change(name, observation.parameters[name]).square().mean().sqrt()
            rounding = float(change) / (12 * rule.steps) ** 0.5 * edge(*one.values.shape)
            patches = one.layer.places * observation.n_examples
            found = SpanRows.of_first_step(one, patches, groups, _ROUNDED * rounding)
            if len(found.values) >= found.patches:
                spans.append(found)
    return spans
