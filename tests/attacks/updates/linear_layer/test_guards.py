"""Guards, and values at the edge of their range."""

from __future__ import annotations

import torch

from lit_recon.attacks.updates import AnalyticInversion
from lit_recon.attacks.updates.linear_layer.first_layer import first_layer
from lit_recon.attacks.updates.linear_layer.sparse_derivatives import _inputs
from lit_recon.models import MLP
from tests.attacks.updates.linear_layer.test_analytic import draw, observe, regression


def test_labels_are_assigned_despite_clipping_noise_and_images_without_a_part() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([3, 0, 5, 1, 4])
    images = draw(5)
    layer = first_layer(observe(MLP((3, 8, 8), [32]), images, labels.tolist()))
    true = 0.3 * layer.derivatives(images, labels) / 5
    observed = true + 0.02 * true.norm(dim=1, keepdim=True) * torch.randn(true.shape, dtype=torch.float64) / 32**0.5
    observed[2:] = 0.0
    found, errors = layer.assign_labels(images, labels.sort().values, observed)
    assert found[:2].tolist() == [3, 0]
    # the factor is the median of two: both errors are those of a factor within 2 % of the true one
    expected = ((true - observed).norm(dim=1) / observed.norm(dim=1))[:2]
    assert expected.min() > 0.01
    torch.testing.assert_close(errors[:2], expected, rtol=0.5, atol=0.0)
    assert errors[2:].tolist() == [1e6] * 3


def test_every_image_kept_is_free_of_all_other_derivatives() -> None:
    generator = torch.Generator().manual_seed(0)
    seen = regression(4, [0, 1, 2, 3])
    images = draw(4, (1, 8, 8)).double()
    derivatives = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    inputs = torch.cat([images.flatten(1), torch.ones(4, 1, dtype=torch.float64)], dim=1)
    rows = derivatives.T @ inputs
    guess = (images + 0.05 * torch.randn(images.shape, generator=generator, dtype=torch.float64)).clamp(0, 1)
    kept = _inputs(derivatives[:3], torch.zeros(0, 1, 8, 8), guess, rows, seen)[:3]
    unmixing = torch.linalg.lstsq(rows.T, torch.cat([kept, torch.ones(3, 1, dtype=torch.float64)], dim=1).T).solution
    mixed = derivatives[:3] @ unmixing
    torch.testing.assert_close(mixed, mixed.diagonal().diag(), rtol=0.0, atol=1e-8)


def test_an_attack_without_features_promises_none() -> None:
    torch.manual_seed(0)
    attack = AnalyticInversion()
    found = attack(observe(MLP((3, 8, 8), [16, 8]), draw(1), [3]))
    assert found.features is None
    assert not attack.recovers_features
