"""Closed forms of two-layer networks against automatic differentiation, and against published figures."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import GELU, RELU, SIGMOID, SOFTPLUS, TANH, Activation
from lit_recon.bounds import (
    NoisyRelease,
    TwoLayerJacobian,
    TwoLayerNet,
    autograd_jacobian,
    cramer_rao,
    fisher_information,
    moments_noise,
)
from lit_recon.bounds.two_layer import Loss, log_slope, replacement_sensitivity
from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.privacy import gaussian_mu
from lit_recon.records import Update

LOSSES: tuple[Loss, ...] = ("squared", "cross_entropy")


def small(
    activation: Activation = TANH, loss: Loss = "squared", m: int = 9, d: int = 5, n: int = 3
) -> tuple[TwoLayerNet, Tensor, Tensor]:
    """A network with biases that are not zero, so that no term of the Jacobian vanishes."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    net = TwoLayerNet(normal(m, d), normal(m), normal(4, m), activation, loss)
    return net, normal(n, d), normal(n, 4) if loss == "squared" else torch.tensor([0, 3, 3])[:n]


def standard(d: int, m: int, n: int, loss: Loss, activation: Activation = TANH, seed: int = 0) -> TwoLayerJacobian:
    """The random networks in mean-field scaling of the figures below."""
    generator = torch.Generator().manual_seed(seed)
    k = 1 if loss == "squared" else 10
    weight = torch.randn(m, d, generator=generator, dtype=torch.float64)
    head = torch.randn(k, m, generator=generator, dtype=torch.float64) / m
    inputs = torch.randn(n, d, generator=generator, dtype=torch.float64)
    inputs = inputs / inputs.norm(dim=1, keepdim=True)
    if loss == "squared":
        targets = torch.where(torch.rand(n, 1, generator=generator) < 0.5, 1.0, -1.0).double()
    else:
        targets = torch.randint(0, k, (n,), generator=generator)
    return TwoLayerJacobian(TwoLayerNet(weight, weight.new_zeros(m), head, activation, loss), inputs, targets)


def flat(update: Update) -> Tensor:
    return torch.cat([value.flatten() for value in update.values()])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", [TANH, SOFTPLUS, RELU, GELU, SIGMOID], ids=lambda a: a.name)
def test_jacobian_is_that_of_automatic_differentiation(activation: Activation, loss: Loss) -> None:
    net, inputs, targets = small(activation, loss)
    ours = TwoLayerJacobian(net, inputs, targets, chunk=4)
    theirs = torch.func.jacrev(lambda x: net.update(x, targets))(inputs)
    for name, value in ours.update.items():
        for index, row in enumerate(theirs[name].reshape(value.numel(), -1)):
            unit = {key: torch.zeros_like(other) for key, other in ours.update.items()}
            unit[name].view(-1)[index] = 1
            assert (ours.transposed(unit) - row).abs().max() < 1e-10


@pytest.mark.parametrize("loss", LOSSES)
def test_update_is_the_gradient_of_the_summed_loss(loss: Loss) -> None:
    net, inputs, targets = small(GELU, loss)
    weight, head = net.weight.clone().requires_grad_(), net.head.clone().requires_grad_()
    outputs = torch.nn.functional.gelu(inputs @ weight.T + net.bias) @ head.T
    if loss == "squared":
        value = 0.5 * (outputs - targets).square().sum()
    else:
        value = torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")
    expected = dict(zip(("layer", "head"), torch.autograd.grad(value, (weight, head)), strict=True))
    for name, found in net.update(inputs, targets).items():
        assert torch.allclose(found, expected[name], atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 9, None])
@pytest.mark.parametrize("loss", LOSSES)
def test_streaming_equals_dense(loss: Loss, chunk: int | None) -> None:
    net, inputs, targets = small(TANH, loss)
    streamed = TwoLayerJacobian(net, inputs, targets, chunk)
    dense = autograd_jacobian(lambda x: net.update(x, targets), inputs, chunk=7)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.rand(v.shape, generator=generator, dtype=v.dtype) for name, v in streamed.update.items()}
    assert torch.allclose(streamed.gram(2.0), dense.gram(2.0), rtol=1e-10, atol=1e-10)
    assert torch.allclose(streamed.gram(weights), dense.gram(weights), rtol=1e-10, atol=1e-10)
    assert torch.allclose(streamed.transposed(weights), dense.transposed(weights), rtol=1e-10, atol=1e-10)


def test_quadratic_form_of_many_inputs() -> None:
    net = standard(64, 300, 4, "squared", GELU).net
    generator = torch.Generator().manual_seed(1)
    inputs, direction = torch.randn(2, 4, 64, generator=generator, dtype=torch.float64)
    targets = torch.ones(4, 1, dtype=torch.float64)
    gram = TwoLayerJacobian(net, inputs, targets).gram()
    _, moved, *_ = torch.func.jvp(lambda x: net.update(x, targets), (inputs,), (direction,))
    quadratic = direction.flatten() @ gram @ direction.flatten()
    assert gram.shape == (256, 256)
    assert float(quadratic) == pytest.approx(float(flat(moved).square().sum()), rel=1e-10)


@pytest.mark.parametrize("fraction", [0.5, 2.0])
def test_clipping_is_differentiated_exactly(fraction: float) -> None:
    net, inputs, targets = small(TANH, "cross_entropy")
    jacobian = TwoLayerJacobian(net, inputs, targets)
    bound = fraction * float(flat(jacobian.update).norm())
    generator = torch.Generator().manual_seed(0)
    kept = {name: torch.rand(v.shape, generator=generator) > 0.3 for name, v in jacobian.update.items()}
    std = {name: 0.1 + torch.rand(v.shape, generator=generator, dtype=v.dtype) for name, v in jacobian.update.items()}
    release = NoisyRelease(std, kept, bound)

    def clipped(x: Tensor) -> Update:
        update = net.update(x, targets)
        factor = (bound / flat(update).norm()).clamp(max=1.0)
        return {name: factor * value for name, value in update.items()}

    expected = autograd_jacobian(clipped, inputs).gram(release.precision(jacobian.update))
    assert torch.allclose(fisher_information(jacobian, release), expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(v, kept[n] * clipped(inputs)[n]) for n, v in release.mean(jacobian.update).items())


@pytest.mark.parametrize("loss", LOSSES)
def test_clipping_of_examples_is_differentiated_exactly(loss: Loss) -> None:
    net, inputs, targets = small(GELU, loss)
    singles = [net.update(inputs[i : i + 1], targets[i : i + 1]) for i in range(3)]
    norms = sorted(float(flat(single).norm()) for single in singles)
    bound, std = (norms[0] + norms[1]) / 2, 0.3  # one example stays as it is, two are clipped

    def mean_of_clipped(x: Tensor) -> Update:
        total: Update = {}
        for i in range(3):
            update = net.update(x[i : i + 1], targets[i : i + 1])
            factor = (bound / flat(update).norm()).clamp(max=1.0) / 3
            total = {name: total.get(name, 0) + factor * value for name, value in update.items()}
        return total

    expected = autograd_jacobian(mean_of_clipped, inputs)
    found = TwoLayerJacobian(net, inputs, targets).after_clipped_examples(singles, bound).released(NoisyRelease(std))
    assert torch.allclose(found.information, expected.gram(std**-2), rtol=1e-9, atol=1e-9)
    assert all(torch.allclose(value, expected.update[name]) for name, value in found.update.items())


@pytest.mark.parametrize(
    ("loss", "axis", "exact", "relaxed"),
    [
        ("squared", "d", 0.96, 0.96),
        ("squared", "m", -1.06, -0.98),
        ("squared", "n", 1.68, 0.98),
        ("cross_entropy", "d", 0.60, 0.96),
        ("cross_entropy", "n", 1.30, 1.01),
    ],
)
def test_slopes_of_the_bound(loss: Loss, axis: str, exact: float, relaxed: float) -> None:
    sizes = {
        "d": [(d, 2048, 2) for d in (8, 16, 32, 64)],
        "m": [(16, m, 2) for m in (512, 1024, 2048, 4096)],
        "n": [(16, 2048, n) for n in (1, 2, 4, 8)],
    }[axis]
    place = "dmn".index(axis)
    bounds = [[cramer_rao(standard(*size, loss, seed=seed).gram()) for seed in (0, 1)] for size in sizes]
    xs = [float(size[place]) for size in sizes]
    assert log_slope(xs, [sum(b.squared for b in pair) for pair in bounds]).value == pytest.approx(exact, abs=0.005)
    assert log_slope(xs, [sum(b.relaxed for b in pair) for pair in bounds]).value == pytest.approx(relaxed, abs=0.005)


def test_conditioning_makes_the_exact_bound_steeper_than_the_relaxed_one() -> None:
    found = [cramer_rao(standard(16, 2048, n, "squared", SOFTPLUS).gram()).squared for n in (1, 2, 4, 8)]
    both = [cramer_rao(standard(16, 2048, n, "squared", SOFTPLUS, seed=1).gram()).squared for n in (1, 2, 4, 8)]
    slope = log_slope([1, 2, 4, 8], [a + b for a, b in zip(found, both, strict=True)]).value
    assert slope == pytest.approx(3.3, abs=0.05)


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[TwoLayerJacobian, float]]:
    jacobians = {loss: standard(16, 2048, 4, loss) for loss in LOSSES}
    return {loss: (jacobian, cramer_rao(jacobian.gram()).squared) for loss, jacobian in jacobians.items()}


Reference = dict[str, tuple[TwoLayerJacobian, float]]


@pytest.mark.parametrize(
    ("loss", "rate", "factor"),
    [("squared", 0.3, 1.44), ("squared", 0.7, 3.6), ("squared", 0.9, 16.5), ("cross_entropy", 0.9, 10.9)],
)
def test_factors_of_dropout(reference: Reference, loss: Loss, rate: float, factor: float) -> None:
    jacobian, base = reference[loss]
    generator = torch.Generator().manual_seed(1)
    kept = {name: torch.rand(jacobian.update[name].shape, generator=generator) > rate for name in ("head", "layer")}
    found = cramer_rao(fisher_information(jacobian, NoisyRelease(1.0, kept))).squared / base
    assert found == pytest.approx(factor, rel=0.005)


@pytest.mark.parametrize(
    ("loss", "fraction", "factor"),
    [
        ("squared", 0.94, 1.00),
        ("squared", 0.97, 2.0),
        ("squared", 0.99, 10.7),
        ("cross_entropy", 0.7, 1.11),
        ("cross_entropy", 0.9, 3.0),
        ("cross_entropy", 0.97, 55),
        ("cross_entropy", 0.99, 343),
    ],
)
def test_factors_of_global_pruning(reference: Reference, loss: Loss, fraction: float, factor: float) -> None:
    jacobian, base = reference[loss]
    values = flat(jacobian.update).abs()
    threshold = values.kthvalue(int(fraction * len(values))).values
    kept = {name: value.abs() > threshold for name, value in jacobian.update.items()}
    found = cramer_rao(fisher_information(jacobian, NoisyRelease(1.0, kept))).squared / base
    assert found == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize(("fraction", "factor"), [(0.3, 1.41), (0.5, 2.1), (0.7, 4.2), (0.9, 38)])
def test_factors_of_pruning_by_layer(reference: Reference, fraction: float, factor: float) -> None:
    jacobian, base = reference["squared"]
    kept = {
        name: value.abs() > value.abs().flatten().kthvalue(int(fraction * value.numel())).values
        for name, value in jacobian.update.items()
    }
    found = cramer_rao(fisher_information(jacobian, NoisyRelease(1.0, kept))).squared / base
    assert found == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(("share", "factor"), [(0.5, 4.3), (0.1, 108), (0.01, 1.08e4)])
def test_factors_of_clipping(reference: Reference, share: float, factor: float) -> None:
    jacobian, base = reference["squared"]
    release = NoisyRelease(1.0, bound=share * float(flat(jacobian.update).norm()))
    assert cramer_rao(fisher_information(jacobian, release)).squared / base == pytest.approx(factor, rel=0.005)


def test_no_replaced_example_moves_the_gradient_by_more_than_the_sensitivity() -> None:
    jacobian = standard(8, 200, 1, "squared", TANH)
    net, limit = jacobian.net, replacement_sensitivity(jacobian.net)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.nn.functional.normalize(torch.randn(50, 8, generator=generator, dtype=torch.float64), dim=1)
    found = [flat(net.update(x[None], torch.tensor([[s]]).double())) for x in inputs for s in (-1.0, 1.0)]
    apart = max(float((a - b).norm()) for a in found for b in found)
    assert limit / 5 < apart <= limit  # measured: a quarter of it


@pytest.mark.parametrize(("loss", "bias"), [("cross_entropy", 0.0), ("squared", 1.0)])
def test_the_sensitivity_is_refused_where_it_is_not_known(loss: Loss, bias: float) -> None:
    net, _, _ = small(TANH, loss)
    changed = TwoLayerNet(net.weight, torch.full_like(net.bias, bias), net.head, TANH, loss)
    with pytest.raises(UnsupportedModelError, match="clip the gradients"):
        replacement_sensitivity(changed)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 100.0, 1e4])
def test_the_moments_accountant_asks_for_a_little_more_than_the_exact_noise(epsilon: float) -> None:
    noise = moments_noise(2.0, epsilon, 1e-5)
    mu = 2.0 / noise
    assert mu**2 / 2 + mu * math.sqrt(2 * math.log(1e5)) == pytest.approx(epsilon, rel=1e-12)
    assert 1.0 < noise * gaussian_mu(epsilon, 1e-5) / 2.0 < 1.6  # measured at most 1.57


@pytest.mark.parametrize("arguments", [(0.0, 1.0, 0.1), (1.0, 0.0, 0.1), (1.0, 1.0, 1.0)])
def test_noise_for_impossible_privacy_is_refused(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="noise needs"):
        moments_noise(*arguments)


def test_shapes_are_checked() -> None:
    net, inputs, targets = small()
    with pytest.raises(ShapeError, match="head"):
        TwoLayerNet(net.weight, net.bias, net.head.T, TANH)
    with pytest.raises(ConfigError, match="loss"):
        TwoLayerNet(net.weight, net.bias, net.head, TANH, "hinge")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="takes inputs"):
        net.residuals(inputs[:, 1:], targets)
