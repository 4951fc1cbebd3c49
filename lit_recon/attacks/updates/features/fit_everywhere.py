"""Features from gradients that do not determine their span: alternate fits in a span and in all coordinates.

If entries of the layer's gradient are missing or noisy, the head's gradient still determines the features, but only by
equations over all coordinates, which need a good start. Better features give a better span, which gives better ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import usable_orders
from lit_recon.attacks.updates.features.equations import FeatureEquations
from lit_recon.attacks.updates.features.layer import GradientNoise, LayerGradient
from lit_recon.attacks.updates.features.moments import moment_span, moment_start, weight_span
from lit_recon.attacks.updates.features.polish import MaskedEquations, Polished, masked_polish, polish
from lit_recon.attacks.updates.features.starts import neuron_ica_start

#: Largest sine of the angle between noisy and true span at which the layer's span is preferred to that of moments.
_TURNED = 0.1
#: Largest number of rounds; smallest gain to continue; iterations in all coordinates per iteration in a span.
_ROUNDS, _GAIN, _ITERATIONS = 6, 1e-5, 5


def fit_everywhere(
    everywhere: MaskedEquations,
    basis: Tensor,
    within: Callable[[Tensor], FeatureEquations],
    tolerance: float,
    iterations: int,
    seed: int,
) -> Polished:
    """Rounds from an initial basis `(d, r)` on, until the certificate of `everywhere` holds or does not improve.

    `within` gives the equations in a basis; `iterations` is the largest number in the polish there.
    """
    seen, lowest = everywhere.seen, math.inf
    best: Polished | None = None
    for _ in range(_ROUNDS):
        equations = within(basis)
        if seen.has_head and usable_orders(seen.activation):
            start = moment_start(seen, basis, seed)
        else:
            start = neuron_ica_start(equations.gradient[:, :-1], seed)
        inside = polish(equations, start, iterations)
        outside = inside.features @ basis.T, equations.by_class(inside.deltas)
        found = masked_polish(everywhere, *outside, iterations=_ITERATIONS * iterations)
        head, weight, _, _ = everywhere.value_and_gradient(found.features, found.deltas)
        if best is None or head + weight < lowest:
            best = found
        if best.certificate < tolerance or head + weight > (1 - _GAIN) * lowest:
            break
        lowest = head + weight
        basis = torch.linalg.qr(found.features.T).Q
    assert best is not None, "there is at least one round"
    return best


def has_moments(seen: LayerGradient) -> bool:
    """Whether moments of the head's gradient determine the span of the features."""
    return seen.has_head and bool({2, 3} & set(usable_orders(seen.activation)))


def head_span(seen: LayerGradient, seed: int = 0) -> Tensor:
    """Approximate span `(d, n)` from moments of the head's gradient; see `moment_span`."""
    return moment_span(seen.gaussian_rows(), control_variates=True, seed=seed)


def noisy_span(seen: LayerGradient, noise: GradientNoise, seed: int = 0) -> tuple[Tensor, str]:
    """The span `(d, n)` less affected by noise, of the layer's gradient or of moments, and its name."""
    gradient = seen.weight_gradient
    signal = float(gradient.square().sum()) - noise.layer**2 * gradient.numel()
    # each of the n directions has 1 / n of the signal, and the noise of the other columns perpendicular to it
    turned = noise.layer * math.sqrt(gradient.shape[1] * seen.n_examples / max(signal, 1e-300))
    if turned < _TURNED or not has_moments(seen):
        return weight_span(gradient, seen.n_examples), "the layer's span"
    return head_span(seen, seed), "moments"


#: Entries per example that must be observed for a neuron to count as known; relative ridge, for neurons without any.
_MARGIN, _RIDGE = 2, 1e-12
#: The search ends if the residual decreases by less than this share for some sweeps, or reaches rounding.
_COMPLETION_GAIN, _PATIENCE, _ROUNDING = 1e-3, 5, 1e-8


class Completion(NamedTuple):
    """Orthonormal `basis` `(d, r)`, `projected` rows `(m, r)`, which are `known` `(m,)`, relative `residual`."""

    basis: Tensor
    projected: Tensor
    known: Tensor
    residual: float


def complete(gradient: Tensor, observed: Tensor, rank: int, sweeps: int = 200) -> Completion:
    """Alternating least squares for `gradient = projected basis^T` `(m, d)` on the `observed` entries only.

    `rank` is the number of examples. Two sweeps cost O(m d r^2), memory is O((m + d) r^2 + m d).
    """
    mask = observed.to(gradient.dtype)
    values = gradient * mask
    norm = values.norm()
    basis = torch.linalg.eigh(values.T @ values).eigenvectors[:, -rank:]
    known = mask.sum(dim=1) >= _MARGIN * rank
    if int(known.sum()) < _MARGIN * rank:
        known = mask.any(dim=1)
    rows = known.to(gradient.dtype)[:, None]
    last, patience = math.inf, _PATIENCE
    for _ in range(sweeps):
        projected = _masked_solve(values, mask, basis)
        basis = torch.linalg.qr(_masked_solve((values * rows).T, (mask * rows).T, projected)).Q
        projected = _masked_solve(values, mask, basis)
        residual = float(((projected @ basis.T - values) * mask * rows).norm() / norm)
        patience = _PATIENCE if residual < (1 - _COMPLETION_GAIN) * last else patience - 1
        last = residual
        if patience == 0 or residual < _ROUNDING:
            break
    return Completion(basis, projected, known, last)


def _masked_solve(values: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    """Rows x of the result minimise |mask * (values - x factor^T)| row by row."""
    r = factor.shape[1]
    grams = (mask @ (factor[:, :, None] * factor[:, None, :]).reshape(len(factor), -1)).reshape(-1, r, r)
    ridge = _RIDGE * grams.diagonal(dim1=1, dim2=2).mean().clamp_min(torch.finfo(values.dtype).tiny)
    grams.diagonal(dim1=1, dim2=2).add_(ridge)
    solution: Tensor = torch.linalg.solve(grams, (values @ factor)[:, :, None])[:, :, 0]
    return solution
