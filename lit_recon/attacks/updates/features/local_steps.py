"""Unrolled local training: features that explain an update of several steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from lit_recon.attacks.updates.features.layer import LayerGradient
from lit_recon.clients import LocalSteps

#: History size of L-BFGS.
_MEMORY = 40
#: Rounding error of float32.
_UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class _Tensors:
    """Weights in the span `(m, r)`, biases `(m,)`, and the head's `(k, m)` and `(k,)`: state, velocity or update."""

    weight: Tensor
    bias: Tensor
    head: Tensor
    head_bias: Tensor

    def plus(self, other: _Tensors, factor: _Tensors | float = 1.0) -> _Tensors:
        """`self + factor * other`, elementwise."""
        scale = factor if isinstance(factor, _Tensors) else _Tensors(*([torch.tensor(factor).double()] * 4))
        return _Tensors(
            self.weight + scale.weight * other.weight,
            self.bias + scale.bias * other.bias,
            self.head + scale.head * other.head,
            self.head_bias + scale.head_bias * other.head_bias,
        )


class UnrolledTraining:
    """Update of local steps on the wide layer and the head, as a function of the features.

    Weights move only within the span of the features, so training is simulated there. The trunk is assumed constant:
    its own steps change the features by about its learning rate, and the certificate shows whether that matters.

    Args:
        seen: layer, head and their released update.
        basis: `(d, r)` of the span.
        rule: the client's, with all images in every step.
    """

    def __init__(self, seen: LayerGradient, basis: Tensor, rule: LocalSteps) -> None:
        self.seen, self.rule = seen, rule
        self.observed_weight, self.observed_head = seen.weight_gradient @ basis, seen.head_gradient
        self.start = _Tensors(seen.weight @ basis, seen.bias, seen.head_weight, seen.head_bias)
        weight = _by_block(seen, rule, "weight")
        self.rates = _Tensors(
            weight[:, None],
            _by_block(seen, rule, "bias"),
            *(_rate(rule, f"head.{part}") for part in ("weight", "bias")),
        )

    @property
    def rounding(self) -> float:
        """Relative rounding error of a difference of float32 weights; larger for smaller steps."""
        path = sum(self.rule.momentum**i for step in range(self.rule.steps) for i in range(step + 1))
        released = self.rule.release == "difference"
        moved = (
            self.seen.weight_gradient * (1.0 if released else self.rates.weight * path),
            self.seen.head_gradient * (1.0 if released else self.rates.head * path),
        )
        before = self.seen.weight, self.seen.head_weight
        return sum(_UNIT_ROUNDOFF * float(w.norm() / change.norm()) for w, change in zip(before, moved, strict=True))

    def residuals(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Squared relative residuals of head and layer, up to the scale of the update; differentiable.

        Args:
            features: `(n, r)` in the span.
            labels: `(n,)`.
        """
        update = self._moved(features, labels)
        head, weight = update.head / self.rates.head, update.weight / self.rates.weight
        if self.rule.release == "difference":
            head, weight = update.head, update.weight
        norms = self.observed_head.square().sum(), self.observed_weight.square().sum()
        inner = (head * self.observed_head).sum() / norms[0] + (weight * self.observed_weight).sum() / norms[1]
        scale = inner / (head.square().sum() / norms[0] + weight.square().sum() / norms[1])
        return (
            (scale * head - self.observed_head).square().sum() / norms[0],
            (scale * weight - self.observed_weight).square().sum() / norms[1],
        )

    def certificate(self, features: Tensor, labels: Tensor) -> float:
        """Sum of the relative residuals."""
        head, weight = self.residuals(features, labels)
        return float(head.sqrt() + weight.sqrt())

    def polish(self, features: Tensor, labels: Tensor, iterations: int = 200) -> Tensor:
        """L-BFGS on the residuals from features `(n, r)`, labels fixed."""

        def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            with torch.enable_grad():
                point = torch.from_numpy(flat.copy()).reshape(features.shape).requires_grad_()
                value = torch.stack(self.residuals(point, labels)).sum()
                (slope,) = torch.autograd.grad(value, point)
            return float(value.detach()), slope.reshape(-1).numpy()

        options = {"maxiter": iterations, "maxcor": _MEMORY, "ftol": 1e-20, "gtol": 1e-14}
        found = minimize(objective, features.reshape(-1).numpy(), jac=True, method="L-BFGS-B", options=options)
        return torch.from_numpy(found.x.copy()).reshape(features.shape)

    def _moved(self, features: Tensor, labels: Tensor) -> _Tensors:
        """Weights before minus weights after training."""
        targets = torch.nn.functional.one_hot(labels, len(self.start.head)).to(features.dtype)
        at, velocity = self.start, None
        for _ in range(self.rule.steps):
            gradient = self._gradient(at, features, targets)
            velocity = gradient if velocity is None else gradient.plus(velocity, self.rule.momentum)
            at = at.plus(velocity, _negative(self.rates))
        return self.start.plus(at, -1.0)

    def _gradient(self, at: _Tensors, features: Tensor, targets: Tensor) -> _Tensors:
        """Gradient of the mean cross-entropy."""
        z = features @ at.weight.T + at.bias
        value = self.seen.activation.value(z)
        deltas = (torch.softmax(value @ at.head.T + at.head_bias, dim=1) - targets) / len(features)
        back = (deltas @ at.head) * self.seen.activation.slope(z)
        return _Tensors(back.T @ features, back.sum(dim=0), deltas.T @ value, deltas.sum(dim=0))


def _negative(rates: _Tensors) -> _Tensors:
    return _Tensors(-rates.weight, -rates.bias, -rates.head, -rates.head_bias)


def _rate(rule: LocalSteps, name: str) -> Tensor:
    return torch.tensor(rule.rates.get(name, 0.0), dtype=torch.float64)


def _by_block(seen: LayerGradient, rule: LocalSteps, part: str) -> Tensor:
    """Learning rate of every neuron, `(m,)`."""
    trained, drawn = (_rate(rule, f"feature_layer.{block}.{part}") for block in ("trained", "random"))
    return torch.where(seen.gaussian, drawn, trained)
