"""Which rows and entries of a layer's gradient patches are matched to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import PatchMatching
from lit_recon.attacks.updates.feature_maps import layer_gradient, patches
from lit_recon.attacks.updates.feature_maps.convolutions import find_convolutions
from lit_recon.attacks.updates.feature_maps.layer_gradient import few_patches, observed_rows
from lit_recon.records import Observation
from tests.attacks.updates.feature_maps.patch_victims import victim

NAME = "trunk.layers.3"


@pytest.fixture
def seen(photographs: Tensor) -> Observation:
    return victim(photographs[:1, :, ::4, ::4].contiguous(), None, known=False)


def hidden(seen: Observation, kept: list[int]) -> Observation:
    """The update of which row `i` of the layer's gradient shows the `kept[i]` largest entries, other rows none."""
    gradient = seen.update[f"{NAME}.weight"].flatten(1)
    shown = torch.zeros_like(gradient)
    for i, n in enumerate(kept):
        places = gradient[i].abs().argsort(descending=True)[:n]
        shown[i, places] = gradient[i, places]
    return replace(seen, update={**seen.update, f"{NAME}.weight": shown.view_as(seen.update[f"{NAME}.weight"])})


def test_rows_with_more_entries_than_patches_count(seen: Observation) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    assert layer.places == 16
    rows = observed_rows(hidden(seen, [100, 20, 60, 21, 40]), layer, 1)
    assert rows is not None
    # 20 entries are less than 1.3 times 16; rows with most entries come first
    assert rows.observed is not None
    assert rows.observed.sum(1).tolist() == [100, 60, 40, 21]
    # three rows are too few
    assert observed_rows(hidden(seen, [100, 20, 60, 40]), layer, 1) is None


def test_a_few_zeros_are_those_of_noise(seen: Observation) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    gradient = seen.update[f"{NAME}.weight"].clone()
    n = gradient.numel()
    for zeros, counted in ((int(1e-4 * n), True), (int(4e-4 * n), False)):
        assert zeros > 0
        some = gradient.clone()
        some.view(-1)[torch.arange(1, zeros + 1) * (n // (zeros + 1))] = 0.0
        rows = observed_rows(replace(seen, update={**seen.update, f"{NAME}.weight": some}), layer, 1)
        assert rows is not None
        assert (rows.observed is None) is counted


def test_layers_with_too_many_patches_are_left_out(seen: Observation, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    assert few_patches(layer, 10)
    monkeypatch.setattr(layer_gradient, "_MOST_PATCHES", 100)
    assert not few_patches(layer, 10)


def test_images_that_leave_too_much_are_not_certified(photographs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_DETERMINED", 1e9)  # another contrast would tell too
    images = photographs[:1, :, ::4, ::4].contiguous()
    penalty = PatchMatching().prepare(victim(images, None))
    towards = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for size, certified in ((1e-5, True), (1e-3, False)):
        near = images + size * towards
        left = float(penalty.residual(near).detach()) / penalty.size  # 5e-10 and 5e-6 measured
        assert (left < 1e-7) if certified else (left > 2e-6)
        [sure], _, _ = penalty.certificate(near, torch.zeros(1, dtype=torch.int64))
        assert bool(sure) is certified
