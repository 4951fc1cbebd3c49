"""Recovery from a wide layer's gradient, against features that the tests know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lit_recon.attacks.updates.features.activations import ELU, GELU, RELU, SIGMOID, SOFTPLUS, TANH, Activation
from lit_recon.attacks.updates.features.exact import ExactRecovery, Start
from lit_recon.attacks.updates.features.layer import LayerGradient
from lit_recon.errors import ConfigError, UnsupportedModelError

Build = Callable[..., tuple[LayerGradient, Tensor, Tensor]]


def worst_angle(truth: Tensor, found: Tensor) -> float:
    """Largest 1 - cos of matched features; 2 for one that is mirrored."""
    cosine = truth @ found.T
    rows, columns = linear_sum_assignment(-cosine.numpy())
    return 1 - float(cosine[rows, columns].min())


def span_error(truth: Tensor, basis: Tensor) -> float:
    return float((truth - truth @ basis @ basis.T).norm(dim=1).mean())


def defended(seen: LayerGradient, change: Callable[[Tensor], Tensor]) -> LayerGradient:
    return replace(
        seen,
        head_gradient=change(seen.head_gradient),
        weight_gradient=change(seen.weight_gradient),
        bias_gradient=change(seen.bias_gradient),
    )


def pruned(gradient: Tensor, fraction: float) -> Tensor:
    threshold = gradient.abs().flatten().kthvalue(max(1, round(fraction * gradient.numel()))).values
    return gradient * (gradient.abs() > threshold)


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("activation", [RELU, ELU, GELU, TANH, SIGMOID, SOFTPLUS], ids=lambda a: a.name)
def test_distinct_labels_are_recovered_up_to_rounding(build: Build, activation: Activation, n: int) -> None:
    seen, truth, labels = build(activation, n=n)
    found = ExactRecovery().recover(seen)
    assert found.exact
    assert found.certificate is not None
    assert found.certificate < 2e-6  # measured 1e-7 to 5e-7
    assert worst_angle(truth, found.features) < 1e-10  # measured 1e-15
    assert span_error(truth, found.span) < 1e-6  # measured 1e-8
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


@pytest.mark.parametrize("labels", ["random", "same"])
@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_shared_labels_and_uncentered_features(build: Build, activation: Activation, labels: str) -> None:
    seen, truth, _ = build(activation, n=6, d=64, m=2048, kind="positive", labels=labels)
    found = ExactRecovery().recover(seen)
    assert found.exact
    assert worst_angle(truth, found.features) < 1e-8  # measured 1e-15


@pytest.mark.parametrize("start", ["moments", "neurons", "null_vectors"])
def test_every_start_leads_there(build: Build, start: Start) -> None:
    seen, truth, _ = build(RELU, n=4)
    found = ExactRecovery(starts=(start,)).recover(seen)
    assert found.exact
    assert found.method == start
    assert worst_angle(truth, found.features) < 1e-10


def test_trained_neurons_take_part(build: Build) -> None:
    seen, truth, _ = build(GELU, trained=512, bias=0.2)
    assert worst_angle(truth, ExactRecovery().recover(seen).features) < 1e-10
    only_trained = replace(seen, gaussian=torch.zeros_like(seen.gaussian))
    assert worst_angle(truth, ExactRecovery(starts=("neurons",)).recover(only_trained).features) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_the_certificate_never_calls_a_failure_exact(build: Build, activation: Activation) -> None:
    for seed in range(3):
        # hard on purpose: few neurons, shared labels, features in a narrow cone, and too few iterations
        seen, truth, _ = build(activation, n=5, d=16, m=160, kind="positive", labels="random", seed=seed)
        for iterations in (1, 40):
            found = ExactRecovery(("moments",), iterations=iterations).recover(seen)
            assert not found.exact or worst_angle(truth, found.features) < 1e-6
        # head and layer of two different batches agree on no features at all
        other, _, _ = build(activation, n=5, d=16, m=160, kind="positive", labels="random", seed=seed + 100)
        found = ExactRecovery(("moments",), iterations=10).recover(replace(seen, head_gradient=other.head_gradient))
        assert not found.exact
        assert "no start reached" in found.notes[-1]


@pytest.mark.parametrize("released", ["both", "head"])
def test_signs_behind_an_odd_activation_without_bias_gradient(build: Build, released: str) -> None:
    seen, truth, labels = build(TANH)
    silent = replace(seen, bias_gradient=torch.zeros_like(seen.bias_gradient))
    if released == "head":
        silent = replace(silent, weight_gradient=torch.zeros_like(seen.weight_gradient))
    found = ExactRecovery().recover(silent)
    assert worst_angle(truth, found.features) < 1e-6
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
@pytest.mark.parametrize("factor", [1e-6, 30.0])
def test_clipping_changes_nothing(build: Build, activation: Activation, factor: float) -> None:
    seen, truth, _ = build(activation)
    found = ExactRecovery().recover(defended(seen, lambda gradient: factor * gradient))
    assert found.exact
    assert worst_angle(truth, found.features) < 1e-10


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_dropout_at_random_leaves_everything(build: Build, activation: Activation) -> None:
    seen, truth, _ = build(activation)
    generator = torch.Generator().manual_seed(3)
    found = ExactRecovery().recover(
        defended(seen, lambda gradient: gradient * (torch.rand(gradient.shape, generator=generator) > 0.5))
    )
    assert found.exact
    assert worst_angle(truth, found.features) < 1e-9  # measured 1e-15
    assert "missing" in found.notes[0]


def test_pruned_gradients_of_a_smooth_layer(build: Build) -> None:
    seen, truth, _ = build(GELU)
    found = ExactRecovery().recover(defended(seen, lambda gradient: pruned(gradient, 0.7)))
    assert found.exact
    assert worst_angle(truth, found.features) < 1e-9  # measured 1e-15


def test_pruned_gradients_behind_a_kink_lose_little(build: Build) -> None:
    seen, truth, _ = build(RELU)
    found = ExactRecovery().recover(defended(seen, lambda gradient: pruned(gradient, 0.5)))
    assert worst_angle(truth, found.features) < 1e-3
    assert span_error(truth, found.span) < 2e-2


def test_very_sparse_gradients_end_in_the_polish_of_all_coordinates(build: Build) -> None:
    seen, truth, _ = build(GELU, n=2)
    found = ExactRecovery().recover(defended(seen, lambda gradient: pruned(gradient, 0.97)))
    assert worst_angle(truth, found.features) < 1e-2


@pytest.mark.parametrize(("kept", "enough"), [(50, False), (160, True)])
def test_fewer_entries_than_unknowns_determine_no_features(build: Build, kept: int, enough: bool) -> None:
    seen, truth, _ = build(GELU, n=2, d=32, m=256, k=5)
    entries = seen.head_gradient.numel() + seen.weight_gradient.numel() + seen.bias_gradient.numel()
    every = torch.cat([of.flatten() for of in (seen.head_gradient, seen.weight_gradient, seen.bias_gradient)])
    least = every.abs().kthvalue(entries - kept).values
    found = ExactRecovery().recover(defended(seen, lambda gradient: gradient * (gradient.abs() > least)))
    assert found.certificate is not None
    assert found.certificate < 1e-5  # in both cases
    assert found.exact == enough
    assert (worst_angle(truth, found.features) < 1e-6) == enough
    told = f"{kept} entries of the gradients are observed, for 74 unknowns: at least 97 are needed"
    assert (told in found.notes) == (not enough)


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_noise_follows_its_law(build: Build, activation: Activation) -> None:
    n, m, noise = 4, 2048, 0.1
    seen, truth, _ = build(activation, n=n, m=m)
    generator = torch.Generator().manual_seed(4)

    def noisy(gradient: Tensor) -> Tensor:
        size = noise * gradient.square().mean().sqrt()
        return gradient + size * torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)

    found = ExactRecovery(("moments",)).recover(defended(seen, noisy))
    assert not found.exact
    # measured 0.0038 to 0.0050 and 2e-5
    assert span_error(truth, found.span) == pytest.approx(noise * (n / m) ** 0.5, rel=0.6)
    assert worst_angle(truth, found.features) < 2e-4


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_frozen_head(build: Build, activation: Activation) -> None:
    seen, truth, _ = build(activation, n=3)
    found = ExactRecovery().recover(replace(seen, head_gradient=torch.zeros_like(seen.head_gradient)))
    assert worst_angle(truth, found.features) < 1e-6
    assert "head released no gradient" in found.notes[0]


def head_alone(seen: LayerGradient) -> LayerGradient:
    return replace(
        seen,
        weight_gradient=torch.zeros_like(seen.weight_gradient),
        bias_gradient=torch.zeros_like(seen.bias_gradient),
    )


def test_frozen_layer(build: Build) -> None:
    seen, truth, _ = build(GELU, n=3, m=4096)
    found = ExactRecovery().recover(head_alone(seen))
    assert "head's alone" in found.notes[0]
    assert found.exact
    assert worst_angle(truth, found.features) < 1e-6


@pytest.mark.parametrize(("n", "m", "enough"), [(4, 90, False), (2, 512, True)])
def test_two_classes_tell_half_as_much_as_their_entries(build: Build, n: int, m: int, enough: bool) -> None:
    """Both rows of the head's gradient are the same but for their sign: 180 entries are 94 equations."""
    seen, truth, _ = build(GELU, n=n, d=24, m=m, k=2, kind="random", labels="random")
    found = ExactRecovery().recover(head_alone(seen))
    assert found.certificate is not None
    assert found.certificate < 1e-5  # in both cases
    assert found.exact == enough
    assert (worst_angle(truth, found.features) < 1e-6) == enough
    told = "94 entries of the gradients that do not follow from 86 others are observed, for 104 unknowns: at least 136 "
    assert any(note.startswith(told) for note in found.notes) == (not enough)


def test_examples_that_coincide_are_found_once(build: Build) -> None:
    seen, truth, _ = build(GELU, n=3)
    found = ExactRecovery().recover(replace(seen, n_examples=5))
    assert found.features.shape == truth.shape
    assert worst_angle(truth, found.features) < 1e-10
    assert "rank 3 for 5 examples" in found.notes[-1]


def test_same_seed_same_result(build: Build) -> None:
    seen, _, _ = build(GELU)
    first, second = ExactRecovery(seed=5).recover(seen), ExactRecovery(seed=5).recover(seen)
    # not to the bit: sums in a matrix product depend on where its operands lie in memory
    torch.testing.assert_close(first.features, second.features, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "settings", [{"starts": ()}, {"starts": ("tensor",)}, {"tolerance": 0.0}, {"iterations": 0}, {"null_samples": 0}]
)
def test_settings_out_of_range(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="ExactRecovery needs"):
        ExactRecovery(**settings)  # type: ignore[arg-type]


def test_no_start_that_works(build: Build) -> None:
    seen, _, _ = build(GELU)
    with pytest.raises(UnsupportedModelError, match="none of the starts"):
        ExactRecovery(starts=("null_vectors",)).recover(seen)
