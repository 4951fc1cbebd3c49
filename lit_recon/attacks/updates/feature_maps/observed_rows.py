"""Rows of the gradients of layers' weights, and the patches that explain them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.completion import CompletedMatrix, complete
from lit_recon.attacks.updates.feature_maps.convolutions import Convolution, TokenLayer, defense_hides, hidden_entries
from lit_recon.attacks.updates.feature_maps.input_map import Passes, centered
from lit_recon.attacks.updates.gradient_matching.parametrizations import cosines
from lit_recon.clients import LocalSteps
from lit_recon.clients.aggregate import one_client
from lit_recon.records import Observation
from lit_recon.solving import sum_of_squares

Layer = Convolution | TokenLayer

#: Added to the patches' Gram matrix, relative to the mean of its diagonal, against patches that are all zero.
RIDGE = 1e-12
#: The same for differences between the patches of several local steps: where these are nearly the same, their
#: differences only slow a search down.
_ALIKE = 1e-4
#: Length of rows, relative to the longest, up to which they may be rounding errors and count less.
SHORT = 1e-4
#: Added to the normal equations of a row with hidden entries, whose eigenvalues are at most 1; and refining solutions.
_ROW_RIDGE, _REFINEMENTS = 3e-6, 2
#: Newton steps at most for rows whose hidden entries are bounded: with few entries the first ones may go too far.
_ROUNDS = 20
#: Largest number of patches in a batch, and the least number of observed entries per patch.
_MOST_PATCHES, _PER_PATCH = 1024, 1.3
#: Zeros that count as observed: this share of all entries, and in weights that moved this multiple of the entries that
#: are no larger than the spacing of floating-point numbers there.
_CHANCE, _ROUNDED = 1e-4, 2.0
#: Rows with hidden entries: at most and at least this many of a layer, and multiplications for them per image.
_MOST_ROWS, _LEAST_ROWS, _COST = 128, 4, 3.5e7
#: Rows per patch that a search behind little noise keeps.
_STRONGEST = 2
#: Largest number of patches of an image for which hidden entries are completed: a second for 16, a minute for 64.
_MOST_COMPLETED = 16


@dataclass(frozen=True)
class LayerRows(ABC):
    """Rows to which the patches of candidates in front of a layer are matched.

    Attributes:
        layer: a convolution, or a linear layer of tokens.
        values: `(rows, c k k)`; zero where nothing was observed.
        observed: `(rows, c k k)` bool; None: everything.
        patches: number of patches that are matched.
        columns: indices of the columns that values have; None: all.
    """

    layer: Layer
    values: Tensor
    observed: Tensor | None
    patches: int
    columns: Tensor | None = None

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of matched entries."""

    @property
    @abstractmethod
    def squares(self) -> float:
        """The largest residual that patches can leave."""

    @abstractmethod
    def residual(self, patches: Tensor, held: bool = False) -> Tensor:
        """What patches `(patches, c k k)` leave, a sum of squares; differentiable once."""

    def seen(self, patches: Tensor) -> Tensor:
        """What of patches `(m, c k k)` values tell about."""
        return patches if self.columns is None else patches[:, self.columns]

    def outside(self, patches: Tensor) -> Tensor:
        """Squared distances `(m,)` of patches from the span of rows without hidden entries, relative to their mean."""
        own = self.seen(patches).double()
        basis = torch.linalg.qr(self.values.to(own).T)[0]
        shares: Tensor = (own - (own @ basis) @ basis.T).square().sum(1) / own.square().sum(1).mean()
        return shares


@dataclass(frozen=True)
class ObservedRows(LayerRows):
    """Rows of the gradient of a layer's weights, which patches have to explain.

    Attributes:
        patches: number of patches in the batch, in all passes.
        passes: number of passes that every image is used in, one after the other.
        ridge: on differences between these passes.
        bound: `(rows, c k k)`, largest magnitudes of hidden entries: what fits them with more counts as if they were
            observed there. Infinite: any, as for observed ones; None: nothing is known.
    """

    passes: int = 1
    ridge: float = _ALIKE
    bound: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of observed entries."""
        return self.values.numel() if self.observed is None else int(self.observed.sum())

    @property
    def squares(self) -> float:
        """Sum of the squares of the observed entries."""
        return float(self.values.square().sum())

    @property
    def equations(self) -> int:
        """Observed entries less unknown derivatives."""
        return self.count - len(self.values) * self.patches

    def condensed(self, orthonormal: bool) -> ObservedRows:
        """At most as many rows as patches, of the same span: patches explain all of them if they explain all of these.

        With singular values as lengths, patches leave as much of them as of all rows, but for rounding. If orthonormal,
        every direction of the span counts the same, though derivatives are up to 200 times smaller in some: searches
        near the images need fewer evaluations. Directions of the size of rounding stay shorter. Rows with hidden
        entries are only scaled to a mean square length of 1.
        """
        exact = self.values.double()
        if self.observed is not None:
            size = exact.square().sum(1).mean().sqrt()
            bound = None if self.bound is None else (self.bound / size).to(self.bound)
            return replace(self, values=(exact / size).to(self.values), bound=bound)
        squares, rows = _principal(exact, self.patches)
        if orthonormal:
            rows /= (squares + SHORT**2 * squares[-1]).sqrt()[:, None]
        return replace(self, values=rows.to(self.values))

    def strongest(self) -> ObservedRows:
        """The longest of the principal rows, some per patch: behind little noise the others hold hardly more than it.

        Rows with hidden entries stay as they are.
        """
        if self.observed is not None or len(self.values) <= _STRONGEST * self.patches:
            return self
        _, rows = _principal(self.values.double(), _STRONGEST * self.patches)
        return replace(self, values=rows.to(self.values))

    def residual(self, patches: Tensor, held: bool = False) -> Tensor:
        """Sum of the squares of what rows `(patches, c k k)` leave of the observed entries; differentiable once.

        Where hidden entries have a bound, also of what the best fit of both has above it.

        `held`: the ridge's own share is added; with several passes the derivative is exact only then.
        """
        patches = self.seen(patches)
        if self.passes > 1:
            # in the order of `Passes`: their mean first, then how they differ
            patches = (cosines(self.passes).to(patches) @ patches.view(self.passes, -1)).view_as(patches)
        with torch.no_grad():
            exact = patches.double()
            gram = exact @ exact.T
            alike = len(gram) // self.passes
            size = gram.diagonal()[:alike].mean().clamp_min(torch.finfo(torch.float64).tiny)
            ridge = torch.full_like(gram.diagonal(), RIDGE)
            ridge[alike:] = self.ridge
            factor = torch.linalg.cholesky(gram + size * ridge.diag())
            # an orthonormal basis loses nothing by single precision
            basis = torch.linalg.solve_triangular(factor, exact, upper=False).to(patches)
            values = self.values.to(patches)
            inside = values @ basis.T if self.observed is None else self._fit(values, basis)
            outside = self._outside(values, inside, basis)
            derivatives = torch.linalg.solve_triangular(factor, inside.double(), upper=False, left=False)
            slope = -2.0 * (derivatives.T.to(outside) @ outside)
            left = sum_of_squares(outside)
            if held and self.observed is None:
                own = float((ridge * derivatives.square()).sum())
                left = left + size * own
                slope[:alike] += 2.0 * own / alike * patches[:alike]
        # the best derivatives do not change to first order
        residual: Tensor = left + (slope * (patches - patches.detach())).sum()
        return residual

    def _outside(self, values: Tensor, inside: Tensor, basis: Tensor) -> Tensor:
        """What coefficients in an orthonormal basis leave of `values`, of hidden ones down to their bounds."""
        if self.bound is None:
            outside = torch.addmm(values, inside, basis, alpha=-1)
            return outside if self.observed is None else outside.mul_(self._counts)
        fit = inside @ basis
        bound = self.bound.to(fit)
        return fit.clamp(-bound, bound).sub_(fit).add_((values - fit).mul_(self._counts))

    def _fit(self, values: Tensor, basis: Tensor) -> Tensor:
        """Coefficients `(rows, patches)` of the observed `values` in an orthonormal `basis`, by least squares."""
        normal = _normals(basis, self._places) + _ROW_RIDGE * torch.eye(len(basis)).to(basis)
        if self.bound is not None:
            return self._fit_bounded(values, basis, normal)
        factor, inside = torch.linalg.cholesky(normal), values.new_zeros(len(values), len(basis))
        for _ in range(1 + _REFINEMENTS):
            rest = self._outside(values, inside, basis) @ basis.T
            inside = inside + torch.cholesky_solve(rest[..., None], factor)[..., 0]
        return inside

    def _fit_bounded(self, values: Tensor, basis: Tensor, normal: Tensor) -> Tensor:
        """The same where hidden entries count above their bounds: Newton steps on a convex function.

        Its second derivative is that of least squares on the observed entries and those above their bounds.
        """
        assert self.observed is not None
        inside = values.new_zeros(len(values), len(basis))
        factor, above = torch.linalg.cholesky(normal), torch.zeros_like(values, dtype=torch.bool)
        for number in range(_ROUNDS):
            outside = self._outside(values, inside, basis)
            now = (outside != 0) & ~self.observed
            changed = (now != above).any(1)
            if changed.any():
                factor[changed] = torch.linalg.cholesky(normal[changed] + _normals(basis, _places(now[changed])))
            elif number > _REFINEMENTS:
                break
            inside = inside + torch.cholesky_solve((outside @ basis.T)[..., None], factor)[..., 0]
            above = now
        return inside

    @cached_property
    def _counts(self) -> Tensor:
        """1 where an entry is observed, 0 elsewhere."""
        assert self.observed is not None
        return self.observed.to(self.values)

    @cached_property
    def _places(self) -> Tensor:
        """Places of the observed entries."""
        assert self.observed is not None
        return _places(self.observed)


def _principal(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Squared singular values of `rows`, ascending, and singular vectors of these lengths; the `most` largest."""
    squares, directions = torch.linalg.eigh(rows @ rows.T)
    return squares[-most:].clamp_min(0), directions[:, -most:].T @ rows


def _places(mask: Tensor) -> Tensor:
    """Places of the chosen entries of each row, `(rows, most)`; the number of columns where a row has no more."""
    rows, columns = mask.nonzero(as_tuple=True)
    counts = mask.sum(1)
    places = columns.new_full((len(mask), int(counts.max())), mask.shape[1])
    places[rows, torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]] = columns
    return places


def _normals(basis: Tensor, places: Tensor) -> Tensor:
    """Normal matrices `(rows, patches, patches)` of a basis `(patches, columns)` at some places of each row."""
    chosen = torch.cat([basis, basis.new_zeros(len(basis), 1)], dim=1).T.contiguous()[places]
    return chosen.mT @ chosen


Rows_co = TypeVar("Rows_co", bound=LayerRows, covariant=True)


@dataclass(frozen=True)
class MatchedRows(Generic[Rows_co]):
    """Rows of several layers, and the forward passes that give the patches of candidate images.

    Attributes:
        rows: of each layer.
        passes: with the inputs of these layers, in the same order.
    """

    rows: tuple[Rows_co, ...]
    passes: Passes

    @cached_property
    def squares(self) -> float:
        """The largest residual that images can leave: of observed entries, the sum of their squares."""
        return sum(one.squares for one in self.rows)

    def patches(self, images: Tensor) -> list[Tensor]:
        """Patches `(places of all images in all passes, c k k)` of images `(n, c, h, w)` in front of the layers."""
        return self._patches(self.passes(images))

    def _patches(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.rows, inputs, strict=True)
        return [one.layer.patches(maps).transpose(1, 2).flatten(0, 1) for one, maps in pairs]

    def residual(self, images: Tensor, held: bool = False) -> Tensor:
        """Sum of the squares that the patches of images leave of the rows.

        `held`: for searches. See `ObservedRows.residual`; known statistics of the batch count as much as the rows.
        """
        inputs, misfit = self.passes.with_misfit(images) if held else (self.passes(images), None)
        pairs = zip(self.rows, self._patches(inputs), strict=True)
        left = torch.stack([one.residual(own, held) for one, own in pairs]).sum()
        return left if misfit is None else left + self.squares * misfit

    def left(self, images: Tensor) -> float:
        """The share of the squares of the rows that the patches of images leave."""
        with torch.no_grad():
            return float(self.residual(images)) / self.squares


def completed_rows(rows: ObservedRows, observation: Observation) -> ObservedRows | None:
    """Orthonormal rows of the same span, with hidden entries completed, on the columns that these determine.

    None: nothing is hidden, a completion takes too long, or too little is left for one.
    """
    if rows.observed is None or rows.patches > _MOST_COMPLETED * observation.n_examples:
        return None
    gradient = without_censored(observation).update[f"{rows.layer.name}.weight"].detach().flatten(1)
    exact = gradient.cpu().double()
    # behind statistics of the batch the patches are used one direction less
    ranks = (rows.patches - 1, rows.patches) if centered(observation) else (rows.patches,)
    for rank in ranks:
        found = complete(exact, exact != 0, rank) if rank else "nothing to complete"
        if isinstance(found, CompletedMatrix):
            columns = found.known.nonzero().flatten()
            values = found.basis[columns].T.contiguous()
            return replace(
                rows, values=values.to(gradient), observed=None, columns=columns.to(gradient.device), bound=None
            )
    return None


def _zeros_by_chance(observation: Observation, layer: Layer, gradient: Tensor) -> float:
    """Number of zeros up to which no entry of the gradient `(channels, c k k)` counts as hidden by a defense."""
    if observation.defense is not None and not defense_hides(observation, f"{layer.name}.weight"):
        return gradient.numel()
    rule, _ = one_client(observation.operator)
    if not isinstance(rule, LocalSteps):
        return _CHANCE * gradient.numel()
    # weights move by multiples of their spacing: entries of 0 are about half as many as those of one multiple a step
    name = f"{layer.name}.weight"
    least = rule.least_change(name, observation.parameters[name]).flatten(1)
    return _CHANCE * gradient.numel() + _ROUNDED * int(((gradient != 0) & (gradient.abs() <= 1.5 * least)).sum())


def without_censored(observation: Observation) -> Observation:
    """The same where entries that the known defense has cut off at a largest value are zero, as dropped ones are."""
    if observation.defense is None:
        return observation
    censored = observation.defense.censored(observation.update)
    if not any(bool(mask.any()) for mask in censored.values()):
        return observation
    return replace(observation, update={n: v.masked_fill(censored[n], 0.0) for n, v in observation.update.items()})


def few_patches(layer: Layer, n_examples: int) -> bool:
    """Whether a batch has fewer patches than a patch has entries, and few enough to compute with."""
    return layer.places * n_examples <= min(_MOST_PATCHES, 0.9 * layer.patch_size)


def observed_rows(
    observation: Observation, layer: Layer, n_examples: int, largest: Mapping[str, float] | None = None
) -> ObservedRows | None:
    """The rows of a layer's gradient with enough observed entries, those with the most; None if there are too few.

    `largest`: by tensor the largest magnitude of hidden entries, see `Defense.largest_hidden`; default: not known.
    """
    name = f"{layer.name}.weight"
    released = gradient = observation.update[name].detach().flatten(1)
    patches = layer.places * n_examples
    # where most is zero, rows and columns may vanish altogether by pruning
    shown = without_censored(observation).update[name].detach().flatten(1)
    censored, gradient = bool((shown != gradient).any()), shown
    if not gradient.any():
        return None  # derivatives of zero explain it with any patches
    zeros = hidden_entries(gradient) if float((gradient == 0).double().mean()) < 0.5 else gradient == 0
    if not censored and int(zeros.sum()) <= _zeros_by_chance(observation, layer, gradient):
        return ObservedRows(layer, gradient, None, patches)
    counts = (gradient != 0).sum(1)
    cost = patches * (patches + 16) * max(1.0, float(counts.max()))
    most = min(_MOST_ROWS, int(n_examples * _COST / cost))
    order = counts.argsort(descending=True)[:most]
    chosen = order[counts[order] > _PER_PATCH * patches]
    if len(chosen) < _LEAST_ROWS:
        return None
    size, bound = math.inf if largest is None else largest[name], None
    if 0 < size < math.inf:
        # entries that were cut off at a largest value count as hidden, but are not small
        bound = torch.where(released[chosen] == 0, size, math.inf).to(gradient)
    return ObservedRows(layer, gradient[chosen], gradient[chosen] != 0, patches, bound=bound)


def enough_layers(rows: Sequence[ObservedRows]) -> list[ObservedRows]:
    """Of more than two layers with as many places every second one, from the first: neighbours tell nearly the same.

    Patches of single places, as of shortcuts, say little, but would count as much as others; without others they stay.
    """
    wide = [one for one in rows if isinstance(one.layer, TokenLayer) or math.prod(one.layer.kernel) > 1]
    alike: dict[int, list[ObservedRows]] = {}
    for one in wide or rows:
        alike.setdefault(one.layer.places, []).append(one)
    return [one for group in alike.values() for one in (group[::2] if len(group) > 2 else group)]
