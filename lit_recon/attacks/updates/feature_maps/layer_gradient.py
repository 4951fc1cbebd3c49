"""The gradient of a layer's weights: as a function of its input, behind which everything is known; and observed rows.

It is the sum over examples and positions of the derivative in the output times the input patch. A norm with statistics
of the batch or of the example makes that derivative depend on the input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.completion import CompletedMatrix, complete
from lit_recon.attacks.updates.feature_maps.convolutions import Convolution, TokenLayer, hidden_entries
from lit_recon.attacks.updates.gradient_matching.parametrizations import cosines
from lit_recon.clients import LocalSteps
from lit_recon.clients.aggregate import one_client
from lit_recon.records import Observation

Layer = Convolution | TokenLayer

#: Added to the patches' Gram matrix, relative to the mean of its diagonal, against patches that are all zero.
_RIDGE = 1e-12
#: The same for differences between the patches of several local steps: where these are nearly the same, their
#: differences only slow a search down.
_ALIKE = 1e-4
#: Length of rows, relative to the longest, up to which they may be rounding errors and count less.
_SHORT = 1e-4
#: Added to the normal equations of a row with hidden entries, whose eigenvalues are at most 1; and refining solutions.
_ROW_RIDGE, _REFINEMENTS = 3e-6, 2
#: Largest number of patches in a batch, and the least number of observed entries per patch.
_MOST_PATCHES, _PER_PATCH = 1024, 1.3
#: Zeros that count as observed: this share of all entries, and in weights that moved this multiple of the entries that
#: are no larger than the spacing of floating-point numbers there.
_CHANCE, _ROUNDED = 1e-4, 2.0
#: Rows with hidden entries: at most and at least this many of a layer, and multiplications for them per image.
_MOST_ROWS, _LEAST_ROWS, _COST = 128, 4, 3.5e7
#: Largest number of patches of an image for which hidden entries are completed: a second for 16, a minute for 64.
_MOST_COMPLETED = 16


@dataclass(frozen=True)
class Statistics:
    """Mean and variance by which a norm divides: of the batch, or per example over `groups` groups of channels.

    Attributes:
        groups: of channels; None for statistics of the batch, with one group per channel.
        eps: added to the variance.
    """

    groups: int | None
    eps: float

    def mean(self, values: Tensor) -> Tensor:
        """Of `values (n, c, h, w)`, such that it can be subtracted from them."""
        if self.groups is None:
            return values.mean((0, 2, 3), keepdim=True)
        n, c = values.shape[:2]
        means = values.reshape(n, self.groups, -1).mean(2)
        return means.repeat_interleave(c // self.groups, 1)[:, :, None, None]

    def normalized(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized outputs of the convolution, and the factor that normalizes them."""
        centred = outputs - self.mean(outputs)
        factor = (self.mean(centred.square()) + self.eps).rsqrt()
        return centred * factor, factor

    def backward(self, outputs: Tensor, derivative: Tensor) -> Tensor:
        """Derivative in the convolution's outputs from that in their normalized values; symmetric in the latter."""
        normalized, factor = self.normalized(outputs)
        return factor * (derivative - self.mean(derivative) - normalized * self.mean(derivative * normalized))

    def change(self, outputs: Tensor, derivative: Tensor, moved: Tensor) -> Tensor:
        """First-order change of `backward` when the outputs move."""
        normalized, factor = self.normalized(outputs)
        turned = self.backward(outputs, moved)
        inner = turned * self.mean(derivative * normalized) + normalized * self.mean(derivative * turned)
        return -factor * (self.mean(normalized * moved) * self.backward(outputs, derivative) + inner)

    def change_transposed(self, outputs: Tensor, derivative: Tensor, other: Tensor) -> Tensor:
        """The transpose of `change` in `moved`."""
        normalized, factor = self.normalized(outputs)
        inner = other * self.mean(derivative * normalized) + derivative * self.mean(normalized * other)
        stretched = normalized * self.mean(self.backward(outputs, derivative) * other)
        return -factor * (stretched + self.backward(outputs, inner))


@dataclass(frozen=True)
class Known:
    """What is known about one convolution.

    Attributes:
        layer: the convolution.
        weight, bias: its parameters; the bias is None or `(channels,)`.
        gradient: observed, of its weight.
        derivative: of the loss in its output or, with `statistics`, in the normalized output; `(n, channels, h, w)`.
        statistics: of the norm behind; None where there is none, or one with fixed statistics.
    """

    layer: Convolution
    weight: Tensor
    bias: Tensor | None
    gradient: Tensor
    derivative: Tensor
    statistics: Statistics | None

    def outputs(self, maps: Tensor) -> Tensor:
        return nn.functional.conv2d(maps, self.weight, self.bias, self.layer.stride, self.layer.padding)

    def backward(self, maps: Tensor, derivative: Tensor) -> Tensor:
        """Derivative in the output for input maps."""
        return derivative if self.statistics is None else self.statistics.backward(self.outputs(maps), derivative)

    def patches(self, maps: Tensor) -> Tensor:
        """`(n, c kernel, places)`."""
        return self.layer.patches(maps)

    def predicted(self, maps: Tensor) -> Tensor:
        """The weight's gradient for input maps, differentiable in them."""
        derivative = self.backward(maps, self.derivative)
        return torch.einsum("nop,nkp->ok", derivative.flatten(2), self.patches(maps)).view_as(self.weight)

    @property
    def taps(self) -> int:
        return self.layer.kernel[0] * self.layer.kernel[1]


class Linearized:
    """The linear part of a convolution's weight gradient at input maps, as equations, and its transpose."""

    def __init__(self, known: Known, maps: Tensor) -> None:
        self.known, self.patches = known, known.patches(maps)
        self.outputs = known.outputs(maps)
        self.derivative = known.backward(maps, known.derivative)

    def __call__(self, change: Tensor) -> Tensor:
        one = self.known
        inner = nn.functional.conv2d(change, one.weight, None, one.layer.stride, one.layer.padding)
        found = torch.einsum("nop,nkp->ok", self.derivative.flatten(2), one.patches(change))
        if one.statistics is not None:
            turned = one.statistics.change(self.outputs, one.derivative, inner)
            found = found + torch.einsum("nop,nkp->ok", turned.flatten(2), self.patches)
        return rows_of(found.view_as(one.weight))

    def transposed(self, rows: Tensor) -> Tensor:
        one = self.known
        kernels = rows_to_kernels(rows, one.layer.channels)
        patches = torch.einsum("ok,nop->nkp", kernels, self.derivative.flatten(2))
        if one.statistics is not None:
            inner = torch.einsum("ok,nkp->nop", kernels, self.patches).view_as(self.outputs)
            turned = one.statistics.change_transposed(self.outputs, one.derivative, inner)
            patches = patches + torch.einsum("ok,nop->nkp", one.weight.flatten(1), turned.flatten(2))
        geometry = {"kernel_size": one.layer.kernel, "padding": one.layer.padding, "stride": one.layer.stride}
        return nn.functional.fold(patches, one.layer.shape[1:], **geometry)


def rows_of(tensor: Tensor) -> Tensor:
    """Gradients `(channels, c, rows, columns)` as equations `(channels kernel, c)`."""
    return tensor.permute(0, 2, 3, 1).flatten(0, 2)


def rows_to_kernels(rows: Tensor, channels: int) -> Tensor:
    """Equations `(channels kernel, c)` as `(channels, c kernel)`, the order of patches."""
    return rows.reshape(channels, -1, rows.shape[1]).transpose(1, 2).flatten(1)


@dataclass(frozen=True)
class ObservedRows:
    """Rows of the gradient of a layer's weights.

    Attributes:
        layer: a convolution, or a linear layer of tokens.
        values: `(rows, c k k)`; zero where nothing was observed.
        observed: `(rows, c k k)` bool; None: everything.
        patches: number of patches in the batch, in all passes.
        passes: number of passes that every image is used in, one after the other.
        ridge: on differences between these passes.
        columns: indices of the columns that values have; None: all.
    """

    layer: Layer
    values: Tensor
    observed: Tensor | None
    patches: int
    passes: int = 1
    ridge: float = _ALIKE
    columns: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of observed entries."""
        return self.values.numel() if self.observed is None else int(self.observed.sum())

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
            return replace(self, values=(exact / exact.square().sum(1).mean().sqrt()).to(self.values))
        squares, directions = torch.linalg.eigh(exact @ exact.T)
        squares, directions = squares[-self.patches :].clamp_min(0), directions[:, -self.patches :]
        rows = directions.T @ exact
        if orthonormal:
            rows /= (squares + _SHORT**2 * squares[-1]).sqrt()[:, None]
        return replace(self, values=rows.to(self.values))

    def residual(self, patches: Tensor, held: bool = False) -> Tensor:
        """Sum of the squares of what rows `(patches, c k k)` leave of the observed entries; differentiable once.

        `held`: the ridge's own share is added; with several passes the derivative is exact only then.
        """
        if self.columns is not None:
            patches = patches[:, self.columns]
        if self.passes > 1:
            # in the order of `Passes`: their mean first, then how they differ
            patches = (cosines(self.passes).to(patches) @ patches.view(self.passes, -1)).view_as(patches)
        with torch.no_grad():
            exact = patches.double()
            gram = exact @ exact.T
            alike = len(gram) // self.passes
            size = gram.diagonal()[:alike].mean().clamp_min(torch.finfo(torch.float64).tiny)
            ridge = torch.full_like(gram.diagonal(), _RIDGE)
            ridge[alike:] = self.ridge
            factor = torch.linalg.cholesky(gram + size * ridge.diag())
            # an orthonormal basis loses nothing by single precision
            basis = torch.linalg.solve_triangular(factor, exact, upper=False).to(patches)
            values = self.values.to(patches)
            inside = values @ basis.T if self.observed is None else self._fit(values, basis)
            outside = torch.addmm(values, inside, basis, alpha=-1)
            if self.observed is not None:
                outside *= self._counts
            derivatives = torch.linalg.solve_triangular(factor, inside.double(), upper=False, left=False)
            slope = -2.0 * (derivatives.T.to(outside) @ outside)
            left = outside.square().sum()
            if held and self.observed is None:
                own = float((ridge * derivatives.square()).sum())
                left = left + size.to(left) * own
                slope[:alike] += 2.0 * own / alike * patches[:alike]
        # the best derivatives do not change to first order
        residual: Tensor = left + (slope * (patches - patches.detach())).sum()
        return residual

    def _fit(self, values: Tensor, basis: Tensor) -> Tensor:
        """Coefficients `(rows, patches)` of the observed `values` in an orthonormal `basis`, by least squares."""
        chosen = torch.cat([basis, basis.new_zeros(len(basis), 1)], dim=1).T.contiguous()[self._places]
        normal = chosen.mT @ chosen + _ROW_RIDGE * torch.eye(len(basis)).to(chosen)
        factor, inside = torch.linalg.cholesky(normal), values.new_zeros(len(chosen), len(basis))
        for _ in range(1 + _REFINEMENTS):
            rest = torch.addmm(values, inside, basis, alpha=-1).mul_(self._counts) @ basis.T
            inside = inside + torch.cholesky_solve(rest[..., None], factor)[..., 0]
        return inside

    @cached_property
    def _counts(self) -> Tensor:
        """1 where an entry is observed, 0 elsewhere."""
        assert self.observed is not None
        return self.observed.to(self.values)

    @cached_property
    def _places(self) -> Tensor:
        """Places of the observed entries of each row, `(rows, most)`; the number of columns where a row has no more."""
        assert self.observed is not None
        columns = self.observed.shape[1]
        places = torch.where(self.observed, torch.arange(columns, device=self.observed.device), columns)
        return places.sort(dim=1)[0][:, : int(self.observed.sum(1).max())]


def completed_rows(rows: ObservedRows, observation: Observation) -> ObservedRows | None:
    """Orthonormal rows of the same span, with hidden entries completed, on the columns that these determine.

    None: nothing is hidden, a completion takes too long, or too little is left for one.
    """
    if rows.observed is None or rows.patches > _MOST_COMPLETED * observation.n_examples:
        return None
    gradient = without_censored(observation).update[f"{rows.layer.name}.weight"].detach().flatten(1)
    exact = gradient.cpu().double()
    # behind statistics of the batch the patches are used one direction less
    ranks = (rows.patches - 1, rows.patches) if observation.operator.batch_norm == "train" else (rows.patches,)
    for rank in ranks:
        found = complete(exact, exact != 0, rank) if rank else "nothing to complete"
        if isinstance(found, CompletedMatrix):
            columns = found.known.nonzero().flatten()
            values = found.basis[columns].T.contiguous()
            return replace(rows, values=values.to(gradient), observed=None, columns=columns.to(gradient.device))
    return None


def _zeros_by_chance(observation: Observation, layer: Layer, gradient: Tensor) -> float:
    """Number of zeros up to which no entry of the gradient `(channels, c k k)` counts as hidden by a defense."""
    if observation.defense is not None:
        seen = {f"{layer.name}.weight": gradient}
        released = observation.defense.simulate({name: torch.ones_like(value) for name, value in seen.items()}, seen)
        if all(bool(value.all()) for value in released.values()):
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


def observed_rows(observation: Observation, layer: Layer, n_examples: int) -> ObservedRows | None:
    """The rows of a layer's gradient with enough observed entries, those with the most; None if there are too few."""
    gradient = observation.update[f"{layer.name}.weight"].detach().flatten(1)
    patches = layer.places * n_examples
    # where most is zero, rows and columns may vanish altogether by pruning
    shown = without_censored(observation).update[f"{layer.name}.weight"].detach().flatten(1)
    censored, gradient = bool((shown != gradient).any()), shown
    zeros = hidden_entries(gradient) if float((gradient == 0).double().mean()) < 0.5 else gradient == 0
    if not censored and int(zeros.sum()) <= _zeros_by_chance(observation, layer, gradient):
        return ObservedRows(layer, gradient, None, patches)
    counts = (gradient != 0).sum(1)
    cost = patches * (patches + 16) * max(1.0, float(counts.max()))
    most = min(_MOST_ROWS, int(n_examples * _COST / cost))
    order = counts.argsort(descending=True)[:most]
    chosen = order[counts[order] > _PER_PATCH * patches]
    return ObservedRows(layer, gradient[chosen], gradient[chosen] != 0, patches) if len(chosen) >= _LEAST_ROWS else None
