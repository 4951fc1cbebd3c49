"""The bound beside the attacks on defended updates."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.defended import bounds
from lit_recon.experiments.update_attack.bound import PIXEL_VARIANCE
from lit_recon.models import Backbone
from lit_recon.records import Normalization
from tests.attacks.updates.feature_maps.test_matching import Shallow


def gradient(model: Backbone, image: Tensor, label: Tensor, bound: float) -> Tensor:
    """Of norm `bound` at most."""
    loss = torch.nn.functional.cross_entropy(model(image), label)
    parts = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    whole = torch.cat([part.flatten() for part in parts])
    return whole * (bound / whole.norm()).clamp(max=1.0)


def test_bounds_are_those_of_a_dense_jacobian() -> None:
    torch.manual_seed(0)
    model = Backbone(Shallow(4, 16), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    image, label = torch.rand(1, 3, 4, 4), torch.tensor([2])
    assert gradient(model, image, label, 1e9).norm() > 1  # so that DP-SGD clips it
    found = bounds(model, image, label)
    grams = {}
    for clip in (1.0, 1e9):
        released = partial(gradient, model, label=label, bound=clip)
        jacobian = torch.autograd.functional.jacobian(released, image).flatten(1).double()
        grams[clip] = jacobian.T @ jacobian
    for name, free, with_prior in zip(found["defenses"], found["cramer_rao"], found["van_trees"], strict=True):
        information = grams[1.0 if name.startswith("DP-SGD") else 1e9] / float(name.split()[-1]) ** 2
        # three digits are recorded, and products are in single precision
        assert free == pytest.approx(float(torch.linalg.inv(information).trace() / 48) ** 0.5, rel=0.02)
        known = information + torch.eye(48).double() / PIXEL_VARIANCE
        assert with_prior == pytest.approx(float(torch.linalg.inv(known).trace() / 48) ** 0.5, rel=0.02)
