"""Class counts from the gradient of a head: bounds on them, inputs that explain it, and whole numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.labels.counts import (
    HeadProjections,
    count_labels,
    first_guess,
    lower_bounds,
    whole_counts,
)
from lit_recon.attacks.updates.labels.equations import HeadEquations
from lit_recon.attacks.updates.labels.head import HeadGradient


def head_of_batch(
    labels: Tensor, n_classes: int, seed: int, size: int = 24, scale: float = 2.0, spread: float = 1.0
) -> HeadGradient:
    """Gradient, by autograd in single precision, of a confident head that sees sparse non-negative inputs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(len(labels), size, generator=generator).relu()
    weight = (scale * torch.randn(n_classes, size, generator=generator) / size**0.5).requires_grad_()
    bias = (spread * torch.randn(n_classes, generator=generator)).requires_grad_()
    loss = nn.functional.cross_entropy(nn.functional.linear(inputs, weight, bias), labels)
    gradients = torch.autograd.grad(loss, (weight, bias))
    public = (t.detach().double() for t in (weight, bias, *gradients))
    usual, norm = bias.detach().double().softmax(dim=0), float(inputs.square().sum(dim=1).mean().sqrt())
    return HeadGradient(*public, len(labels), non_negative=True, usual=usual, usual_norm=norm)


def draw(n: int, n_classes: int, seed: int) -> Tensor:
    return torch.randint(n_classes, (n,), generator=torch.Generator().manual_seed(100 + seed))


def count(labels: Tensor, n_classes: int) -> list[int]:
    counts: list[int] = torch.bincount(labels, minlength=n_classes).tolist()
    return counts


@pytest.mark.parametrize("n", [2, 5, 20])
def test_bounds_hold_for_every_batch(n: int) -> None:
    for seed in range(30):
        labels = draw(n, 6, seed)
        head = head_of_batch(labels, 6, seed, scale=0.5 * (1 + seed % 8))
        lower = lower_bounds(head)
        assert (lower <= torch.tensor(count(labels, 6))).all()
        assert (lower_bounds(replace(head, non_negative=False)) <= lower).all()
        assert int(first_guess(head, lower).sum()) == n
        assert (first_guess(head, lower) >= lower).all()


def test_bounds_hold_under_noise_which_is_measured() -> None:
    labels = draw(5, 6, 0)
    head = head_of_batch(labels, 6, 0, size=400)
    for sigma in (1e-3, 1e-2, 1e-1):
        generator = torch.Generator().manual_seed(1)
        noisy = replace(
            head,
            weight_gradient=head.weight_gradient + sigma * torch.randn(6, 400, generator=generator),
            bias_gradient=head.bias_gradient + sigma * torch.randn(6, generator=generator),
        )
        assert not noisy.clean
        assert noisy.weight_noise == pytest.approx(sigma, rel=0.1)
        assert noisy.bias_noise >= noisy.weight_noise
        assert (lower_bounds(noisy) <= torch.tensor(count(labels, 6))).all()
    assert head.clean


def test_bounds_beyond_the_batch_are_dropped() -> None:
    head = head_of_batch(torch.tensor([0, 1, 2, 3]), 6, 1, size=64)
    assert int(lower_bounds(head).sum()) == 4
    assert lower_bounds(replace(head, n_examples=2)).tolist() == [0] * 6


def test_distinct_labels_follow_from_bounds() -> None:
    labels = torch.tensor([0, 2, 3, 5])
    found = count_labels(head_of_batch(labels, 6, 1, size=64), trials=0, seed=0)
    assert found.support == "bounds"
    assert found.counts.tolist() == count(labels, 6)


@pytest.mark.parametrize("non_negative", [True, False])
@pytest.mark.parametrize("labels", [[0, 0, 2, 5], [1, 1, 1, 4], [3, 3, 3, 3], [0, 1, 2, 3]])
def test_repeated_labels_explain_the_gradient(labels: list[int], non_negative: bool) -> None:
    head = replace(head_of_batch(torch.tensor(labels), 6, 4, size=32, scale=3.0), non_negative=non_negative)
    found = count_labels(head, trials=120, seed=0)
    assert found.counts.tolist() == count(torch.tensor(labels), 6)
    assert found.support in ("bounds", "explained")
    if found.support == "explained":
        assert found.residual is not None
        assert found.residual < 1e-5


def test_wrong_counts_do_not_explain_the_gradient() -> None:
    equations = HeadEquations(head_of_batch(torch.tensor([0, 0, 2, 5]), 6, 4, size=32, scale=3.0))
    right = equations.solve(torch.tensor([2, 0, 1, 0, 0, 1]))
    assert right.explained
    assert right.residual < 1e-5
    for wrong in ([1, 0, 2, 0, 0, 1], [1, 1, 1, 0, 0, 1], [0, 0, 3, 0, 0, 1]):
        fit = equations.solve(torch.tensor(wrong))
        assert not fit.explained
        assert fit.residual > 1e-3
        assert fit.score > right.score


def test_explained_inputs_have_the_true_probabilities() -> None:
    labels = torch.tensor([0, 0, 2, 5])
    head = head_of_batch(labels, 6, 4, size=32, scale=3.0)
    fit = HeadEquations(head).solve(torch.tensor([2, 0, 1, 0, 0, 1]))
    expected = 4 * head.bias_gradient + torch.tensor(count(labels, 6))
    torch.testing.assert_close(fit.expected, expected, rtol=1e-5, atol=1e-6)


def test_gauss_newton_system_equals_autograd() -> None:
    head = head_of_batch(torch.tensor([0, 0, 2, 5]), 6, 3, size=32)
    equations = HeadEquations(head)
    generator = torch.Generator().manual_seed(0)
    inputs = head.input_norm * torch.randn(4, equations.weight.shape[1], generator=generator).double()
    targets = torch.eye(6).double()[[0, 0, 2, 5]]
    precision, noise = 3 * torch.eye(4).double() + 0.5, torch.tensor([0.02, 0.3]).double()
    root = torch.linalg.cholesky(precision).T

    def residuals(h: Tensor) -> Tensor:
        errors = torch.softmax(h @ equations.weight.T + head.bias, dim=1) - targets
        parts = (
            (errors.mean(dim=0) - head.bias_gradient) / noise[0],
            (errors.T @ h / 4 - equations.gradient) / noise[1],
            root @ h,
            equations.penalty**0.5 * (h @ equations.basis.T).clamp(max=0),
        )
        return torch.cat([part.flatten() for part in parts])

    at = equations._at(inputs, targets, precision, noise)
    matrix, slope = equations._system(at, precision, noise)
    jacobian = torch.func.jacrev(residuals)(inputs).flatten(1)
    assert at.objective == pytest.approx(residuals(inputs).square().sum().item(), rel=1e-10)
    torch.testing.assert_close(matrix, jacobian.T @ jacobian, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slope.flatten(), jacobian.T @ residuals(inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("non_negative", [True, False])
def test_projections_prefer_the_true_counts_where_these_are_determined(non_negative: bool) -> None:
    head = head_of_batch(torch.tensor([0, 0, 2, 5]), 6, 4, size=64)
    solver = HeadProjections(replace(head, non_negative=non_negative))
    best = solver.solve(torch.tensor([2, 0, 1, 0, 0, 1]))
    assert not best.explained
    assert best.residual < 0.1
    surplus = best.expected - torch.tensor([2, 0, 1, 0, 0, 1]) - 4 * head.bias_gradient
    assert surplus.abs().max() < 0.1
    for wrong in ([1, 0, 2, 0, 0, 1], [1, 1, 1, 0, 0, 1], [3, 0, 0, 0, 0, 1], [2, 0, 1, 0, 1, 0]):
        assert solver.solve(torch.tensor(wrong)).score > 2 * best.score


def test_many_examples_get_a_better_estimate_than_the_first_guess() -> None:
    found, guessed = 0, 0
    for seed in range(2):
        labels = draw(8, 4, seed)
        head = head_of_batch(labels, 4, seed, size=100, scale=3.0)
        true = torch.bincount(labels, minlength=4)
        counts = count_labels(head, trials=15, seed=0)
        assert counts.support in ("bounds", "estimated")
        assert int(counts.counts.sum()) == 8
        found += int(torch.minimum(counts.counts, true).sum())
        guessed += int(torch.minimum(first_guess(head, torch.zeros_like(true)), true).sum())
    assert found > guessed


def test_counts_before_training_come_out_whole() -> None:
    labels = draw(12, 4, 0)
    head = head_of_batch(labels, 4, 0, scale=0.01)
    found = count_labels(head, trials=50, seed=0)
    assert (found.support, found.trials, found.counts.tolist()) == ("whole", 0, count(labels, 4))
    uniform = head_of_batch(labels, 4, 0, scale=0.01, spread=0.0)
    assert count_labels(replace(uniform, usual=head.usual), trials=50, seed=0).support == "whole"
    assert whole_counts(replace(head, usual=uniform.usual), lower_bounds(head)) is None
    assert whole_counts(head, torch.full((4,), 12)) is None
    assert whole_counts(replace(head, largest_weight=4 / 3), lower_bounds(head)) is None


@pytest.mark.parametrize("factor", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("counts", [[3, 3, 3, 3], [6, 3, 3, 0], [4, 3, 3, 2]])
def test_a_gradient_scaled_down_does_not_look_balanced(factor: float, counts: list[int]) -> None:
    labels = torch.arange(4).repeat_interleave(torch.tensor(counts))
    head = head_of_batch(labels, 4, 0, scale=0.01, spread=0.0)
    smaller = replace(head, weight_gradient=factor * head.weight_gradient, bias_gradient=factor * head.bias_gradient)
    found = whole_counts(smaller, lower_bounds(smaller))
    assert (found is not None) == (factor == 1.0 or counts == [3, 3, 3, 3])
    assert found is None or found.tolist() == counts


def test_many_examples_of_very_many_classes_are_not_searched() -> None:
    labels = draw(32, 100, 1)
    head = replace(head_of_batch(labels, 100, 1, size=256, scale=3.0), non_negative=False)
    found = count_labels(head, trials=50, seed=0)
    assert (found.support, found.trials, int(found.counts.sum())) == ("estimated", 0, 32)


@pytest.mark.parametrize("n", [4, 8])
def test_rounding_through_long_inputs_is_no_misfit(n: int) -> None:
    """A client's probabilities are rounded, which thousands of inputs carry into the gradient of the weights.

    Without room for that the right counts explained none of these ten gradients, and the search went on to its end.
    """
    trials = 0
    for seed in range(10):
        labels = draw(n, 10, seed)
        head = replace(head_of_batch(labels, 10, seed, size=4096, scale=1.0), non_negative=False)
        found = count_labels(head, 30, 0)
        assert found.support != "estimated"
        assert found.counts.tolist() == count(labels, 10)
        trials += found.trials
    assert trials < 100  # measured 1 and 37
