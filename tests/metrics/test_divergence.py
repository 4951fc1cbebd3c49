"""A classifier's opinion of reconstructions, against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from torch import nn

from lit_recon.errors import ShapeError
from lit_recon.metrics.features import prediction_divergence


def test_it_is_the_relative_entropy_of_predictions() -> None:
    generator = torch.Generator().manual_seed(0)
    images, targets = torch.rand(2, 5, 1, 2, 2, generator=generator)
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    with torch.no_grad():
        p, q = (softmax(classifier(one).double().numpy(), axis=1) for one in (targets, images))
    expected = rel_entr(p, q).sum(axis=1)
    np.testing.assert_allclose(prediction_divergence(images, targets, classifier).numpy(), expected, rtol=1e-9)
    assert expected.min() > 0


def test_images_pass_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images, targets = torch.rand(2, 5, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    whole = prediction_divergence(images, targets, nn.Flatten())
    monkeypatch.setattr("lit_recon.metrics.features._CHUNK", 2)
    torch.testing.assert_close(prediction_divergence(images, targets, nn.Flatten()), whole)


def test_what_is_no_classifier_is_refused() -> None:
    images = torch.rand(2, 1, 2, 2)
    with pytest.raises(ShapeError, match=r"finite logits \(n, k\); got \(2, 1, 2, 2\)"):
        prediction_divergence(images, images, nn.Identity())
