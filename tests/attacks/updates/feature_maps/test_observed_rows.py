"""Which rows and entries of a layer's gradient patches are matched to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from lit_recon.attacks.updates import PatchMatching
from lit_recon.attacks.updates.feature_maps import input_map, patches
from lit_recon.attacks.updates.feature_maps import observed_rows as module
from lit_recon.attacks.updates.feature_maps.convolutions import find_convolutions
from lit_recon.attacks.updates.feature_maps.observed_rows import (
    ObservedRows,
    completed_rows,
    enough_layers,
    few_patches,
    observed_rows,
)
from lit_recon.clients import Client
from lit_recon.defenses import (
    Chain,
    Defense,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    PercentilePrivacy,
)
from lit_recon.models import Backbone
from lit_recon.models.classifiers.networks import Trunk
from lit_recon.records import Knowledge, Normalization, Observation
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
    monkeypatch.setattr(module, "_MOST_PATCHES", 100)
    assert not few_patches(layer, 10)


def test_images_that_leave_too_much_are_not_certified(photographs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_map, "_DETERMINED", 1e9)  # another contrast would tell too
    images = photographs[:1, :, ::4, ::4].contiguous()
    penalty = PatchMatching().prepare(victim(images, None))
    towards = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for size, certified in ((1e-5, True), (1e-3, False)):
        near = images + size * towards
        left = penalty.judged.left(near)  # 5e-10 and 5e-6 measured
        assert (left < 1e-7) if certified else (left > 2e-6)
        [sure], _, _ = penalty.certificate(near, torch.zeros(1, dtype=torch.int64))
        assert bool(sure) is certified


def random_patches(width: int) -> Tensor:
    return torch.randn(16, width, generator=torch.Generator().manual_seed(1))


def test_orthonormal_rows_are_orthonormal_and_of_the_same_span(seen: Observation) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    rows = observed_rows(seen, layer, 1)
    assert rows is not None
    condensed = rows.condensed(True)
    values = condensed.values.double()
    # the shortest are 0.015 of the longest: (1e-4 / 0.015)^2 is missing
    torch.testing.assert_close(values @ values.T, torch.eye(16, dtype=torch.float64), rtol=0, atol=2e-4)
    # rows of one span leave nothing of each other
    assert float(condensed.residual(values.float())) < 1e-9
    assert float(rows.residual(values.float())) < 1e-9 * float(rows.values.square().sum())
    # an independent figure: the squares of the sines of the angles between the spans
    patches = random_patches(values.shape[1])
    cosines = torch.linalg.svdvals(values @ torch.linalg.qr(patches.double().T)[0])
    assert float(condensed.residual(patches)) == pytest.approx(16 - float(cosines.square().sum()), rel=1e-4)


def test_condensed_rows_are_left_as_much_by_any_patches(seen: Observation) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    rows = observed_rows(seen, layer, 1)
    assert rows is not None
    condensed = rows.condensed(False)
    assert len(condensed.values) == rows.patches < 64 == len(rows.values)
    patches = random_patches(rows.values.shape[1])
    assert float(condensed.residual(patches)) == pytest.approx(float(rows.residual(patches)), rel=1e-4)


def test_a_small_change_of_large_sums_is_seen(seen: Observation) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    rows = observed_rows(seen, layer, 1)
    assert rows is not None
    # searches behind noise compare sums of which nearly all is noise
    noisy = replace(rows, values=1000 * torch.randn(rows.values.shape, generator=torch.Generator().manual_seed(2)))
    patches = random_patches(rows.values.shape[1])
    basis = torch.linalg.qr(patches.double().T)[0]
    values = noisy.values.double()
    expected = float((values - values @ basis @ basis.T).square().sum())
    assert float(noisy.residual(patches)) == pytest.approx(expected, rel=2e-9)  # 6e-8 is the step in single precision


def test_directions_of_the_size_of_rounding_count_less(seen: Observation) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    rows = observed_rows(seen, layer, 1)
    assert rows is not None
    left, values, right = torch.linalg.svd(rows.values.double(), full_matrices=False)
    values[15] = 1e-6 * values[0]
    values[16:] = 0
    shorter = replace(rows, values=(left * values @ right).float()).condensed(True)
    lengths = shorter.values.norm(dim=1).sort()[0]
    assert float(lengths[0]) < 0.02  # 1e-6 of the longest, where 1e-4 counts half
    assert float(lengths[1]) > 0.99


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("defense", [GradientPruning(0.4), GradientDropout(0.5)], ids=["pruned", "dropped"])
def test_completed_rows_span_the_hidden_gradient(photographs: Tensor, defense: Defense, mode: str) -> None:
    images = photographs[:1, :, ::4, ::4].contiguous()
    hidden, whole = (victim(images, one, mode=mode) for one in (defense, None))
    layer = next(one for one in find_convolutions(hidden) if one.name == NAME)
    rows = observed_rows(hidden, layer, 1)
    assert rows is not None
    completed = completed_rows(rows, hidden)
    assert completed is not None
    assert completed.columns is not None
    gradient = whole.update[f"{NAME}.weight"].flatten(1).double()[:, completed.columns]
    basis = completed.values.double()
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64), rtol=0, atol=1e-5)
    outside = gradient - gradient @ basis.T @ basis
    assert float(outside.norm() / gradient.norm()) < 1e-4
    # on these columns true patches leave nothing, others do
    truth = layer.patches(PatchMatching([NAME]).prepare(whole).judged.passes(images)[0]).transpose(1, 2).flatten(0, 1)
    assert float(completed.residual(truth)) < 1e-6
    assert float(completed.residual(random_patches(truth.shape[1]))) > 1


def test_nothing_is_completed_where_nothing_is_hidden_or_it_would_take_long(
    seen: Observation, photographs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    rows = observed_rows(seen, layer, 1)
    assert rows is not None
    assert completed_rows(rows, seen) is None
    dropped = victim(photographs[:1, :, ::4, ::4].contiguous(), GradientDropout(0.5))
    rows = observed_rows(dropped, layer, 1)
    assert rows is not None
    monkeypatch.setattr(module, "_MOST_COMPLETED", 15)
    assert completed_rows(rows, dropped) is None


def test_searches_take_every_second_layer_of_a_size_and_no_shortcuts(seen: Observation) -> None:
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    rows = observed_rows(seen, layer, 1)
    assert rows is not None
    narrow = replace(rows, layer=replace(layer, name="shortcut", kernel=(1, 1)))
    coarse = replace(rows, layer=replace(layer, name="coarse", places=4))
    named = [replace(rows, layer=replace(layer, name=name)) for name in ("first", "second", "third", "fourth")]
    chosen = enough_layers([narrow, named[0], coarse, *named[1:]])
    assert [one.layer.name for one in chosen] == ["first", "third", "coarse"]
    assert enough_layers([narrow]) == [narrow]


class Deep(Trunk):
    """A convolution at 64 places of an image of 8 x 8 pixels, and two at 16 places behind it."""

    def __init__(self) -> None:
        super().__init__((3, 8, 8), {})
        self.out_features = 64 * 16
        sizes = ((3, 24, 1), (24, 64, 1), (64, 64, 2), (64, 64, 1))
        layers = [(nn.Conv2d(a, b, 3, stride=stride, padding=1), nn.ReLU()) for a, b, stride in sizes]
        self.layers = nn.Sequential(*(one for pair in layers for one in pair))

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layers(images).flatten(1)
        return maps


def test_rows_with_hidden_entries_are_left_out_where_two_layers_are_completed(
    photographs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Backbone(Deep(), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    client = Client(model, "eval", GradientDropout(0.3))
    image = photographs[:1, :, ::4, ::4].contiguous()
    seen = client.observe(image, torch.tensor([1]), Knowledge(defense=True), torch.Generator().manual_seed(0))

    def searched() -> list[tuple[str, bool]]:
        return [(one.layer.name, one.observed is None) for one in PatchMatching().prepare(seen).searched.rows]

    completed = [("trunk.layers.4", True), ("trunk.layers.6", True)]
    assert searched() == completed[:1]  # which tells enough by itself
    monkeypatch.setattr(patches, "AMPLE", 100.0)
    assert searched() == completed
    monkeypatch.setattr(patches, "_ENOUGH_LAYERS", 3)
    assert searched() == [("trunk.layers.2", False), *completed]


def bounded_rows(seen: Observation, kept: int, seed: int = 0) -> tuple[ObservedRows, Tensor]:
    """Rows of random values, of which some have barely more entries than patches, and random patches; float64."""
    generator = torch.Generator().manual_seed(seed)
    layer = next(one for one in find_convolutions(seen) if one.name == NAME)
    values = torch.randn(6, 60, generator=generator, dtype=torch.float64)
    least = values.abs().sort(dim=1).values[:, -kept : -kept + 1]
    observed = values.abs() >= least
    bound = torch.where(observed, math.inf, least)
    bound[0, :20] = math.inf  # as of entries that were cut off at a largest value
    rows = ObservedRows(layer, values.where(observed, torch.zeros(())), observed, 10, bound=bound)
    return rows, torch.randn(10, 60, generator=generator, dtype=torch.float64)


def left_by_the_best(rows: ObservedRows, patches: Tensor) -> float:
    """The residual with the coefficients that a library finds, row after row."""
    assert rows.observed is not None
    assert rows.bound is not None
    total = 0.0
    for values, observed, bound in zip(rows.values, rows.observed, rows.bound, strict=True):

        def loss(given: np.ndarray, values: Tensor = values, observed: Tensor = observed, bound: Tensor = bound) -> Any:
            coefficients = torch.tensor(given, requires_grad=True)
            fit = coefficients @ patches
            above = (fit.abs() - bound).clamp_min(0)
            squares = torch.where(observed, fit - values, above).square().sum()
            squares.backward()
            return float(squares.detach()), coefficients.grad.numpy()

        found = minimize(loss, np.zeros(len(patches)), jac=True, method="BFGS", options={"gtol": 1e-9})
        total += float(found.fun)
    return total


@pytest.mark.parametrize("kept", [11, 14, 40])
def test_residual_with_bounds_is_that_of_the_best_fit(seen: Observation, kept: int) -> None:
    for seed in range(3):
        rows, patches = bounded_rows(seen, kept, seed)
        expected = left_by_the_best(rows, patches)
        assert float(rows.residual(patches)) == pytest.approx(expected, rel=1e-7)
        unbounded = float(replace(rows, bound=None).residual(patches))
        assert unbounded < 0.99 * expected  # 0.987 measured at the most
        # in units of the mean length of rows
        size = float(rows.values.square().sum(1).mean())
        assert float(rows.condensed(True).residual(patches)) == pytest.approx(expected / size, rel=1e-7)
        assert float(rows.residual(patches.float())) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kept", [11, 40])
def test_residual_with_bounds_is_differentiable(seen: Observation, kept: int) -> None:
    rows, patches = bounded_rows(seen, kept)
    start = patches.clone().requires_grad_()
    (slope,) = torch.autograd.grad(rows.residual(start), start)
    step = torch.randn(patches.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ahead, behind = (left_by_the_best(rows, patches + sign * 1e-5 * step) for sign in (1, -1))
    assert float((slope * step).sum()) == pytest.approx((ahead - behind) / 2e-5, rel=1e-5)


@pytest.mark.parametrize(
    "defense",
    [
        GradientPruning(0.9),
        GradientPruning(0.9, "tensor"),
        Chain([GradientClipping(0.3), GradientPruning(0.9)]),
        Chain([GradientPruning(0.9), GradientClipping(0.3)]),
        PercentilePrivacy(90.0, gamma=0.3),
    ],
    ids=repr,
)
def test_known_pruning_bounds_hidden_entries_in_the_search_alone(photographs: Tensor, defense: Defense) -> None:
    images = photographs[:2, :, ::4, ::4].contiguous()
    seen = victim(images[:1], defense)
    penalty = PatchMatching().prepare(seen)
    [judged], [searched] = penalty.judged.rows, penalty.searched.rows
    assert isinstance(searched, ObservedRows)
    assert judged.bound is None
    assert judged.observed is not None
    assert searched.bound is not None
    # in units of the longest row: the smallest kept entry of the whole update or the tensor
    gradient = seen.update[f"{NAME}.weight"]
    of = torch.cat([value.flatten() for value in seen.update.values()]) if "tensor" not in repr(defense) else gradient
    least = float(of[of != 0].abs().min() / judged.values.abs().max() * searched.values.abs().max())
    hidden = gradient.flatten(1)[(gradient != 0).flatten(1).sum(1).argsort(descending=True)[: len(judged.values)]] == 0
    assert bool((searched.bound[searched.bound < math.inf] - least).abs().max() < 1e-5 * least)
    assert int((searched.bound < math.inf).sum()) == int(hidden.sum())
    # entries that were cut off are hidden, and not small
    assert (int(hidden.sum()) < int((~judged.observed).sum())) == isinstance(defense, PercentilePrivacy)
    assert penalty.searched.left(images[:1]) < 1e-9
    assert penalty.searched.left(images[1:]) > 1.1 * penalty.judged.left(images[1:])


@pytest.mark.parametrize(
    ("defense", "known"),
    [
        (GradientPruning(0.9), False),
        (GradientDropout(0.9), True),
        (Chain([GradientPruning(0.5), GradientDropout(0.8)]), True),
    ],
    ids=["unknown", "dropped", "dropped after pruning"],
)
def test_other_hidden_entries_have_no_bounds(photographs: Tensor, defense: Defense, known: bool) -> None:
    penalty = PatchMatching().prepare(victim(photographs[:1, :, ::4, ::4].contiguous(), defense, known))
    assert penalty.partial
    assert [one.bound for one in penalty.searched.rows if isinstance(one, ObservedRows)] == [None]
