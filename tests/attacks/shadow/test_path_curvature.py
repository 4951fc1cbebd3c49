"""Linear response of any network, against dense Hessians and against models that are trained exactly."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import islice, pairwise, repeat
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian

from lit_recon.attacks.shadow import GradientDescent, LinearPlan, LinearResponse, ShadowPlan, ShadowStore
from lit_recon.attacks.shadow import path_curvature as module
from lit_recon.attacks.shadow.engine import deltas, reference_path, train_models, train_reference
from lit_recon.attacks.shadow.path_curvature import PathCurvature, path_curvature, respond_along
from lit_recon.attacks.shadow.training import KnownTraining, cross_entropy, flat_weights
from lit_recon.data import ImageSet
from lit_recon.errors import ShapeError
from lit_recon.models.released import ReleasedCNN
from tests.attacks.shadow.conftest import random_images


class Small(nn.Module):
    """A convolutional network of 114 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ELU(), nn.Flatten(), nn.Linear(18, 4), nn.ELU(), nn.Linear(4, 4)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def training(n: int = 12, steps: int = 12, momentum: float = 0.9) -> tuple[KnownTraining, Tensor]:
    torch.manual_seed(3)
    images = random_images(n, 0)
    descent = GradientDescent(steps=steps, lr=0.05, momentum=momentum)
    known = KnownTraining(Small(), images.pixels(), images.labels, descent).on("cpu", torch.float64)
    return known, flat_weights(known.network)


def own(n: int = 3) -> tuple[Tensor, Tensor]:
    images = random_images(n, 1)
    return images.pixels().double(), images.labels


def exactly(known: KnownTraining, initial: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    trained = train_models(known, initial, images, labels, "loop")
    return deltas(trained, train_reference(known, initial)).double()


def errors(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


def dense(known: KnownTraining, initial: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """First order with the positive part of the whole Hessian, step by step."""
    loss = partial(cross_entropy, known.network, reduction="sum")
    found, descent = [], known.descent
    path = list(islice(reference_path(known, initial, repeat(None, known.n_steps)), known.n_steps))
    for image, label in zip(images, labels, strict=True):
        moved, speed = torch.zeros_like(initial), torch.zeros_like(initial)
        for weights in path:
            matrix = hessian(loss)(weights, known.images, known.labels)
            values, vectors = torch.linalg.eigh(matrix)
            kept = values > 1e-4 * values[-1]
            curved = vectors[:, kept] @ (values[kept] * (vectors[:, kept].T @ moved))
            step = curved + grad(loss)(weights + moved, image[None], label[None])
            speed = descent.momentum * speed + step / (len(known.images) + 1)
            moved = moved - descent.lr * speed
        found.append(moved)
    return torch.stack(found)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_all_directions_images_and_points_it_is_first_order(momentum: float) -> None:
    known, initial = training(60, momentum=momentum)
    curvature = path_curvature(known, initial, 114, 12, 60)
    assert curvature.points == list(range(12))
    found = respond_along(known, curvature, *own())
    torch.testing.assert_close(found, dense(known, initial, *own()), rtol=1e-6, atol=1e-9)


def test_products_are_those_of_the_hessian() -> None:
    known, initial = training(30)
    curvature = path_curvature(known, initial, 10, 3, 30)
    loss = partial(cross_entropy, known.network, reduction="sum")
    path = list(islice(reference_path(known, initial, repeat(None, 12)), 12))
    torch.testing.assert_close(curvature.path, torch.stack(path))
    torch.testing.assert_close(curvature.basis.T @ curvature.basis, torch.eye(10, dtype=torch.float64))
    for step, product in zip(curvature.points, curvature.products, strict=True):
        matrix = hessian(loss)(path[step], known.images, known.labels)
        torch.testing.assert_close(product, matrix @ curvature.basis, rtol=1e-6, atol=1e-9)


def test_products_from_some_images_stand_for_all() -> None:
    """Their mean over draws is that of all images."""
    known, initial = training(40, steps=30)
    whole = path_curvature(known, initial, 5, 30, 40)
    some = path_curvature(known, initial, 5, 30, 10)
    errors_of = [float((a - b).norm() / b.norm()) for a, b in zip(some.products, whole.products, strict=True)]
    means = [torch.stack(list(one.products)).mean(0) for one in (some, whole)]
    assert min(errors_of) > 0.05
    assert float((means[0] - means[1]).norm() / means[1].norm()) < 0.5 * max(errors_of)


def test_between_points_products_are_interpolated() -> None:
    basis = torch.eye(3, 2, dtype=torch.float64)
    products = [torch.tensor(values).view(3, 2).double() for values in ([2, 0, 0, 4, 1, 1], [4, 0, 0, 8, 3, 3])]
    curvature = PathCurvature(torch.zeros(5, 3), basis, [0, 4], products)
    product, inverse = curvature.at(1)
    torch.testing.assert_close(product, torch.tensor([[2.5, 0], [0, 5], [1.5, 1.5]]).double())
    torch.testing.assert_close(inverse, torch.diag(torch.tensor([1 / 2.5, 1 / 5])).double())
    assert [float(curvature.at(step)[0][0, 0]) for step in (0, 2, 4)] == [2.0, 3.0, 4.0]


def test_points_are_equally_far_from_each_other_on_the_path() -> None:
    known, initial = training(steps=200)
    points = path_curvature(known, initial, 4, 6, 12).points
    path = torch.stack(list(islice(reference_path(known, initial, repeat(None, 200)), 200)))
    lengths = [float((path[a + 1 : b + 1] - path[a:b]).norm(dim=1).sum()) for a, b in pairwise(points)]
    assert len(points) == 6
    assert points[0] == 0
    assert points[-1] == 199
    assert max(lengths) < 1.5 * min(lengths)


def test_it_comes_closer_to_exact_models_than_their_own_gradients_alone() -> None:
    """Relative errors of 0.10 and 0.08 with 10 and 60 directions, 1.4 with one, 1.9 without any."""
    known, initial = training(200, steps=30)
    exact, found = exactly(known, initial, *own()), {}
    for rank in (1, 10, 60):
        response = respond_along(known, path_curvature(known, initial, rank, 20, 200), *own())
        found[rank] = float(errors(response, exact).median())
    flat = path_curvature(known, initial, 4, 2, 200)
    none = dataclasses.replace(flat, products=[torch.full_like(one, 1e-300) for one in flat.products])
    alone = float(errors(respond_along(known, none, *own()), exact).median())
    assert max(found[10], found[60]) < 0.25 * min(found[1], alone)


def test_a_model_does_not_depend_on_the_others() -> None:
    known, initial = training()
    curvature = path_curvature(known, initial, 6, 4, 12)
    together = respond_along(known, curvature, *own(5))
    for i in range(5):
        alone = respond_along(known, curvature, *(part[i : i + 1] for part in own(5)))
        torch.testing.assert_close(together[i : i + 1], alone)


def test_finished_points_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, initial = training()
    told: list[tuple[int, int]] = []
    first = path_curvature(known, initial, 6, 4, 12, tmp_path, lambda done, of: told.append((done, of)))
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    (tmp_path / f"step_{first.points[2]:05d}.safetensors").unlink()
    computed: list[int] = []
    product = module._product
    monkeypatch.setattr(module, "_product", lambda *given: computed.append(given[3]) or product(*given))
    again = path_curvature(known, initial, 6, 4, 12, tmp_path)
    assert computed == [first.points[2]]
    for one, other in zip(first.products, again.products, strict=True):
        assert torch.equal(one, other)


def test_what_does_not_fit_or_diverges_is_refused() -> None:
    known, initial = training()
    curvature = path_curvature(known, initial, 6, 4, 12)
    images, labels = own()
    with pytest.raises(ShapeError, match="one image of shape"):
        respond_along(known, curvature, images[:, :, 1:], labels)
    large = dataclasses.replace(curvature, products=[1e9 * one for one in curvature.products])
    with pytest.raises(ShapeError, match="diverged to NaN or infinity"):
        respond_along(dataclasses.replace(known, descent=GradientDescent(steps=12, lr=1e30)), large, images, labels)


def test_a_plan_of_a_convolutional_network_stores_what_it_responds(tmp_path: Path) -> None:
    def images(n: int, seed: int) -> ImageSet:
        return random_images(n, seed, side=10)

    network = ReleasedCNN((1, 10, 10), 4, hidden=3)
    exact = ShadowPlan(network, images(60, 0), GradientDescent(steps=10, lr=0.02))
    response = LinearResponse(rank=30, hessian_images=60, points=4, sample=2, tolerance=0.5)
    plan, own_images = LinearPlan(exact, response, "linear"), images(7, 1)
    assert plan.description["shadows.points"] == 4
    store = ShadowStore.create(tmp_path, plan.description, "loop", 3)
    sample = plan.exact_sample(tmp_path, own_images)
    assert sample is not None
    there = ShadowStore.create(sample.folder, sample.plan.description, "loop", 3)
    assert list(sample.plan.train_shards(there, [0], sample.images)) == [0]
    sample.measure()
    assert list(plan.train_shards(store, [0, 1, 2], own_images)) == [0, 1, 2]
    known, initial = exact.known, exact.initial_weights()
    curvature = path_curvature(known, initial, 30, 4, 60)
    expected = respond_along(known, curvature, own_images.pixels(), own_images.labels)
    torch.testing.assert_close(store.read(own_images), expected)
    assert plan.measured(tmp_path).median < 0.3
    assert len(list((tmp_path / "curvature").iterdir())) == 5
