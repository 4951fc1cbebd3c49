"""Fits through noise and from pruned gradients, against the Cramer-Rao bound and the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import GELU, RELU, TANH, Activation
from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.layer import LayerGradient, gradient_noise
from lit_recon.attacks.updates.features.moments import MomentRecovery
from lit_recon.bounds.cramer_rao import unit_norm_cramer_rao
from lit_recon.bounds.fisher import NoisyRelease, fisher_information
from lit_recon.bounds.two_layer import TwoLayerJacobian, TwoLayerNet

Build = Callable[..., tuple[LayerGradient, Tensor, Tensor]]


def noisy(seen: LayerGradient, std: float, seed: int = 0) -> LayerGradient:
    generator = torch.Generator().manual_seed(seed)
    changed = {
        name: value + std * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name in ("weight_gradient", "bias_gradient", "head_gradient")
        for value in [getattr(seen, name)]
    }
    return replace(seen, **changed)


def pruned(seen: LayerGradient, fraction: float) -> LayerGradient:
    """One threshold for all entries, as a client that prunes the whole gradient has."""
    names = ("weight_gradient", "bias_gradient", "head_gradient")
    entries = torch.cat([getattr(seen, name).abs().flatten() for name in names])
    threshold = entries.kthvalue(round(fraction * len(entries))).values
    changed = {name: getattr(seen, name) * (getattr(seen, name).abs() > threshold) for name in names}
    return replace(seen, **changed)


def squared_error(truth: Tensor, found: Tensor) -> float:
    """Summed over the examples, each held against the feature nearest to it."""
    return float((truth - found[(truth @ found.T).argmax(dim=1)]).square().sum())


@pytest.mark.parametrize("activation", [RELU, GELU, TANH], ids=lambda a: a.name)
@pytest.mark.parametrize("std", [0.0, 1e-4, 1e-2])
def test_the_noise_is_read_off_the_ranks(build: Build, activation: Activation, std: float) -> None:
    seen, _, _ = build(activation, n=3)
    found = gradient_noise(noisy(seen, std) if std else seen)
    if not std:
        assert found is None
    else:
        assert found is not None
        assert (found.layer, found.head) == pytest.approx((std, std), rel=0.03)  # measured within 1 %


@pytest.mark.parametrize("std", [1e-3, 1e-2])
@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_noise_that_drowns_the_layer_costs_what_it_has_to(build: Build, activation: Activation, std: float) -> None:
    """Noise as large as the layer's gradient, or ten times larger, hides its span; the head still has the features."""
    errors, bounds = [], []
    for seed in range(4):
        seen, truth, labels = build(activation, n=2, d=24, m=2048, seed=seed, dtype=torch.float64)
        assert std > float(seen.weight_gradient.square().mean().sqrt())
        found = ExactRecovery().recover(noisy(seen, std, seed))
        assert not found.exact
        assert found.signed
        assert "times the noise" in found.notes[0]
        errors.append(squared_error(truth, found.features))
        net = TwoLayerNet(seen.weight, seen.bias, seen.head_weight, activation, "cross_entropy")
        information = fisher_information(TwoLayerJacobian(net, truth, labels), NoisyRelease(std))
        bounds.append(unit_norm_cramer_rao(information, truth).squared)
    ratio = sum(errors) / sum(bounds)
    # a maximum-likelihood fit meets the bound; 184 independent coordinates leave a spread of 0.1; measured 1.02 to 1.06
    assert 0.7 < ratio < 1.4


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_rounds_find_what_moments_only_begin_with(build: Build, activation: Activation) -> None:
    seen, truth, _ = build(activation, n=4, d=48, m=2048)
    drowned = noisy(seen, 3e-3)
    moments = MomentRecovery(control_variates=True).recover(drowned)
    found = ExactRecovery().recover(drowned)
    outside = [float((truth - truth @ span @ span.T).norm(dim=1).mean()) for span in (moments.span, found.span)]
    assert outside[1] < 0.1 * outside[0]  # measured 0.004


@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_pruning_the_whole_gradient_leaves_the_head_and_with_it_everything(build: Build, fraction: float) -> None:
    seen, truth, labels = build(GELU, n=4, d=48, m=2048)
    found = ExactRecovery().recover(pruned(seen, fraction))
    assert found.exact
    assert float(1 - (truth @ found.features.T).amax(dim=1).min()) < 1e-8  # measured 1e-13
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


def test_an_odd_activation_leaves_the_sign_open(build: Build) -> None:
    seen, _, _ = build(TANH, n=2, d=24, m=2048)
    found = ExactRecovery().recover(noisy(seen, 1e-3))
    assert not found.signed


def test_noise_without_a_head_is_left_to_the_span(build: Build) -> None:
    seen, truth, _ = build(GELU, n=2, d=24, m=2048)
    size = 0.01 * float(seen.weight_gradient.square().mean().sqrt())
    silent = replace(noisy(seen, size), head_gradient=torch.zeros_like(seen.head_gradient))
    found = ExactRecovery().recover(silent)
    outside = float((truth - truth @ found.span @ found.span.T).norm(dim=1).mean())
    assert outside < 2 * 0.01 * (2 / 2048) ** 0.5  # measured 0.8 of the law that the span follows
    assert "the layer's span" in found.method


@pytest.mark.slow
@pytest.mark.parametrize(("dropped", "released"), [(0.5, "head"), (0.9, "head"), (0.0, "both")])
def test_a_head_of_one_output_costs_what_it_has_to(dropped: float, released: str) -> None:
    """Its columns have one entry, so that a dropped one leaves a column of zeros; and its rank leaves nothing over."""
    errors, bounds = [], []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        d, m, n, std = 16, 2048, 2, 0.03
        weight = torch.randn(m, d, generator=generator, dtype=torch.float64)
        head = torch.randn(1, m, generator=generator, dtype=torch.float64) / m
        truth = torch.nn.functional.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1)
        net = TwoLayerNet(weight, torch.zeros(m, dtype=torch.float64), head, GELU)
        jacobian = TwoLayerJacobian(net, truth, torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
        kept = {
            name: value.new_tensor(released in (name, "both"))
            * (torch.rand(value.shape, generator=generator) >= dropped)
            for name, value in jacobian.update.items()
        }
        release = NoisyRelease(std, kept)
        update = release.drawn(jacobian.update, generator)
        seen = LayerGradient(
            weight=weight,
            bias=net.bias,
            head_weight=head,
            head_bias=torch.zeros(1, dtype=torch.float64),
            weight_gradient=update["layer"],
            bias_gradient=torch.zeros_like(net.bias),
            head_gradient=update["head"],
            activation=GELU,
            gaussian=torch.ones(m, dtype=torch.bool),
            n_examples=n,
        )
        errors.append(squared_error(truth, ExactRecovery().recover(seen).features))
        bounds.append(unit_norm_cramer_rao(fisher_information(jacobian, release), truth).squared)
    ratio = sum(errors) / sum(bounds)
    assert 0.6 < ratio < 1.5  # 120 independent coordinates leave a spread of 0.13
