"""The bounds beside the attacks on defended updates."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import defended
from benchmarks.certificates import Attacked, Cell, drawn
from benchmarks.defended import bounds, cells, masked_bounds, optimal_bounds
from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import AnalyticInversion
from lit_recon.clients.client import ClientSettings
from lit_recon.clients.gradient import GradientOperator
from lit_recon.data import ImageSet
from lit_recon.defenses import (
    Defense,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    OptimalGradientNoise,
    Round,
)
from lit_recon.defenses.optimal import sensitivities
from lit_recon.experiments.update_attack.bound import PIXEL_VARIANCE
from lit_recon.models import Backbone
from lit_recon.records import Batch, Normalization, Observation, Update, Weights
from tests.attacks.updates.feature_maps.networks import Shallow
from tests.attacks.updates.feature_maps.patch_victims import attack


def gradient(model: Backbone, image: Tensor, label: Tensor, bound: float) -> Tensor:
    """Of norm `bound` at most."""
    loss = torch.nn.functional.cross_entropy(model(image), label)
    parts = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    whole = torch.cat([part.flatten() for part in parts])
    return whole * (bound / whole.norm()).clamp(max=1.0)


@pytest.mark.slow
def test_bounds_are_those_of_a_dense_jacobian() -> None:
    torch.manual_seed(0)
    model = Backbone(Shallow(4, 16), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    with torch.no_grad():
        model.head.weight *= 10
    image, label = torch.rand(1, 3, 4, 4), torch.tensor([2])
    assert gradient(model, image, label, 1e9).norm() > 4  # so that it is clipped
    found = bounds(model, image, label)
    grams = {}
    assert found["defenses"][-2:] == ["clip 4, noise 0.001", "Laplace noise 0.001"]
    for clip in (1.0, 4.0, 1e9):
        released = partial(gradient, model, label=label, bound=clip)
        jacobian = torch.autograd.functional.jacobian(released, image).flatten(1).double()
        grams[clip] = jacobian.T @ jacobian
    for name, free, with_prior in zip(found["defenses"], found["cramer_rao"], found["van_trees"], strict=True):
        clip = {"DP-SGD": 1.0, "clip": 4.0}.get(name.split()[0], 1e9)
        information = grams[clip] / float(name.split()[-1]) ** 2  # of Laplace noise, too
        # three digits are recorded, and products are in single precision
        assert free == pytest.approx(float(torch.linalg.inv(information).trace() / 48) ** 0.5, rel=0.02)
        known = information + torch.eye(48).double() / PIXEL_VARIANCE
        assert with_prior == pytest.approx(float(torch.linalg.inv(known).trace() / 48) ** 0.5, rel=0.02)


@pytest.mark.slow
def test_bounds_behind_optimal_noise_are_those_of_a_dense_jacobian() -> None:
    torch.manual_seed(0)
    model = Backbone(Shallow(4, 16), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    image, label = torch.rand(1, 3, 4, 4), torch.tensor([2])
    found = optimal_bounds(model, image, label)
    jacobian = torch.autograd.functional.jacobian(partial(gradient, model, label=label, bound=1e9), image).flatten(1)
    weights, batch = Weights.of(model), Batch(image, label)
    operator = GradientOperator(model, "eval")
    round_ = Round(batch, partial(operator, weights))
    assert [name.split()[-1] for name in found["defenses"]] == ["0.001", "0.01", "0.1"]
    for name, free, with_prior in zip(found["defenses"], found["cramer_rao"], found["van_trees"], strict=True):
        defense, generator = OptimalGradientNoise(float(name.split()[-1])), ClientSettings().generator(0)
        update = operator(weights, batch)
        variances = defense.variances(update, sensitivities(round_.gradient, batch, 10, generator))
        own = torch.cat([value.flatten() for value in variances.values()]).double()
        rows = jacobian.double()[own > 0] / own[own > 0].sqrt()[:, None]
        information = rows.T @ rows
        assert free == pytest.approx(float(torch.linalg.inv(information).trace() / 48) ** 0.5, rel=0.02)
        known = information + torch.eye(48).double() / PIXEL_VARIANCE
        assert with_prior == pytest.approx(float(torch.linalg.inv(known).trace() / 48) ** 0.5, rel=0.02)


def test_unknown_directions_are_those_of_a_dense_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Backbone(Shallow(4, 16), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    image, label = torch.rand(1, 3, 4, 4), torch.tensor([2])
    masks: dict[str, Defense] = {
        "drop 0.5": GradientDropout(0.5),
        "drop 0.99": GradientDropout(0.99),
        "drop 0.997": GradientDropout(0.997),
        "prune 0.9": GradientPruning(0.9),
        "prune 0.998": GradientPruning(0.998),
    }
    kinds = {"none": {"none": Defense()}, "drop": masks, "prune": {}, "prune_tensor": {}}
    monkeypatch.setattr(defended, "DEFENSES", kinds | {"clip": {"clip 0.1": GradientClipping(0.1)}})
    found = masked_bounds(model, image, label)
    weights, batch = Weights.of(model), Batch(image, label)
    operator = GradientOperator(model, "eval")
    update, round_ = operator(weights, batch), Round(batch, partial(operator, weights))

    def flat(pixels: Tensor, double: Backbone) -> Tensor:
        def loss(parameters: Update) -> Tensor:
            return torch.nn.functional.cross_entropy(torch.func.functional_call(double, parameters, (pixels,)), label)

        return torch.cat([part.flatten() for part in torch.func.grad(loss)(dict(double.named_parameters())).values()])

    jacobian = torch.func.jacrev(partial(flat, double=model.double()))(image.double()).flatten(1).detach()
    for name, mask in masks.items():
        sent = mask.transform_update(update, round_, ClientSettings().generator(0))
        kept = torch.cat([value.flatten() for value in sent.values()]) != 0
        unknown = 48 - int(torch.linalg.matrix_rank(jacobian[kept]))
        number = found["defenses"].index(name)
        assert found["unknown"][number] == unknown
        assert found["with_prior"][number] == pytest.approx(0.25 * math.sqrt(unknown / 48), rel=0.01)
        assert (unknown > 0) <= found["every_entry"][number]
    assert found["unknown"][0] == found["unknown"][-1] == 0
    assert sum(map(bool, found["unknown"])) == 2


def test_the_first_single_images_behind_noise_are_those_of_the_bound() -> None:
    labels = torch.randint(10, (400,), generator=torch.Generator().manual_seed(0))
    bound = drawn(labels, Cell(defended.BOUND, 1, "eval", "distinct", 4))
    for kind, name in (
        ("noise", "noise 0.001"),
        ("dpsgd", "DP-SGD with C = 1, noise 0.001"),
        ("other_noise", "Laplace noise 0.001"),
        ("local", "3 local steps"),
    ):
        [single] = [cell for cell in cells(kind) if (cell.defense, cell.batch, cell.batch_norm) == (name, 1, "eval")]
        draws = [int(ids) for ids in defended.drawn_for(labels, single, kind)]
        assert len(set(draws)) == len(draws) == 8
        assert (draws[:4] == [int(ids) for ids in bound]) == (kind in defended.NOISY)


def test_updates_of_several_clients_are_those_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def by(_: Attack, observation: Observation, images: Tensor) -> Attacked:
        seen.append(observation)
        return Attacked([0.5] * len(images), [False] * len(images), [], "", 1.0, None)

    monkeypatch.setattr(Attacked, "by", staticmethod(by))
    torch.manual_seed(0)
    model = Backbone(Shallow(4, 16), 10, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    pixels, labels = torch.randint(0, 256, (200, 3, 4, 4), dtype=torch.uint8), torch.arange(200) % 10
    private = ImageSet(pixels, labels, list("0123456789"), "test")
    for cell in cells("several"):
        assert cell.batch == 4
        assert cell.batch_norm != defended.KNOWN
        if cell.batch_norm == "eval":
            draws = defended.drawn_for(private.labels, cell, "several")[:1]
            defended.measure(model, private, AnalyticInversion(), Defense(), cell, draws)
    gradient, steps, batches = (one.operator for one in seen)
    assert (gradient.clients, steps.clients) == (4, 2)
    assert steps.operator.steps == batches.steps == batches.batches == 2


@pytest.mark.slow
def test_images_found_by_patches_are_followed_by_the_likelihood() -> None:
    torch.manual_seed(0)
    model = Backbone(Shallow(8, 64), 10, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    waves = torch.stack([torch.linspace(0, k, 8).cos()[:, None] * torch.linspace(0, 3, 8).sin() for k in range(1, 7)])
    pixels = (127 + 100 * waves).round().byte().view(2, 3, 8, 8)
    private = ImageSet(pixels, torch.tensor([0, 1]), list("0123456789"), "test")
    draws = [torch.tensor([0]), torch.tensor([1])]
    found = defended.followed(model, private, attack(8), GaussianNoise(1e-3), draws)
    assert [len(found[when]) for when in ("before", "after")] == [2, 2]
    for before, after in zip(found["before"], found["after"], strict=True):
        # 0.0018 to 0.0011, and 0.344 to 0.001 after a search by patches that was stuck
        assert 0 < after["rmse"] < before["rmse"]
        assert after["misfit"] < before["misfit"]  # 1.6 to 1.1, and 62 to 1.3


def test_what_noise_hides_of_the_span_is_as_expected() -> None:
    torch.manual_seed(0)
    model = Backbone(Shallow(8, 64), 10, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    pixels = torch.randint(0, 256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    private = ImageSet(pixels, torch.tensor([0, 1]), list("0123456789"), "test")
    draws = [torch.tensor([0]), torch.tensor([1])]
    none, some, most = (defended.hidden(model, private, GaussianNoise(std), draws) for std in (1e-9, 3e-2, 1.0))
    place = none["layers"].index("trunk.layers.3")
    assert none["expected"][place] == pytest.approx(0, abs=1e-3)
    assert none["actual"][place] == pytest.approx(0, abs=1e-3)
    assert 0.1 < some["actual"][place] < 0.9
    assert some["expected"][place] == pytest.approx(some["actual"][place], abs=0.1)  # 0.47 and 0.41
    for row in (some, most):
        assert row["apart"] < 0.15  # 0.06 and 0.01
    assert most["expected"][place] == pytest.approx(1 - 16 / 432)  # as many random directions as patches
