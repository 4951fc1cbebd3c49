"""Two-layer networks `A s(W x + b)`: update, Jacobian and its Gram matrix with respect to the inputs in closed form.

With `z_ij = w_j . x_i + b_j`, residuals `delta_i = d loss_i / d output_i`, their derivatives `D_i = d delta_i / d x_i`
and `beta_ij = A_j . delta_i`, the gradients summed over a batch are

    head:  G_A[c, j] = sum_i delta_ic s(z_ij)              layer:  G_W[j] = sum_i beta_ij s'(z_ij) x_i

and their Jacobians, by example and neuron,

    d G_A[c, j] / d x_i = delta_ic s'_ij w_j + s_ij D_ic
    d G_W[j, l] / d x_i = x_il Q_ij + t_ij e_l,    Q_ij = beta_ij s''_ij w_j + s'_ij A_j . D_i,    t_ij = beta_ij s'_ij.

Its Gram matrix is a sum over neurons of products of the `Q`, in `m q^2` operations and `q^2` memory; the rows alone
take `m d q`. Tensors of the wrong shape raise a `ShapeError`, numbers out of their range a `ConfigError`.

Source: [Liu2025] Liu, Wang, Chen, Lei, appendix D; the Gram matrix's form is our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lit_recon.bounds.fisher import Jacobian
from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.records import Update

Loss = Literal["squared", "cross_entropy"]
#: Largest number of matrix entries of one chunk of neurons.
_CHUNK = 4_000_000


class SmoothActivation(Protocol):
    """An activation with its first two derivatives; at a kink, one of the one-sided derivatives."""

    def value(self, z: Tensor, /) -> Tensor: ...

    def slope(self, z: Tensor, /) -> Tensor: ...

    def curvature(self, z: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class TwoLayerNet:
    """`output = A s(W x + b)`, with a loss summed over the batch.

    Attributes:
        weight, bias: `(m, d)`, `(m,)`: W and b.
        head: `(k, m)`: A.
        activation: `s`.
        loss: `squared`: half the squared distance to targets `(n, k)`; `cross_entropy`: of classes `(n,)`.
    """

    weight: Tensor
    bias: Tensor
    head: Tensor
    activation: SmoothActivation
    loss: Loss = "squared"

    def __post_init__(self) -> None:
        m = len(self.weight)
        if self.weight.dim() != 2 or self.bias.shape != (m,) or self.head.dim() != 2 or self.head.shape[1] != m:
            raise ShapeError(
                "a two-layer network has weight (m, d), bias (m,) and head (k, m); got "
                f"{tuple(self.weight.shape)}, {tuple(self.bias.shape)} and {tuple(self.head.shape)}"
            )
        if self.loss not in ("squared", "cross_entropy"):
            raise ConfigError(f"loss must be 'squared' or 'cross_entropy'; got {self.loss!r}")

    def residuals(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """`delta`, `(n, k)`, for inputs `(n, d)`."""
        expected = (len(inputs),) if self.loss == "cross_entropy" else (len(inputs), len(self.head))
        if inputs.dim() != 2 or inputs.shape[1] != self.weight.shape[1] or targets.shape != expected:
            raise ShapeError(
                f"the network takes inputs (n, {self.weight.shape[1]}) and targets {expected}; "
                f"got {tuple(inputs.shape)} and {tuple(targets.shape)}"
            )
        outputs = self.activation.value(inputs @ self.weight.T + self.bias) @ self.head.T
        if self.loss == "squared":
            return outputs - targets
        return outputs.softmax(dim=1) - torch.nn.functional.one_hot(targets, len(self.head)).to(outputs.dtype)

    def update(self, inputs: Tensor, targets: Tensor) -> Update:
        """Gradients of the summed loss, `head` `(k, m)` and `layer` `(m, d)`; differentiable in the inputs."""
        pre = inputs @ self.weight.T + self.bias
        residuals = self.residuals(inputs, targets)
        slopes = (residuals @ self.head) * self.activation.slope(pre)
        return {"head": residuals.T @ self.activation.value(pre), "layer": slopes.T @ inputs}


class _Neurons(NamedTuple):
    """Terms of a chunk of neurons: `value`, `slope`, `pulled` (`t`) `(n, c)`, `weight` `(c, d)`, `turned` (`Q`)."""

    where: slice
    value: Tensor
    slope: Tensor
    pulled: Tensor
    weight: Tensor
    turned: Tensor


class TwoLayerJacobian(Jacobian):
    """Jacobian of a two-layer network's update with respect to a batch of inputs `(n, d)`; targets are known.

    It is computed in chunks of neurons; default: as many as fit into about 30 MB.
    """

    def __init__(self, net: TwoLayerNet, inputs: Tensor, targets: Tensor, chunk: int | None = None) -> None:
        self.net, self.inputs = net, inputs
        n, d = inputs.shape
        self.update, self.n_inputs = net.update(inputs, targets), n * d
        self._residuals = net.residuals(inputs, targets)
        slope = net.activation.slope(inputs @ net.weight.T + net.bias)
        outputs = torch.einsum("cj,ij,jl->icl", net.head, slope, net.weight)  # (n, k, d)
        if net.loss == "cross_entropy":
            chances = self._residuals.clone()
            chances[torch.arange(n), targets] += 1
            outputs = chances[:, :, None] * (outputs - (chances[:, None, :] @ outputs))
        self._moved = outputs  # D, (n, k, d)
        self._chunk = chunk or max(1, _CHUNK // (self.n_inputs * max(1, len(net.head))))

    def gram(self, weights: Update | float = 1.0) -> Tensor:
        n, d = self.inputs.shape
        total = self.inputs.new_zeros(n, d, n, d)
        for part in self._neurons():
            rows = self._head_rows(part).reshape(-1, self.n_inputs)
            if isinstance(weights, float | int):
                total += (weights * rows.T @ rows).view(n, d, n, d)
                total += weights * self._layer_gram(part)
            else:
                own = weights["head"][:, part.where].reshape(-1, 1)
                total += ((own * rows).T @ rows).view(n, d, n, d)
                total += self._weighted_layer_gram(part, weights["layer"][part.where])
        return total.view(self.n_inputs, self.n_inputs)

    def transposed(self, vector: Update) -> Tensor:
        total = torch.zeros_like(self.inputs)
        for part in self._neurons():
            rows = self._head_rows(part).flatten(0, 1)
            total += torch.einsum("r,rid->id", vector["head"][:, part.where].reshape(-1), rows)
            layer = vector["layer"][part.where]
            total += torch.einsum("ijd,ji->id", part.turned, layer @ self.inputs.T) + part.pulled @ layer
        return total.view(self.n_inputs)

    def _neurons(self) -> Iterator[_Neurons]:
        net = self.net
        for start in range(0, len(net.weight), self._chunk):
            where = slice(start, min(start + self._chunk, len(net.weight)))
            weight, head = net.weight[where], net.head[:, where]
            pre = self.inputs @ weight.T + net.bias[where]
            slope, beta = net.activation.slope(pre), self._residuals @ head
            bent = (beta * net.activation.curvature(pre))[:, :, None] * weight
            turned = bent + slope[:, :, None] * torch.einsum("cj,icd->ijd", head, self._moved)
            yield _Neurons(where, net.activation.value(pre), slope, beta * slope, weight, turned)

    def _head_rows(self, part: _Neurons) -> Tensor:
        """`(k, c, n, d)`."""
        direct = torch.einsum("ic,ij,jd->cjid", self._residuals, part.slope, part.weight)
        return direct + torch.einsum("ij,icd->cjid", part.value, self._moved)

    def _layer_gram(self, part: _Neurons) -> Tensor:
        """`sum_j (x_i . x_k) Q_ij Q_kj^T + t_kj Q_ij x_i^T + t_ij x_k Q_kj^T + t_ij t_kj I`, `(n, d, n, d)`."""
        n, d = self.inputs.shape
        flat = part.turned.transpose(0, 1).reshape(-1, n * d)
        products = (flat.T @ flat).view(n, d, n, d) * (self.inputs @ self.inputs.T)[:, None, :, None]
        crossed = torch.einsum("ijd,kj->ikd", part.turned, part.pulled)[:, :, :, None] * self.inputs[:, None, None, :]
        crossed = crossed.transpose(1, 2)  # (i, d, k, l): Q_ij t_kj, then x_il
        same = torch.einsum("ik,dl->idkl", part.pulled @ part.pulled.T, torch.eye(d, dtype=flat.dtype))
        return products + crossed + crossed.permute(2, 3, 0, 1) + same

    def _weighted_layer_gram(self, part: _Neurons, weights: Tensor) -> Tensor:
        """The same with a weight `(c, d)` for every entry of the layer's gradient."""
        n, d = self.inputs.shape
        total = self.inputs.new_zeros(n, d, n, d)
        for i in range(n):
            turned, crossed = part.turned[i], weights * self.inputs[i]
            for k in range(n):
                inner = (crossed * self.inputs[k]).sum(dim=1, keepdim=True)
                total[i, :, k] += (inner * turned).T @ part.turned[k]
                cross = (part.pulled[k][:, None] * turned).T @ crossed
                total[i, :, k] += cross
                total[k, :, i] += cross.T
                total[i, :, k].diagonal().add_((part.pulled[i] * part.pulled[k]) @ weights)
        return total


def replacement_sensitivity(net: TwoLayerNet, lipschitz: float = 1.0) -> float:
    """Upper bound on the L2 change of the summed gradient when one example is replaced by another.

    For the squared loss, inputs and targets of norm at most 1, the activation's Lipschitz constant `L` and operator
    norms: with `S = sqrt(m) |s(0)| + L |W|` and the residual `R = |A| S + 1`, one example's gradient has at most the
    norm `R sqrt(S^2 + (L |A|)^2)`. Another loss, or biases, raise an `UnsupportedModelError`.

    Source: [Liu2025], proof of proposition A.1, with constants in place of orders.
    """
    if net.loss != "squared" or bool(net.bias.any()):
        raise UnsupportedModelError(
            f"the sensitivity is known only for the squared loss without biases; got {net.loss}: clip the gradients of "
            "single examples instead"
        )
    at_zero = float(net.activation.value(torch.zeros(1, dtype=net.weight.dtype)).abs())
    hidden = math.sqrt(len(net.weight)) * at_zero + lipschitz * float(torch.linalg.matrix_norm(net.weight, 2))
    head = float(torch.linalg.matrix_norm(net.head, 2))
    return 2 * (head * hidden + 1) * math.hypot(hidden, lipschitz * head)


def moments_noise(sensitivity: float, epsilon: float, delta: float) -> float:
    """Standard deviation of the Gaussian noise for (epsilon, delta) by the moments accountant.

    The minimum over all orders in closed form: `mu = sensitivity / std` solves `mu^2 / 2 + mu sqrt(2 log 1/delta) =
    epsilon`. The exact noise, by `lit_recon.privacy.gaussian_mu`, is a little less.

    Source: [Liu2025], proposition A.1; the lemma is theorem 2 of Abadi et al. 2016.
    """
    if not (sensitivity > 0 and epsilon > 0 and 0 < delta < 1):
        raise ConfigError(
            f"noise needs sensitivity and epsilon above 0 and delta in (0, 1); got {sensitivity}, {epsilon}, {delta}"
        )
    root = math.sqrt(-2 * math.log(delta))
    # avoids the difference of two nearly equal roots
    mu = 2 * epsilon / (math.sqrt(root**2 + 2 * epsilon) + root)
    return sensitivity / mu


class Slope(NamedTuple):
    """Exponent `p` of `y ~ x^p`, with the ends of its confidence interval."""

    value: float
    low: float
    high: float


def log_slope(xs: Sequence[float], ys: Sequence[float], confidence: float = 0.95) -> Slope:
    """Least squares of `log y` on `log x`, with the interval of Student's t; repeated measurements share an x."""
    from scipy.stats import linregress, t

    if len(xs) != len(ys) or len(xs) < 3 or len(set(xs)) < 2 or not all(0 < v < math.inf for v in (*xs, *ys)):
        raise ConfigError(
            "a slope needs three or more points with two or more different x, positive and finite; got "
            f"{len(xs)} x and {len(ys)} y"
        )
    line = linregress([math.log(x) for x in xs], [math.log(y) for y in ys])
    margin = float(line.stderr * t.ppf((1 + confidence) / 2, len(xs) - 2))
    return Slope(round(float(line.slope), 12), float(line.slope) - margin, float(line.slope) + margin)


class Rate(NamedTuple):
    """Orders of the reconstruction error: of the tensor attack, and the lower bound for every attack."""

    upper: str
    lower: str


#: Orders of the root of the squared error of one input up to logarithms, with the batch size B, noise s, clipping bound
#: S, gradient g, dropout rate or pruned fraction p, and the share P' of the Jacobian's squared norm that pruning takes.
RATES = {
    "none": Rate("B √(d/m)", "s √(d/m)"),
    "local_steps": Rate("B √(d/m)", "s √(d/m)"),
    "noise": Rate("(B + s) √(d/m)", "s √(d/m)"),
    "clipping": Rate("B √(d/m)", "s max(1, |g|/S) √(d/m)"),
    "dp_sgd": Rate("(B + s max(1, |g|/S)) √(d/m)", "s max(1, |g|/S) √(d/m)"),
    "dropout": Rate("B √(d/((1−p) m))", "s √(d/((1−p) m))"),
    "pruning": Rate("unknown", "s √(d/((1−P') m))"),
}
