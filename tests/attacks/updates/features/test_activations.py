"""Derivatives against autograd, Hermite coefficients against closed forms and SciPy's adaptive quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn

from lit_recon.attacks.updates.features.activations import (
    ELU,
    GELU,
    RELU,
    SIGMOID,
    SOFTPLUS,
    TANH,
    Activation,
    activation_of,
    hermite_coefficients,
    usable_orders,
)
from lit_recon.errors import UnsupportedModelError

LAYERS = {
    "relu": nn.ReLU(),
    "elu": nn.ELU(),
    "gelu": nn.GELU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "softplus": nn.Softplus(),
}
POLYNOMIALS = (
    lambda s: 1.0,
    lambda s: s,
    lambda s: s**2 - 1,
    lambda s: s**3 - 3 * s,
    lambda s: s**4 - 6 * s**2 + 3,
)


@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_are_those_of_the_layer(name: str) -> None:
    layer = LAYERS[name]
    activation = activation_of(layer)
    z = torch.linspace(-6, 6, 200, dtype=torch.float64, requires_grad=True)
    value = layer(z)
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    curvature = torch.zeros_like(z)
    if slope.requires_grad:
        (curvature,) = torch.autograd.grad(slope.sum(), z)
    points = z.detach()
    torch.testing.assert_close(activation.value(points), value.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(activation.slope(points), slope.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(activation.curvature(points), curvature, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("layer", [nn.SiLU(), nn.GELU(approximate="tanh"), nn.ELU(alpha=2.0), nn.Softplus(beta=2.0)])
def test_unknown_activations_are_refused(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match="derivatives"):
        activation_of(layer)


@pytest.mark.parametrize("shift", [0.0, 1.0, -0.37])
@pytest.mark.parametrize("activation", [RELU, ELU, GELU, TANH, SIGMOID, SOFTPLUS], ids=lambda a: a.name)
def test_hermite_coefficients_against_adaptive_quadrature(activation: Activation, shift: float) -> None:
    for order, found in enumerate(hermite_coefficients(activation, 4, shift)):

        def integrand(s: float, order: int = order) -> float:
            value = float(activation.value(torch.tensor(s + shift, dtype=torch.float64)))
            return value * POLYNOMIALS[order](s) * math.exp(-(s**2) / 2) / math.sqrt(2 * math.pi)

        expected = sum(quad(integrand, *ends, epsabs=1e-12)[0] for ends in ((-10, -shift), (-shift, 10)))
        assert found == pytest.approx(expected, abs=1e-10)


def test_closed_forms_of_relu() -> None:
    root = 1 / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(hermite_coefficients(RELU), [root, 0.5, root, 0, -root], atol=1e-13)


@pytest.mark.parametrize(
    ("activation", "second", "third", "fourth"),
    [(RELU, 0.3989, 0, -0.3989), (GELU, 0.4231, 0, -0.3526), (SOFTPLUS, 0.2066, 0, -0.0624), (TANH, 0, -0.3636, 0)],
    ids=lambda a: getattr(a, "name", None),
)
def test_coefficients_in_the_literature(activation: Activation, second: float, third: float, fourth: float) -> None:
    np.testing.assert_allclose(hermite_coefficients(activation)[2:], [second, third, fourth], atol=6e-5)


def test_usable_orders_are_computed_from_the_function() -> None:
    cubic = Activation("cubic", lambda z: z**2 + z**3, lambda z: 2 * z + 3 * z**2, lambda z: 2 + 6 * z)
    linear = Activation("linear", lambda z: z, torch.ones_like, torch.zeros_like)
    assert usable_orders(cubic) == (2, 3)
    assert usable_orders(linear) == ()
    assert [usable_orders(a) for a in (GELU, SOFTPLUS, TANH, SIGMOID)] == [(2, 4), (2, 4), (3,), (3,)]
