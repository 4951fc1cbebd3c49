"""Equations for the input of a convolution behind which everything is known, and their solution.

The gradient of its weights, the sum over places of the derivative D in its output times the input patch, is linear in
the input: one equation for every output channel and kernel entry, one unknown for every place. A norm with statistics
of the batch or of the example makes D depend on the input: then Gauss-Newton steps solve them. Such a norm hides the
scale of the input and, behind stride two, one constant per channel; biases of the norm before and zeros show them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution, patch_system

#: Relative rounding errors of a float32 gradient.
_ROUNDING = 3e-7
#: Smallest share of the unexplained gradient that a wrong zero explains; wrong zeros that are looked for.
_EXPLAINS, WRONG_ZEROS = 0.03, 40


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
        means = values.reshape(len(values), self.groups, -1).mean(2)
        return means.repeat_interleave(values.shape[1] // self.groups, 1)[:, :, None, None]

    def normalized(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized outputs of the convolution, and the factor that normalizes them."""
        centered = outputs - self.mean(outputs)
        factor = (self.mean(centered.square()) + self.eps).rsqrt()
        return centered * factor, factor

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
        derivative = self.backward(maps, self.derivative).flatten(2)
        return torch.einsum("nop,nkp->ok", derivative, self.patches(maps)).view_as(self.weight)

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
            turned = one.statistics.change(self.outputs, one.derivative, inner).flatten(2)
            found = found + torch.einsum("nop,nkp->ok", turned, self.patches)
        return rows_of(found.view_as(one.weight))

    def transposed(self, rows: Tensor) -> Tensor:
        one = self.known
        kernels = rows_to_kernels(rows, one.layer.channels)
        patches = torch.einsum("ok,nop->nkp", kernels, self.derivative.flatten(2))
        if one.statistics is not None:
            inner = torch.einsum("ok,nkp->nop", kernels, self.patches).view_as(self.outputs)
            turned = one.statistics.change_transposed(self.outputs, one.derivative, inner)
            patches = patches + torch.einsum("ok,nop->nkp", one.weight.flatten(1), turned.flatten(2))
        size, padding, stride = one.layer.shape[1:], one.layer.padding, one.layer.stride
        return nn.functional.fold(patches, size, one.layer.kernel, padding=padding, stride=stride)


def rows_of(tensor: Tensor) -> Tensor:
    """Gradients `(channels, c, rows, columns)` as equations `(channels kernel, c)`."""
    return tensor.permute(0, 2, 3, 1).flatten(0, 2)


def rows_to_kernels(rows: Tensor, channels: int) -> Tensor:
    """Equations `(channels kernel, c)` as `(channels, c kernel)`, the order of patches."""
    return rows.reshape(channels, -1, rows.shape[1]).transpose(1, 2).flatten(1)


@dataclass(frozen=True)
class Solved:
    """Maps `(n, c, h, w)`, their expected relative error, and which entries are zero or may be."""

    maps: Tensor
    error: float
    doubtful: Tensor


#: Maps, residual, system, and Cholesky factor of the weighted normal matrix.
_Fit = tuple[Tensor, Tensor, Tensor, Tensor]


class Group:
    """The equations of all convolutions that share one input of shape `(n, c, h, w)`.

    Args:
        known: about each of them.
        shape: of the input.
    """

    def __init__(self, known: list[Known], shape: tuple[int, int, int, int]) -> None:
        self.known, self.shape = known, shape
        self.right = torch.cat([rows_of(one.gradient) for one in known])
        owners, first = [], 0
        for one in known:
            owners.append(torch.arange(first, first + one.layer.channels).repeat_interleave(one.taps))
            first += one.layer.channels
        self.owner, self.channels = torch.cat(owners), first
        squares = self._by_channel(self.right)
        self.energy = squares.mean()
        #: rounding is relative to the gradient of an output channel
        self.alike = self.energy / (squares + 1e-3 * self.energy)
        self.depends = any(one.statistics is not None for one in known)

    def _by_channel(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(self.channels).index_add_(0, self.owner, rows.square().sum(1))

    def columns(self, maps: Tensor) -> Tensor:
        """Maps as unknowns `(n h w, c)`."""
        return maps.transpose(0, 1).flatten(1).T

    def maps(self, columns: Tensor) -> Tensor:
        """The inverse of `columns`."""
        n, c, h, w = self.shape
        return columns.T.reshape(c, n, h, w).transpose(0, 1)

    def system(self, maps: Tensor | None, derivatives: list[Tensor] | None = None) -> Tensor:
        """Matrix from the unknowns of one input channel to its equations, with the derivatives of given maps."""
        given = derivatives
        if given is None:
            given = [one.derivative if maps is None else one.backward(maps, one.derivative) for one in self.known]
        return torch.cat([patch_system(one.layer, value) for one, value in zip(self.known, given, strict=True)])

    def residual(self, maps: Tensor) -> Tensor:
        """Equations `(rows, c)` that maps leave unexplained."""
        return self.right - torch.cat([rows_of(one.predicted(maps)) for one in self.known])

    def fit(self, weights: Tensor, start: Tensor | None, steps: int = 12) -> _Fit | None:
        """Least squares with weights of the output channels.

        Args:
            weights: `(channels,)`.
            start: maps; not needed where no norm depends on its input.
            steps: Gauss-Newton steps at most, where one does.

        Returns:
            Maps, residual, system, and Cholesky factor of the weighted normal matrix; None if it is singular.
        """
        roots = weights[self.owner].sqrt()[:, None]
        if not self.depends:
            system = self.system(None)
            factor = _factor(system * roots, 0.0)
            if factor is None:
                return None
            solution = torch.cholesky_solve((system * roots).T @ (self.right * roots), factor)
            return self.maps(solution), self.right - system @ solution, system, factor
        assert start is not None
        maps, residual = start, self.residual(start)
        found: tuple[Tensor, Tensor] | None = None
        for _ in range(steps):
            system = self.system(maps)
            factor = _factor(system * roots, 1e-11)
            if factor is None:
                return None
            found = system, factor
            before = float((residual * roots).norm())
            step, length = self._newton_step(maps, residual, roots, factor), 1.0
            while length > 1e-3:
                trial = self.residual(maps + length * step)
                if float((trial * roots).norm()) < before:
                    maps, residual = maps + length * step, trial
                    break
                length /= 2
            if float((residual * roots).norm()) > 0.5 * before:
                break
        assert found is not None  # there is a step
        return maps, residual, *found

    def _newton_step(self, maps: Tensor, residual: Tensor, roots: Tensor, factor: Tensor) -> Tensor:
        """Conjugate gradients on the normal equations of the linearized equations, preconditioned by the system."""
        parts = [Linearized(one, maps) for one in self.known]
        ends = [one.layer.channels * one.taps for one in self.known]

        def back(rows: Tensor) -> Tensor:
            sums = [part.transposed(rows_) for part, rows_ in zip(parts, (rows * roots).split(ends), strict=True)]
            return torch.stack(sums).sum(0)

        right = back(residual * roots)
        solution = torch.zeros_like(maps)
        steep = self.maps(torch.cholesky_solve(self.columns(right), factor))
        direction, product = steep, (right * steep).sum()
        first = product
        for _ in range(40):
            applied = back(torch.cat([part(direction) for part in parts]) * roots)
            length = product / (direction * applied).sum()
            solution = solution + length * direction
            right = right - length * applied
            steep = self.maps(torch.cholesky_solve(self.columns(right), factor))
            product, previous = (right * steep).sum(), product
            if not float(product) > 1e-6 * float(first):
                break
            direction = steep + (product / previous) * direction
        return solution

    def start(self, usual: Tensor) -> Tensor | None:
        """Maps to start from: solved as if normalized outputs had the scale of those of `usual` maps, and were zero."""
        derivatives = []
        for one in self.known:
            if one.statistics is None:
                derivatives.append(one.derivative)
                continue
            _, scale = one.statistics.normalized(one.outputs(usual))
            derivatives.append(scale * (one.derivative - one.statistics.mean(one.derivative)))
        system, roots = self.system(None, derivatives), self.alike[self.owner].sqrt()[:, None]
        factor = _factor(system * roots, 1e-4)
        if factor is None:
            return None
        return self.maps(torch.cholesky_solve((system * roots).T @ (self.right * roots), factor))

    def solve(self, start: Tensor | None) -> Solved | str:
        """Least squares in which output channels that contradict the others lose their weight."""
        weights, fitted = self.alike / self.alike.max(), None
        for _ in range(4 if self.depends else 15):
            fitted = self.fit(weights, start if fitted is None else fitted[0], steps=1)
            if fitted is None:
                return "its equations do not determine every entry"
            residual = fitted[1]
            squares = self._by_channel(residual)
            renewed = 1 / (squares + self.energy * _ROUNDING**2)
            renewed = renewed / renewed.max()
            converged = float((renewed - weights).abs().max()) < (0.1 if self.depends else 1e-3)
            weights = renewed
            if converged:
                break
        assert fitted is not None
        maps, residual, _, factor = fitted
        rows, unknowns = self.right.shape[0], self.shape[0] * self.shape[2] * self.shape[3]
        hidden = _hidden(factor) if self.depends else None
        if isinstance(hidden, str):
            return hidden
        covariance = torch.cholesky_inverse(factor).diagonal().clamp_min(0)
        if hidden is not None:
            # the constant is not known from the equations, but from the zeros
            covariance = torch.where(hidden, covariance[~hidden].median(), covariance)
        freedom = max(1.0, rows * float((weights > 0.01).double().mean()) - unknowns)
        noise = (weights[self.owner][:, None] * residual.square()).sum(0) / freedom
        spread = self.maps((covariance[:, None] * noise).sqrt())
        if hidden is not None:
            lowered = _with_zeros(self.columns(maps), hidden, self.columns(spread))
            if lowered is None:
                return "a norm hides a constant of its input, and the zeros do not show it"
            maps = self.maps(lowered)
        ratio = torch.where(spread > 0, maps / spread, torch.zeros_like(maps))
        # maps are non-negative: the most negative entry shows how far zeros scatter
        least = max(6.0, 1.5 * float(-ratio.min()))
        error = float(torch.maximum(spread.norm(), maps.clamp_max(0).norm()) / maps.norm())
        # a minority of equations can be satisfied exactly by wrong maps: most must hold
        error = max(error, float((squares.median() / self.energy).sqrt()))
        kept = torch.where(ratio > least, maps, torch.zeros_like(maps))
        return Solved(kept, error, ratio < 5 * least)

    def wrong_zero(self, maps: Tensor, residual: Tensor, system: Tensor, factor: Tensor, flips: Tensor) -> int | None:
        """Index of the entry of the first convolution's derivative whose change explains most of the residual.

        An entry of the maps behind that is wrongly zero, or wrongly not, leaves its derivative times its patch
        unexplained, in a single output channel and apart from what other maps absorb.

        Args:
            maps, residual, system, factor: from `fit` with the weights `alike`.
            flips: `(n, channels, h, w)`, changes of the derivative; zero where nothing can change.

        Returns:
            The index in `flips.flatten()`; None if no change explains enough.
        """
        one = self.known[0]
        channels, rows = one.layer.channels, one.layer.channels * one.taps
        weight = self.alike[:channels]
        left = rows_to_kernels(residual[:rows], channels)
        roots = self.alike[self.owner][:rows, None].sqrt()
        absorbed = torch.linalg.solve_triangular(factor, (system[:rows] * roots).T, upper=False)
        blocks = absorbed.T.reshape(channels, one.taps, -1)
        remaining = torch.eye(one.taps).to(system) - blocks @ blocks.transpose(1, 2)
        patches = one.patches(maps)
        gains = torch.einsum("ok,nkp->nop", left, patches)
        scale = torch.ones_like(gains)
        if one.statistics is not None:
            outputs = one.outputs(maps)
            gains = one.statistics.backward(outputs, gains.view_as(outputs)).flatten(2)
            scale = one.statistics.normalized(outputs)[1].expand_as(outputs).flatten(2)
            if one.statistics.groups is None:
                patches = patches - patches.mean((0, 2), keepdim=True)
        taps = patches.unflatten(1, (-1, one.taps))
        moments = torch.einsum("nctp,ncsp->ntsp", taps, taps)
        sizes = torch.einsum("ots,ntsp->nop", remaining, moments).clamp_min(0) * scale.square()
        change = flips.flatten(2)
        explained = weight[None, :, None] * (2 * gains * change - sizes * change.square())
        best = int(explained.argmax())
        total = (self.alike[self.owner][:, None] * residual.square()).sum()
        return best if float(explained.flatten()[best]) > _EXPLAINS * float(total) else None


def _factor(scaled: Tensor, ridge: float) -> Tensor | None:
    """Cholesky factor of the normal matrix; None where it is singular."""
    normal = scaled.T @ scaled
    if ridge:
        normal.diagonal().add_(ridge * normal.diagonal().max())
    factor, failed = torch.linalg.cholesky_ex(normal)
    least, most = float(factor.diagonal().min()), float(factor.diagonal().max())
    singular = int(failed) != 0 or not least > (0.0 if ridge else 1e-7) * most
    return None if singular else factor


def _hidden(factor: Tensor) -> Tensor | str | None:
    """Unknowns `(n h w,)` to which a constant can be added unseen; None if there are none."""
    values, vectors = torch.linalg.eigh(factor @ factor.T)
    null = values < 1e-9 * values[-1]
    if not null.any():
        return None
    vector = vectors[:, 0] * torch.sign(vectors[:, 0].sum())
    support: Tensor = vector > 0.5 * vector.max()
    constant = support.double() / support.double().norm()
    if int(null.sum()) > 1 or float((vector - constant).norm()) > 1e-3:
        return "its equations do not determine every entry"
    return support


def _with_zeros(columns: Tensor, hidden: Tensor, spread: Tensor) -> Tensor | None:
    """Unknowns `(n h w, c)` with the constant on `hidden` for which the lowest are zero; None without several zeros."""
    lowest = columns[hidden].sort(dim=0).values[:3]
    if not bool((lowest[2] - lowest[0] <= 20 * spread[hidden].amax(0)).all()):
        return None
    return torch.where(hidden[:, None], columns - lowest.mean(0), columns)
