"""Features from Hermite moments of the head's gradient, the tensor method of [Liu2025].

With Gaussian weights w_j and g_j = sum_i r_i s(w_j . x_i) for each neuron, Stein's identity gives

    mean_j g_j (w_j w_j^T - I) = sum_i r_i c_2 x_i x_i^T        mean_j g_j H_p(w_j)  = sum_i r_i c_p x_i^(x p)

for m to infinity, with the activation's Hermite coefficients c_p: matrices that the features diagonalize. Third and
fourth moments are contracted with vectors as they are summed: memory is one matrix per contraction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import usable_orders
from lit_recon.attacks.updates.features.layer import FeatureRecovery, LayerGradient, RecoveredFeatures
from lit_recon.attacks.updates.features.starts import joint_diagonalization
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import ForwardOperator

#: Number of random contractions for the span if only odd moments are usable.
_CONTRACTIONS = 4
#: Shift of the power iteration, relative to the norm of the matrix, that makes all eigenvalues positive.
_SHIFT = 3.0


def class_combinations(head_gradient: Tensor, n_examples: int) -> Tensor:
    """At most `n_examples` numbers per neuron, `(q, m)`, equivalent to the head's gradient.

    The combinations of classes are the left singular vectors of the gradient `(k, m)` after centering over neurons.
    """
    centered = head_gradient - head_gradient.mean(dim=1, keepdim=True)
    left, values, _ = torch.linalg.svd(centered, full_matrices=False)
    kept = int((values[:n_examples] > 1e-6 * values[0]).sum()) if values[0] > 0 else 1
    combined: Tensor = left[:, :kept].T @ head_gradient
    return combined


def residuals_on(values: Tensor, regressors: Tensor) -> Tensor:
    """Residuals of values `(q, m)` after least squares on a constant and regressors `(m, p)`: control variates.

    Polynomials of lower degree do not change a Hermite moment, but they carry most of its variance.
    """
    design = torch.cat([regressors.new_ones(len(regressors), 1), regressors], dim=1)
    gram = design.T @ design
    gram.diagonal().add_(1e-12 * gram.diagonal().mean())
    left_over: Tensor = values - (torch.linalg.solve(gram, design.T @ values.T)).T @ design.T
    return left_over


def second_moment(values: Tensor, weight: Tensor) -> Tensor:
    """mean_j g_j H_2(w_j), `(q, d, d)`, for values `(q, m)` and weights `(m, d)`."""
    m, d = weight.shape
    moments = torch.stack([(weight * g[:, None]).T @ weight for g in values]) / m
    return moments - values.mean(dim=1)[:, None, None] * torch.eye(d, dtype=weight.dtype)


def third_moment(values: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    """mean_j g_j H_3(w_j)(I, I, v), `(q, d, d)`; H_3(w)(I, I, v) = (w.v) (w w^T - I) - w v^T - v w^T."""
    crossed = _symmetric(values @ weight / len(weight), v)
    return second_moment(values * (weight @ v), weight) - crossed


def fourth_moment(values: Tensor, weight: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """mean_j g_j H_4(u_j)(I, I, v, w), `(q, d, d)`.

    H_4(u)(I, I, v, w) = (uv)(uw) u u^T - (vw) u u^T - (uw)(u v^T + v u^T) - (uv)(u w^T + w u^T) - (uv)(uw) I
    + (vw) I + v w^T + w v^T.
    """
    m = len(weight)
    along_v, along_w, inner = weight @ v, weight @ w, v @ w
    weighted = second_moment(values * (along_v * along_w - inner), weight)
    mean_v, mean_w = (values * along_w) @ weight / m, (values * along_v) @ weight / m
    crossed = _symmetric(mean_v, v) + _symmetric(mean_w, w)
    pair = torch.outer(v, w)
    return weighted - crossed + values.mean(dim=1)[:, None, None] * (pair + pair.T)


def _symmetric(vectors: Tensor, v: Tensor) -> Tensor:
    """`x v^T + v x^T`, `(q, d, d)`, for the rows x of `vectors` `(q, d)`."""
    return vectors[:, :, None] * v + v[:, None] * vectors[:, None, :]


def moment_span(
    seen: LayerGradient, control_variates: bool = False, iterations: int | None = None, seed: int = 0
) -> Tensor:
    """Approximate span of the features, orthonormal `(d, n)`, from the head's gradient alone; weights are from N(0, I).

    The dominant subspace of the squared second moment, or of third moments contracted with random vectors where the
    second vanishes; an `UnsupportedModelError` if both do. Its error is of order sqrt(d / m). `control_variates` reduce
    the variance by regression on constant and weights, which the paper does not. `iterations` are those of a power
    method that never forms a `(d, d)` matrix; None: eigendecomposition.

    Source: [Liu2025]; [Wang2023], section 4 and remark 3; the power method is [Zhong2017], algorithm 3.
    """
    weight, n_examples = seen.weight, seen.n_examples
    orders = usable_orders(seen.activation)
    if not {2, 3} & set(orders):
        raise UnsupportedModelError(
            f"the second and third Hermite coefficients of {seen.activation.name} vanish, so moments of the head's "
            "gradient do not determine the span of the features: use ExactRecovery, which uses the layer's own "
            "gradient"
        )
    generator = torch.Generator().manual_seed(seed)
    values = class_combinations(seen.head_gradient, n_examples)
    if control_variates:
        values = residuals_on(values, weight)
    if 2 not in orders:
        contracted = [
            torch.nn.functional.normalize(torch.randn(weight.shape[1], generator=generator, dtype=weight.dtype), dim=0)
            for _ in range(_CONTRACTIONS)
        ]
        moments = torch.cat([third_moment(values, weight, v) for v in contracted])
    elif iterations is not None:
        return _power_span(values[0], weight, n_examples, iterations, generator)
    else:
        moments = second_moment(values, weight)
    span: Tensor = torch.linalg.eigh((moments @ moments).sum(dim=0)).eigenvectors.flip(1)[:, :n_examples]
    return span


def _power_span(values: Tensor, weight: Tensor, size: int, iterations: int, generator: torch.Generator) -> Tensor:
    """Subspace iteration with `shift I + M` and `shift I - M`; directions of largest |eigenvalue|."""
    m, d = weight.shape

    def moved(vectors: Tensor) -> Tensor:
        return weight.T @ (values[:, None] * (weight @ vectors)) / m - values.mean() * vectors

    probe = torch.randn(d, 1, generator=generator, dtype=weight.dtype)
    for _ in range(15):
        probe = moved(probe / probe.norm())
    shift = _SHIFT * probe.norm()
    found, sizes = [], []
    for sign in (1, -1):
        basis = torch.linalg.qr(torch.randn(d, size, generator=generator, dtype=weight.dtype)).Q
        for _ in range(iterations):
            basis = torch.linalg.qr(shift * basis + sign * moved(basis)).Q
        values_, rotation = torch.linalg.eigh(basis.T @ moved(basis))
        found.append(basis @ rotation)
        sizes.append(values_.abs())
    kept = torch.cat(sizes).topk(size).indices
    combined: Tensor = torch.linalg.qr(torch.cat(found, dim=1)[:, kept]).Q
    return combined


def slices(seen: LayerGradient, basis: Tensor, control_variates: bool = True, seed: int = 0) -> Tensor:
    """Symmetric matrices `(l, r, r)`, `X diag(.) X^T` up to sampling error, with X the features in the basis `(d, r)`.

    All usable orders together: second moments, third moments contracted with unit vectors, fourth moments contracted
    with random pairs; an `UnsupportedModelError` without any. `control_variates` regresses on polynomials in the
    projected weights, from N(0, I), first.
    """
    orders = usable_orders(seen.activation)
    if not orders:
        raise UnsupportedModelError(
            f"Hermite coefficients 2 to 4 of {seen.activation.name} vanish: its moments do not determine single "
            "features"
        )
    projected, r = seen.weight @ basis, basis.shape[1]
    # scaled to equal size: a combination that isolates one example may be small
    values = torch.nn.functional.normalize(class_combinations(seen.head_gradient, r), dim=1)
    first, higher = values, values
    if control_variates:
        i, j = torch.triu_indices(r, r)
        first = residuals_on(values, projected)
        higher = residuals_on(values, torch.cat([projected, projected[:, i] * projected[:, j]], dim=1))
    generator = torch.Generator().manual_seed(seed)
    found = []
    if 2 in orders:
        found.append(second_moment(first, projected))
    if 3 in orders:
        found += [third_moment(higher, projected, v) for v in torch.eye(r, dtype=projected.dtype)]
    if 4 in orders:
        pairs = torch.randn(2 * r, 2, r, generator=generator, dtype=projected.dtype)
        found += [fourth_moment(higher, projected, *pair) for pair in torch.nn.functional.normalize(pairs, dim=2)]
    stacked = torch.cat(found)
    return (stacked + stacked.transpose(1, 2)) / 2


#: Smallest ratio of the last eigenvalue of the features to the first of rounding in float32 gradients; a smaller one
#: indicates noise.
GAP = 30.0


def weight_span(gradient: Tensor, n_examples: int) -> Tensor:
    """Orthonormal basis `(d, r)` of the row space of a weight gradient `(m, d)` without missing entries.

    Its rows are combinations of the examples' features, so that its dimension is `n_examples`, unless an earlier
    eigenvalue gap shows that features coincide or vanish. Exact up to rounding where features are linearly independent;
    noise of standard deviation s relative to the gradient's root mean square rotates it by about `s sqrt(n / m)`.
    """
    wide = gradient.shape[0] < gradient.shape[1]  # then the products of rows are fewer than those of columns
    values, vectors = torch.linalg.eigh(gradient @ gradient.T if wide else gradient.T @ gradient)
    values = values.flip(0).clamp_min(torch.finfo(values.dtype).eps * values[-1].clamp_min(1e-300))
    falls = values / torch.cat([values[1:], values[-1:]])
    size = n_examples
    if n_examples < len(values) and falls[n_examples - 1] < GAP:
        # without the expected gap, an earlier one, down to rounding, shows a smaller rank
        earlier = int(falls[:n_examples].argmax()) + 1
        if falls[earlier - 1] > 1e4 and values[earlier] < 1e-9 * values[0]:
            size = earlier
    basis: Tensor = vectors.flip(1)[:, :size].contiguous()
    return torch.linalg.qr(gradient.T @ basis).Q if wide else basis


class MomentRecovery(FeatureRecovery):
    """Span from second or third moments, features by joint diagonalization of projected moments of all usable orders.

    The tangent of a feature's angle to the span falls as sqrt(K (d - 1) / m), K = E[s(z)^2 z^2] / c_2^2: 9.42 for ReLU,
    7.81 for GELU, 1.71 and 1.84 with control variates. No certificate; signs of features are not determined.

    Args:
        control_variates: regress the head's gradient on polynomials of lower degree before taking moments; same
            expectation, several times smaller variance. Not in the paper.
        span: `head`: from moments, as in the paper; `layer`: from the row space of the layer's own gradient, exact.
        rows: neurons to use. The method assumes weights from N(0, I): `random` neurons have them, `trained` ones
            near initialization approximately, as in the paper.
        power_iterations: number of power iterations, without a `(d, d)` matrix, for the span; None: eigendecomposition.
        seed: of contractions, random projections and starts.

    Source: [Liu2025], section 4 and appendix.
    """

    by_moments = True

    def __init__(
        self,
        control_variates: bool = False,
        span: Literal["head", "layer"] = "head",
        rows: Literal["random", "trained", "all"] = "random",
        power_iterations: int | None = None,
        seed: int = 0,
    ) -> None:
        if span not in ("head", "layer") or rows not in ("random", "trained", "all"):
            raise ConfigError(
                f"MomentRecovery needs span 'head' or 'layer' and rows 'random', 'trained' or 'all'; "
                f"got {span!r} and {rows!r}"
            )
        if power_iterations is not None and power_iterations < 1:
            raise ConfigError(f"MomentRecovery needs power_iterations >= 1 or none; got {power_iterations}")
        self.control_variates, self.power_iterations, self.seed = control_variates, power_iterations, seed
        self.span: Literal["head", "layer"] = span
        self.rows: Literal["random", "trained", "all"] = rows

    def run(self, seen: LayerGradient, operator: ForwardOperator | None) -> RecoveredFeatures:
        if not seen.has_head:
            raise UnsupportedModelError(
                "MomentRecovery needs the gradient of the head, which is zero everywhere: use ExactRecovery, which "
                "can use the layer's own gradient"
            )
        if self.span == "layer" and not seen.has_weight:
            raise UnsupportedModelError(
                "MomentRecovery cannot take the span from the layer's gradient, which is zero everywhere: "
                "set span to 'head'"
            )
        used, notes = seen, tuple[str, ...]()
        if self.rows != "all":
            wanted = seen.gaussian if self.rows == "random" else ~seen.gaussian
            if wanted.any():
                used = replace(seen, gaussian=wanted).gaussian_rows()
            else:
                notes = (f"the feature layer has no {self.rows} neurons: all neurons were used",)
        if self.span == "layer":
            basis = weight_span(seen.weight_gradient, seen.n_examples)
        else:
            basis = moment_span(used, self.control_variates, self.power_iterations, self.seed)
        stack = slices(used, basis, self.control_variates, self.seed)
        directions = joint_diagonalization(stack, self.seed).directions
        return RecoveredFeatures((basis @ directions).T, basis, "moments", notes=notes)


def moment_start(seen: LayerGradient, basis: Tensor, seed: int = 0) -> Tensor:
    """Directions `(n, r)` that diagonalize the `slices` of the head's gradient over the Gaussian neurons."""
    return joint_diagonalization(slices(seen.gaussian_rows(), basis, seed=seed), seed).directions.T
