"""Hermite moments against automatic differentiation of the Gaussian density, and against their expectations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from lit_recon.attacks.updates.features.activations import GELU, RELU, SOFTPLUS, TANH, Activation, hermite_coefficients
from lit_recon.attacks.updates.features.layer import LayerGradient
from lit_recon.attacks.updates.features.moments import (
    class_combinations,
    fourth_moment,
    moment_span,
    residuals_on,
    second_moment,
    slices,
    third_moment,
)
from lit_recon.errors import UnsupportedModelError

Build = Callable[..., tuple[LayerGradient, Tensor, Tensor]]
LINEAR = Activation("linear", lambda z: z, torch.ones_like, torch.zeros_like)


def hermite_tensor(w: Tensor, order: int) -> Tensor:
    """H_p(w) = (-1)^p (d/dw)^p density / density."""

    def density(x: Tensor) -> Tensor:
        return torch.exp(-x.square().sum() / 2)

    derivative = density
    for _ in range(order):
        derivative = jacrev(derivative)
    value: Tensor = (-1) ** order * derivative(w) / density(w)
    return value


def test_contractions_are_those_of_hermite_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    v, w = torch.randn(2, 3, generator=generator, dtype=torch.float64)

    def mean(order: int) -> Tensor:
        return torch.einsum("qm,m...->q...", values, torch.stack([hermite_tensor(row, order) for row in weight])) / 5

    torch.testing.assert_close(second_moment(values, weight), mean(2))
    torch.testing.assert_close(third_moment(values, weight, v), mean(3) @ v)
    torch.testing.assert_close(fourth_moment(values, weight, v, w), mean(4) @ w @ v)


@pytest.mark.parametrize("activation", [RELU, GELU, SOFTPLUS], ids=lambda a: a.name)
def test_expectation_of_moments(activation: Activation) -> None:
    generator = torch.Generator().manual_seed(1)
    m, d = 400_000, 4
    weight = torch.randn(m, d, generator=generator, dtype=torch.float64)
    features = torch.nn.functional.normalize(torch.randn(2, d, generator=generator, dtype=torch.float64), dim=1)
    strength = torch.tensor([1.0, -0.5], dtype=torch.float64)
    values = (strength @ activation.value(features @ weight.T))[None]
    _, _, second, _, fourth = hermite_coefficients(activation)
    expected = second * torch.einsum("i,ia,ib->ab", strength, features, features)
    i, j = torch.triu_indices(d, d)
    # sampling error: about 1 / sqrt(m) = 0.0016 times a factor of a few
    torch.testing.assert_close(second_moment(residuals_on(values, weight), weight)[0], expected, atol=0.01, rtol=0)
    v, w = torch.eye(d, dtype=torch.float64)[:2]
    expected = fourth * torch.einsum("i,i,i,ia,ib->ab", strength, features @ v, features @ w, features, features)
    reduced = residuals_on(values, torch.cat([weight, weight[:, i] * weight[:, j]], dim=1))
    torch.testing.assert_close(fourth_moment(reduced, weight, v, w)[0], expected, atol=0.02, rtol=0)


def test_control_variates_leave_nothing_of_polynomials() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    polynomial = (3 + weight @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))[None]
    assert residuals_on(polynomial, weight).abs().max() < 1e-9


def test_class_combinations_keep_all_examples(build: Build) -> None:
    seen, _, _ = build(GELU, n=3)
    combined = class_combinations(seen.head_gradient, 3)
    assert combined.shape == (3, 1024)
    # the head's gradient has rank 3, so that three combinations span it
    leftover = seen.head_gradient - seen.head_gradient @ torch.linalg.pinv(combined) @ combined
    assert leftover.norm() < 1e-4 * seen.head_gradient.norm()
    assert class_combinations(torch.zeros(4, 8, dtype=torch.float64), 2).shape == (1, 8)


@pytest.mark.parametrize("control_variates", [False, True])
@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_error_of_the_span_follows_theory(build: Build, activation: Activation, control_variates: bool) -> None:
    # tan^2 = K (d - 1) / m, K = E[r(s)^2 s^2] / c_2^2 with r = s(.) or what control variates leave of it
    d, m = 48, 8192
    s = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-(s**2) / 2) / math.sqrt(2 * math.pi) * (s[1] - s[0])
    c0, c1, c2 = hermite_coefficients(activation, 2)
    value = activation.value(s) - (c0 + c1 * s if control_variates else 0)
    constant = float((value.square() * s.square() * density).sum()) / c2**2
    expected = constant * (d - 1) / m
    found = []
    for seed in range(6):
        seen, truth, _ = build(activation, n=1, d=d, m=m, kind="random", seed=seed)
        basis = moment_span(seen, control_variates)
        cosine = float((truth @ basis).square())
        found.append((1 - cosine) / cosine)
    assert sum(found) / 6 == pytest.approx(expected, rel=0.2)  # measured within 0.1


def test_power_iteration_agrees_with_eigendecomposition(build: Build) -> None:
    seen, _, _ = build(GELU, n=1, m=8192, kind="random")
    direct = moment_span(seen)
    iterated = moment_span(seen, iterations=80)
    assert float((direct.T @ iterated).abs()) > 1 - 1e-6


def test_odd_activations_use_third_moments(build: Build) -> None:
    # with d = 6 and many neurons the contracted third moment shows the span of tanh, whose second vanishes
    seen, truth, _ = build(TANH, n=2, d=6, m=65_536, kind="random")
    basis = moment_span(seen, control_variates=True)
    assert float((truth - truth @ basis @ basis.T).norm(dim=1).mean()) < 0.3


def test_no_usable_moments(build: Build) -> None:
    seen, _, _ = build(LINEAR, n=1, d=3, m=30)
    with pytest.raises(UnsupportedModelError, match="ExactRecovery"):
        moment_span(seen)
    with pytest.raises(UnsupportedModelError, match="Hermite"):
        slices(seen, torch.eye(3, 1, dtype=torch.float64))
