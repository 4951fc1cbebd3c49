"""Unrolled local training: features that explain an update of several steps."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from lit_recon.attacks.updates.features.layer import LayerGradient
from lit_recon.clients import LocalSteps
from lit_recon.records import Update

#: History size of L-BFGS; rounding error of float32.
_MEMORY, _UNIT_ROUNDOFF = 40, 2.0**-24


class UnrolledTraining:
    """Update of local steps on the wide layer and the head, as a function of the features.

    Weights move only within the span of the features, with basis `(d, r)`, so training is simulated there. The trunk is
    assumed constant: its own steps change the features by about its learning rate, and the certificate shows whether
    that matters. All images are in every step.

    State, velocity and update are `weight` `(m, r)`, `bias` `(m,)`, and the head's `head` `(k, m)` and `head_bias`
    `(k,)`.
    """

    def __init__(self, seen: LayerGradient, basis: Tensor, rule: LocalSteps) -> None:
        self.seen, self.rule = seen, rule
        self.observed = {"head": seen.head_gradient, "weight": seen.weight_gradient @ basis}
        self.start = {
            "weight": seen.weight @ basis,
            "bias": seen.bias,
            "head": seen.head_weight,
            "head_bias": seen.head_bias,
        }
        self.rates = {
            "weight": _by_block(seen, rule, "weight")[:, None],
            "bias": _by_block(seen, rule, "bias"),
            "head": _rate(rule, "head.weight"),
            "head_bias": _rate(rule, "head.bias"),
        }

    @property
    def rounding(self) -> float:
        """Relative rounding error of a difference of float32 weights; larger for smaller steps."""
        moved = {"weight": self.seen.weight_gradient, "head": self.seen.head_gradient}
        if self.rule.release != "difference":
            moved = {name: change * (self.rates[name] * self.rule.path) for name, change in moved.items()}
        before = {"weight": self.seen.weight, "head": self.seen.head_weight}
        return sum(_UNIT_ROUNDOFF * float(before[name].norm() / change.norm()) for name, change in moved.items())

    def residuals(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Squared relative residuals of head and layer, up to the update's scale, for features `(n, r)`."""
        update = self._moved(features, labels)
        if self.rule.release != "difference":
            update = {name: update[name] / self.rates[name] for name in self.observed}
        norms = {name: observed.square().sum() for name, observed in self.observed.items()}
        inner = sum((update[name] * self.observed[name]).sum() / norm for name, norm in norms.items())
        scale = inner / sum(update[name].square().sum() / norm for name, norm in norms.items())
        head, weight = ((scale * update[n] - self.observed[n]).square().sum() / norm for n, norm in norms.items())
        return head, weight

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

    def _moved(self, features: Tensor, labels: Tensor) -> Update:
        """Weights before minus weights after training."""
        targets = torch.nn.functional.one_hot(labels, len(self.start["head"])).to(features.dtype)
        # rounded as in a client that computes in single precision
        momentum = torch.tensor(self.rule.momentum).double()
        at, velocity = self.start, None
        for _ in range(self.rule.steps):
            gradient = self._gradient(at, features, targets)
            if velocity is not None:
                gradient = {name: value + momentum * velocity[name] for name, value in gradient.items()}
            velocity = gradient
            at = {name: value - self.rates[name] * velocity[name] for name, value in at.items()}
        return {name: value - at[name] for name, value in self.start.items()}

    def _gradient(self, at: Update, features: Tensor, targets: Tensor) -> Update:
        """Gradient of the mean cross-entropy."""
        z = features @ at["weight"].T + at["bias"]
        value = self.seen.activation.value(z)
        deltas = (torch.softmax(value @ at["head"].T + at["head_bias"], dim=1) - targets) / len(features)
        back = (deltas @ at["head"]) * self.seen.activation.slope(z)
        return {
            "weight": back.T @ features,
            "bias": back.sum(dim=0),
            "head": deltas.T @ value,
            "head_bias": deltas.sum(dim=0),
        }


def _rate(rule: LocalSteps, name: str) -> Tensor:
    return torch.tensor(rule.rates.get(name, 0.0), dtype=torch.float64)


def _by_block(seen: LayerGradient, rule: LocalSteps, part: str) -> Tensor:
    """Learning rate of every neuron, `(m,)`."""
    trained, drawn = (_rate(rule, f"feature_layer.{block}.{part}") for block in ("trained", "random"))
    return torch.where(seen.gaussian, drawn, trained)
