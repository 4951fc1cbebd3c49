"""The Gauss-Newton system against a Jacobian by autograd, and the truth as a root of the equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from lit_recon.attacks.updates.features.activations import GELU, RELU, TANH, Activation
from lit_recon.attacks.updates.features.equations import FeatureEquations
from lit_recon.attacks.updates.features.layer import GradientNoise, LayerGradient
from lit_recon.attacks.updates.features.moments import weight_span
from lit_recon.attacks.updates.features.polish import MaskedEquations, masked_polish, polish, with_signs

Build = Callable[..., tuple[LayerGradient, Tensor, Tensor]]


def masks(seen: LayerGradient) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    head = torch.rand(seen.head_gradient.shape, generator=generator) > 0.4
    rows = torch.rand(len(seen.bias), generator=generator) > 0.3
    return head, rows


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("activation", [GELU, TANH], ids=lambda a: a.name)
def test_normal_system_against_autograd(build: Build, activation: Activation, masked: bool) -> None:
    seen, _, _ = build(activation, n=3, d=6, m=40, k=4, dtype=torch.float64, bias=0.3)
    head_mask, rows = masks(seen) if masked else (None, None)
    basis = weight_span(seen.weight_gradient, 3)
    equations = FeatureEquations.of(seen, basis, head_mask=head_mask, rows=rows)
    generator = torch.Generator().manual_seed(9)
    features = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    deltas = torch.randn(3, equations.n_classes, generator=generator, dtype=torch.float64)
    head_seen = torch.ones_like(seen.head_gradient) if head_mask is None else head_mask.double()
    row_seen = torch.ones_like(seen.bias) if rows is None else rows.double()
    combine = torch.eye(4, dtype=torch.float64) if equations.combinations is None else equations.combinations
    observed_head = (combine @ seen.head_gradient) * (head_seen if masked else 1)
    observed = seen.weight_gradient @ basis
    if not masked:
        observed = torch.cat([observed, seen.bias_gradient[:, None]], dim=1)
    observed = observed * row_seen[:, None]

    def residuals(c: Tensor, delta: Tensor) -> Tensor:
        z = c @ (seen.weight @ basis).T + seen.bias
        slope = activation.slope(z)
        head = (delta.T @ activation.value(z)) * (head_seen if masked else 1) - observed_head
        inputs = c if masked else torch.cat([c, torch.ones(3, 1, dtype=torch.float64)], dim=1)
        weight = ((delta @ combine @ seen.head_weight) * slope).T @ inputs * row_seen[:, None] - observed
        return torch.cat([head.flatten() / observed_head.norm(), weight.flatten() / observed.norm()])

    found = residuals(features, deltas)
    full = torch.cat([part.flatten(1) for part in jacobian(residuals, (features, deltas))], dim=1)
    system = equations.normal_system(features, deltas)
    torch.testing.assert_close(system.matrix, full.T @ full, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(system.slope, full.T @ found, rtol=1e-9, atol=1e-10)
    assert system.objective == pytest.approx(float(found.square().sum()), rel=1e-12)
    assert equations.objective(features, deltas) == pytest.approx(system.objective, rel=1e-12)
    head_only = equations.normal_system(features, deltas, weighted=False).objective
    assert equations.objective(features, deltas, weighted=False) == pytest.approx(head_only, rel=1e-12)
    assert head_only < system.objective


def test_masked_equations_have_the_right_derivative(build: Build) -> None:
    seen, _, _ = build(GELU, n=2, d=5, m=30, k=3, dtype=torch.float64, bias=0.2)
    generator = torch.Generator().manual_seed(4)
    weight_mask = torch.rand(seen.weight.shape, generator=generator) > 0.5
    head_mask = torch.rand(seen.head_gradient.shape, generator=generator) > 0.5
    equations = MaskedEquations(seen, weight_mask, head_mask)
    features = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    deltas = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    head, weight, along_features, along_deltas = equations.value_and_gradient(features, deltas)
    for value, slope in ((features, along_features), (deltas, along_deltas)):
        for index in ((0, 1), (1, 2)):
            step = 1e-6
            before = float(value[index])
            value[index] = before + step
            upper = sum(equations.value_and_gradient(features, deltas)[:2])
            value[index] = before - step
            lower = sum(equations.value_and_gradient(features, deltas)[:2])
            value[index] = before
            assert 2 * float(slope[index]) == pytest.approx((upper - lower) / (2 * step), rel=1e-6)
    assert equations.certificate(features, deltas) == pytest.approx(head**0.5 + weight**0.5)


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_the_truth_leaves_no_residual(build: Build, activation: Activation) -> None:
    seen, truth, _ = build(activation, dtype=torch.float64)
    basis = weight_span(seen.weight_gradient, 4)
    equations = FeatureEquations.of(seen, basis)
    deltas, objective = equations.best_deltas(truth @ basis)
    assert objective < 1e-12
    assert sum(equations.residuals(truth @ basis, deltas)) < 1e-9
    # deltas are those of the cross-entropy: they sum to zero over classes
    assert equations.by_class(deltas).sum(dim=1).abs().max() < 1e-8
    wrong = truth.roll(1, dims=1) @ basis
    assert sum(equations.residuals(wrong, equations.best_deltas(wrong)[0])) > 0.1


def test_signs_come_from_the_bias_and_from_the_fit(build: Build) -> None:
    seen, truth, _ = build(GELU)
    basis = weight_span(seen.weight_gradient, 4)
    start = truth @ basis * torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64)
    for equations in (
        FeatureEquations.of(seen, basis),
        FeatureEquations.of(replace(seen, bias_gradient=torch.zeros_like(seen.bias)), basis),
    ):
        torch.testing.assert_close(with_signs(equations, start), truth @ basis)


def test_double_precision_gradients_are_met_to_double_precision(build: Build) -> None:
    seen, truth, _ = build(GELU, dtype=torch.float64)
    basis = weight_span(seen.weight_gradient, 4)
    generator = torch.Generator().manual_seed(1)
    start = truth @ basis + 0.1 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
    found = polish(FeatureEquations.of(seen, basis), torch.nn.functional.normalize(start, dim=1))
    assert found.certificate < 1e-9  # measured 1e-14
    assert (found.features @ basis.T - truth).abs().max() < 1e-9


def test_masked_polish_never_ends_worse_than_it_began(build: Build) -> None:
    seen, truth, _ = build(GELU, dtype=torch.float64)
    basis = weight_span(seen.weight_gradient, 4)
    equations = FeatureEquations.of(seen, basis)
    deltas = equations.by_class(equations.best_deltas(truth @ basis)[0])
    everywhere = MaskedEquations(seen)
    assert masked_polish(everywhere, truth, deltas).certificate <= everywhere.certificate(truth, deltas)
    generator = torch.Generator().manual_seed(1)
    rough = truth + 0.02 * torch.randn(truth.shape, generator=generator, dtype=torch.float64)
    found = masked_polish(everywhere, rough, deltas)
    assert found.certificate < 1e-3 * everywhere.certificate(rough, deltas)


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_equations_through_noise_without_the_residual_of_every_entry(build: Build, activation: Activation) -> None:
    """Products of rows instead of the residual, which a mask of ones has computed: equal up to rounding."""
    seen, truth, _ = build(activation, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(seen.weight_gradient.shape, generator=generator, dtype=torch.float64)
    seen = replace(seen, weight_gradient=seen.weight_gradient + 1e-3 * seen.weight_gradient.std() * drawn)
    noise = GradientNoise(1e-3 * float(seen.weight_gradient.std()), 1e-3)
    short, long = (MaskedEquations(seen, mask, noise=noise) for mask in (None, torch.ones_like(seen.weight_gradient)))
    deltas = torch.randn(len(truth), len(seen.head_weight), generator=generator, dtype=torch.float64)
    for features in (truth, torch.nn.functional.normalize(truth.roll(1, 0) + 0.3, dim=1)):
        expected = long.value_and_gradient(features, deltas)
        for ours, theirs in zip(short.value_and_gradient(features, deltas), expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-9, atol=1e-9)
