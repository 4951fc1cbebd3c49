"""Guards, and values at the edge of their range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import RELU
from lit_recon.attacks.updates.features.exact import ExactRecovery, _in_span
from lit_recon.attacks.updates.features.fit_everywhere import noisy_span
from lit_recon.attacks.updates.features.layer import GradientNoise, LayerGradient, RecoveredFeatures, observed_entries
from lit_recon.attacks.updates.features.matching import FeaturePenalty, SquaredCosine
from lit_recon.attacks.updates.features.moments import weight_span
from lit_recon.attacks.updates.features.starts import null_vector_start
from lit_recon.clients import LocalSteps
from tests.attacks.updates.features.test_span_and_completion import sparse_mixture


@pytest.mark.parametrize(
    ("falls", "size"),
    [
        ([10.0] * 9 + [100.0] + [10.0] * 5, 12),  # a small step far down: noise, not a smaller rank
        ([10.0] * 9 + [1e5] + [10.0] * 5, 10),
        ([2.0] * 3 + [1e5] + [2.0] * 11, 12),  # a small feature, far above rounding
    ],
)
def test_an_earlier_gap_counts_only_if_rounding_follows(falls: list[float], size: int) -> None:
    values = torch.tensor([1.0, *falls], dtype=torch.float64).cumprod(0).reciprocal()
    assert weight_span(values.sqrt().diag(), 12).shape == (16, size)


def test_null_vectors_take_as_few_samples_as_they_must() -> None:
    found = 0
    for seed in range(20):
        projected, _ = sparse_mixture(400, 5, active=0.5, seed=seed)
        found += null_vector_start(projected, seed=seed, max_samples=150, chunk=150) is not None
    # 2^4 (1 + 1/2 + ... + 1/5) = 37 samples meet all five examples on average; measured 20, with one neuron more 15
    assert found >= 19


@pytest.mark.parametrize(("sine", "origin"), [(0.05, "the layer's span"), (0.5, "moments")])
def test_the_span_that_noise_turns_less_is_taken(
    build: Callable[..., tuple[LayerGradient, Tensor, Tensor]], sine: float, origin: str
) -> None:
    seen, _, _ = build(RELU)
    clean = seen.weight_gradient
    signal = clean.norm() / (seen.n_examples * clean.shape[1]) ** 0.5  # of one direction, spread over the columns
    noise = sine * float(signal)
    generator = torch.Generator().manual_seed(0)
    noisy = clean + noise * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
    span, name = noisy_span(replace(seen, weight_gradient=noisy), GradientNoise(noise, 0.0))
    assert name == origin
    assert span.shape == (48, 4)


def test_the_share_of_missing_entries_is_told(build: Callable[..., tuple[LayerGradient, Tensor, Tensor]]) -> None:
    seen, _, _ = build(RELU)
    kept = torch.rand(seen.weight_gradient.shape, generator=torch.Generator().manual_seed(0)) >= 0.2
    pruned = replace(seen, weight_gradient=seen.weight_gradient * kept)
    # neurons that no example activates are zero too
    share = float((pruned.weight_gradient == 0).double().mean())
    setting = _in_span(pruned, observed_entries(pruned))
    told = next(note for note in setting.notes if "treated as missing" in note)
    assert 0.2 <= float(told.partition("%")[0]) / 100 <= share + 0.005


def test_one_local_step_is_one_gradient(build: Callable[..., tuple[LayerGradient, Tensor, Tensor]]) -> None:
    seen, _, _ = build(RELU, n=2)
    found = ExactRecovery().run(seen, LocalSteps(torch.nn.Linear(2, 2), steps=1, lr=0.1))
    assert not [note for note in found.notes if "local steps" in note]
    torch.testing.assert_close(found.features, ExactRecovery().run(seen, None).features)


def test_only_several_weights_of_the_features_are_told_apart() -> None:
    penalty = FeaturePenalty(
        RecoveredFeatures(torch.zeros(1, 2), torch.zeros(2, 1), "a method"), lambda x: x, SquaredCosine(0.5)
    )
    images, labels = torch.zeros(1), torch.zeros(1)
    assert penalty.certificate(images, labels) == (None, False, ())
    certified, _, told = replace(penalty, weights=(1.0, 2.0)).certificate(images, labels)
    assert certified is None
    assert told == (f"of the feature weights 1, 2, {penalty.term.weight:g} matched the gradient best",)
