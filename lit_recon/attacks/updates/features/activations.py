"""Scalar activations with the two derivatives that the solvers need, and their Hermite coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.polynomial import hermite_e, legendre
from torch import Tensor, nn

from lit_recon.errors import UnsupportedModelError

Elementwise = Callable[[Tensor], Tensor]

#: Integration limit: a standard normal beyond it is negligible in double precision. Panels on either side of the kink,
#: and Gauss-Legendre nodes in each: error below 1e-13 for all activations here.
_TAIL, _PANELS, _NODES = 14.0, 14, 24
#: Smallest usable Hermite coefficient, relative to the activation's standard deviation.
USABLE = 1e-3


@dataclass(frozen=True)
class Activation:
    """An elementwise activation `value` with its first two derivatives.

    A `smooth` one has a continuous slope; else there is a kink at zero, as in a ReLU. `odd`: `value(-z) = -value(z)`.
    """

    name: str
    value: Elementwise
    slope: Elementwise
    curvature: Elementwise
    smooth: bool = True
    odd: bool = False


def hermite_coefficients(activation: Activation, order: int = 4, shift: float = 0.0) -> list[float]:
    """E[activation(s + shift) He_p(s)] for s ~ N(0, 1) and p = 0 to `order`, by composite Gauss-Legendre quadrature.

    By Stein's identity these are the mean p-th derivatives, the factors of a gradient's p-th moment. `activation` is
    smooth apart from zero; `shift` is the bias of the neurons.

    Source: [Wang2023], section 4 (nu and lambda); Stein 1981.
    """
    nodes, weights = legendre.leggauss(_NODES)
    # panels end at the kink: the rule needs smooth integrands
    edges = np.concatenate([np.linspace(-_TAIL, 0, _PANELS + 1), np.linspace(0, _TAIL, _PANELS + 1)[1:]]) - shift
    half = np.diff(edges)[:, None] / 2
    points = (edges[:-1, None] + half + half * nodes).ravel()
    density = (half * weights).ravel() * np.exp(-(points**2) / 2) / math.sqrt(2 * math.pi)
    values = activation.value(torch.from_numpy(points + shift)).numpy() * density
    # a vanishing coefficient is exactly zero
    found = [float(values @ hermite_e.hermeval(points, np.eye(order + 1)[p])) for p in range(order + 1)]
    return [0.0 if abs(value) < 1e-12 else value for value in found]


@cache
def usable_orders(activation: Activation) -> tuple[int, ...]:
    """Orders among 2, 3 and 4 with nonzero Hermite coefficient, whose moments depend on the features."""
    coefficients = hermite_coefficients(activation)
    spread = math.sqrt(sum(c**2 / math.factorial(p) for p, c in enumerate(coefficients) if p))
    return tuple(p for p in (2, 3, 4) if abs(coefficients[p]) > USABLE * spread)


def activation_of(layer: nn.Module) -> Activation:
    """The activation of a layer; one without known derivatives raises an `UnsupportedModelError`."""
    known = _BY_LAYER.get(type(layer))
    standard = getattr(layer, "approximate", "none") == "none" and getattr(layer, "alpha", 1.0) == 1.0
    if known is None or not standard or getattr(layer, "beta", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"feature recovery knows the derivatives of {sorted(a.name for a in _BY_LAYER.values())} with their "
            f"standard settings; the feature layer uses {layer}: build it with one of those activations"
        )
    return known


def _density(z: Tensor) -> Tensor:
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def _exponential_below(z: Tensor) -> Tensor:
    return z.clamp(max=0).exp()


RELU = Activation("relu", torch.relu, lambda z: (z > 0).to(z.dtype), torch.zeros_like, smooth=False)
ELU = Activation("elu", nn.functional.elu, _exponential_below, lambda z: torch.where(z > 0, 0.0, _exponential_below(z)))
GELU = Activation(
    "gelu",
    lambda z: z * torch.special.ndtr(z),
    lambda z: torch.special.ndtr(z) + z * _density(z),
    lambda z: (2 - z.square()) * _density(z),
)
TANH = Activation(
    "tanh",
    torch.tanh,
    lambda z: 1 - torch.tanh(z) ** 2,
    lambda z: -2 * torch.tanh(z) * (1 - torch.tanh(z) ** 2),
    odd=True,
)
SIGMOID = Activation(
    "sigmoid",
    torch.sigmoid,
    lambda z: torch.sigmoid(z) * torch.sigmoid(-z),
    lambda z: torch.sigmoid(z) * torch.sigmoid(-z) * (1 - 2 * torch.sigmoid(z)),
)
SOFTPLUS = Activation("softplus", nn.functional.softplus, torch.sigmoid, lambda z: torch.sigmoid(z) * torch.sigmoid(-z))

_BY_LAYER: dict[type[nn.Module], Activation] = {
    nn.ReLU: RELU,
    nn.ELU: ELU,
    nn.GELU: GELU,
    nn.Tanh: TANH,
    nn.Sigmoid: SIGMOID,
    nn.Softplus: SOFTPLUS,
}
