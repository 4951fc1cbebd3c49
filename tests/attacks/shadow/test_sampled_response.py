"""Shadow models from some of the fixed images per step, against models that are trained exactly."""

from __future__ import annotations

import dataclasses
import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.shadow import GradientDescent, LinearPlan, LinearResponse, ShadowPlan
from lit_recon.attacks.shadow import sampled_response as module
from lit_recon.attacks.shadow.engine import deltas, full_batch_path, train_models, train_reference
from lit_recon.attacks.shadow.sampled_response import balanced_samples, respond_by_samples
from lit_recon.attacks.shadow.training import KnownTraining, flat_weights
from lit_recon.data import ImageSet
from lit_recon.errors import ShapeError
from lit_recon.models.released import ReleasedCNN
from tests.attacks.shadow.conftest import filled_store, random_images


class Small(nn.Module):
    """A convolutional network of 114 weights."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 2, 3), activation, nn.Flatten(), nn.Linear(18, 4), activation, nn.Linear(4, 4)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def training(
    n: int = 12, steps: int = 12, momentum: float = 0.9, activation: nn.Module | None = None
) -> tuple[KnownTraining, Tensor, Tensor]:
    """A training, initial weights, and the reference's weights before each step."""
    torch.manual_seed(3)
    images = random_images(n, 0)
    descent = GradientDescent(steps=steps, lr=0.05, momentum=momentum)
    network = Small(activation or nn.ELU())
    known = KnownTraining(network, images.pixels(), images.labels, descent).on("cpu", torch.float64)
    initial = flat_weights(known.network)
    return known, initial, torch.stack(list(full_batch_path(known, initial)))


def own(n: int = 3) -> tuple[Tensor, Tensor]:
    images = random_images(n, 1)
    return images.pixels().double(), images.labels


def exactly(known: KnownTraining, initial: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    trained = train_models(known, initial, images, labels, "loop")
    return deltas(trained, train_reference(known, initial)).double()


def errors(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("n_images", "activation"), [(12, nn.ELU()), (100, nn.ReLU())])
def test_with_all_images_it_is_exact(
    momentum: float, n_images: int, activation: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIXED", 5)  # in three parts
    known, initial, path = training(momentum=momentum, activation=activation)
    found = respond_by_samples(known, path, *own(), n_images)
    torch.testing.assert_close(found, exactly(known, initial, *own()), rtol=1e-6, atol=1e-9)


def test_the_error_falls_with_the_images_of_a_step() -> None:
    """Medians over five trainings of 0.05 to 0.07, 0.006 to 0.012 and 0.002 to 0.004."""
    known, initial, path = training(200, steps=40)
    exact = exactly(known, initial, *own(6))
    found = [float(errors(respond_by_samples(known, path, *own(6), n), exact).median()) for n in (10, 50, 100)]
    assert found[0] < 0.2
    assert found[1] < 0.5 * found[0]
    assert found[2] < 0.8 * found[1]


@pytest.mark.parametrize(("n", "size"), [(40, 10), (43, 10), (39, 20), (40, 100), (7, 1)])
def test_every_image_comes_once_before_one_comes_again(n: int, size: int) -> None:
    labels = torch.randint(0, 4, (n,), generator=torch.Generator().manual_seed(0))
    per_pass = math.ceil(n / size)
    samples = list(islice(balanced_samples(labels, size), 3 * per_pass))
    assert max(map(len, samples)) <= size
    for start in range(0, len(samples), per_pass):
        some = torch.cat(samples[start : start + per_pass])
        assert torch.equal(some.sort().values, torch.arange(n))
    assert not torch.equal(samples[0].sort().values, samples[per_pass].sort().values) or size >= n
    again = list(islice(balanced_samples(labels, size), 3 * per_pass))
    assert all(torch.equal(a, b) for a, b in zip(samples, again, strict=True))


def test_labels_have_equal_shares_in_every_sample() -> None:
    labels = torch.arange(4).repeat_interleave(torch.tensor([40, 20, 20, 120]))
    for sample in islice(balanced_samples(labels, 20), 30):
        counts = labels[sample].bincount(minlength=4)
        assert (counts - torch.tensor([4, 2, 2, 12])).abs().max() <= 1


def test_balanced_samples_err_less_than_independent_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a factor of 5 to 13 in five trainings."""
    known, initial, path = training(200, steps=40)
    exact = exactly(known, initial, *own(6))
    balanced = errors(respond_by_samples(known, path, *own(6), 20), exact).median()

    def draws(labels: Tensor, size: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randperm(len(labels), generator=generator)[:size] for _ in range(40)]

    monkeypatch.setattr(module, "balanced_samples", draws)
    assert balanced < 0.4 * errors(respond_by_samples(known, path, *own(6), 20), exact).median()


def test_a_model_does_not_depend_on_the_others() -> None:
    known, _, path = training()
    together = respond_by_samples(known, path, *own(5), 4)
    for i in range(5):
        alone = respond_by_samples(known, path, *(part[i : i + 1] for part in own(5)), 4)
        torch.testing.assert_close(together[i : i + 1], alone)


def test_what_does_not_fit_or_diverges_is_refused() -> None:
    known, _, path = training()
    images, labels = own()
    with pytest.raises(ShapeError, match="one image of shape"):
        respond_by_samples(known, path, images[:, :, 1:], labels, 4)
    with pytest.raises(ShapeError, match="diverged to NaN or infinity: raise linear.hessian_images"):
        respond_by_samples(
            dataclasses.replace(known, descent=GradientDescent(steps=12, lr=1e300)), path, images, labels, 4
        )


def test_a_plan_of_a_convolutional_network_stores_what_it_responds(tmp_path: Path) -> None:
    def images(n: int, seed: int) -> ImageSet:
        return random_images(n, seed, side=10)

    network = ReleasedCNN((1, 10, 10), 4, hidden=3)
    exact = ShadowPlan(network, images(60, 0), GradientDescent(steps=10, lr=0.02))
    plan, own_images = (
        LinearPlan(exact, LinearResponse(hessian_images=20, sample=2, tolerance=0.5), "linear"),
        images(7, 1),
    )
    assert plan.description["shadows.hessian_images"] == 20
    assert "shadows.rank" not in plan.description
    store = filled_store(tmp_path, plan, own_images)
    known, initial = exact.known, exact.initial_weights()
    path = torch.stack(list(full_batch_path(known, initial)))
    expected = respond_by_samples(known, path, own_images.pixels(), own_images.labels, 20)
    torch.testing.assert_close(store.read(own_images), expected)
    assert plan.measured(tmp_path).median < 0.3
    assert "7 of the 7 shadow models were made from 20 of the 60 fixed images per step" in plan.notes(tmp_path, 7)[0]
    plan = dataclasses.replace(plan, response=dataclasses.replace(plan.response, hessian_images=59))
    assert "from 30 of the 60 fixed images per step" in plan.notes(tmp_path, 7)[0]
