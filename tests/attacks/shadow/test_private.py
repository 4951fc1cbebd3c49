"""DP gradient descent of many models at once, against the defense's own release and a loop that spells it out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.shadow import (
    GradientDescent,
    KnownTraining,
    PrivateDescent,
    ShadowPlan,
    ShadowStore,
    fastest_execution,
    train_models,
    train_reference,
)
from lit_recon.attacks.shadow.steps import add_noise
from lit_recon.attacks.shadow.training import flat_weights, unflatten
from lit_recon.defenses import DPSGD
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP, ReleasedNetwork
from lit_recon.privacy import FullBatchSGD
from tests.attacks.shadow.conftest import random_images


def generators(n: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(n)]


def start_of(network: ReleasedNetwork) -> Tensor:
    network.initialize(torch.Generator().manual_seed(7))
    return flat_weights(network)


def private_training(
    network: ReleasedNetwork, noise: float, optimizer: str = "sgd", steps: int = 8, side: int = 5, bound: float = 0.3
) -> KnownTraining:
    fixed = random_images(9, 0, side=side)
    dp = PrivateDescent(bound=bound, noise_multiplier=noise)
    descent = GradientDescent(steps, 0.1, 0.9, optimizer, dp)  # type: ignore[arg-type]
    return KnownTraining(network, fixed.pixels(), fixed.labels, descent).on("cpu", torch.float64)


def spelled_out(known: KnownTraining, start: Tensor, image: Tensor, label: Tensor, seed: int) -> Tensor:
    """One model by nothing but autograd: clip each example, sum, add noise, divide, step with momentum."""
    network, dp = known.network, known.descent.dp
    assert dp is not None
    assert dp.noise_multiplier is not None
    generator = torch.Generator().manual_seed(seed)
    network.load_state_dict(unflatten(network, start))
    parameters = list(network.parameters())
    velocity = [torch.zeros_like(parameter) for parameter in parameters]
    inputs, targets = torch.cat([known.images, image[None]]), torch.cat([known.labels, label[None]])
    for _ in range(known.descent.steps):
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for one, of_one in zip(inputs, targets, strict=True):
            loss = nn.functional.cross_entropy(network(one[None]), of_one[None])
            gradient = torch.autograd.grad(loss, parameters)
            norm = torch.cat([part.flatten() for part in gradient]).norm()
            for part, value in zip(total, gradient, strict=True):
                part += value * min(1.0, dp.bound / float(norm))
        with torch.no_grad():
            for parameter, part, speed in zip(parameters, total, velocity, strict=True):
                part += dp.noise_multiplier * dp.bound * torch.randn(part.shape, generator=generator, dtype=part.dtype)
                speed.mul_(known.descent.momentum).add_(part / len(inputs))
                parameter.sub_(known.descent.lr * speed)
    return flat_weights(network)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("noise", [0.0, 0.7])
@pytest.mark.parametrize("activation", ["elu", "relu", "tanh", "sigmoid"])
def test_all_ways_agree_with_the_defense(activation: str, noise: float, optimizer: str) -> None:
    network = ReleasedMLP((1, 5, 5), 4, [7, 5], activation)  # type: ignore[arg-type]
    start, own = start_of(network).double(), random_images(5, 1)
    known = private_training(network, noise, optimizer)
    ways = [
        train_models(known, start, own.pixels().double(), own.labels, way, generators(5))
        for way in ("loop", "batched_mlp", "vmap")
    ]
    assert (ways[0] - start).norm(dim=1).min() > 1e-2
    for found in ways[1:]:
        # Differences of rounding alone; measured at most 2e-13, by Adam, whose first steps divide by tiny numbers.
        torch.testing.assert_close(found, ways[0], rtol=0, atol=1e-10)


def test_by_hand_is_the_algorithm_spelled_out() -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    start, own = start_of(network).double(), random_images(3, 1)
    known = private_training(network, noise=0.5)
    found = train_models(known, start, own.pixels().double(), own.labels, "batched_mlp", generators(3))
    for seed, (image, label) in enumerate(zip(own.pixels().double(), own.labels, strict=True)):
        expected = spelled_out(known, start, image, label, seed)
        torch.testing.assert_close(found[seed], expected, rtol=0, atol=1e-12)


def test_a_bound_that_nothing_reaches_changes_nothing() -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    start, own = start_of(network).double(), random_images(4, 1)
    known = private_training(network, noise=0.0, bound=1e6)
    plain = dataclasses.replace(known, descent=dataclasses.replace(known.descent, dp=None))
    images = own.pixels().double()
    for way in ("batched_mlp", "vmap", "loop"):
        expected = train_models(plain, start, images, own.labels, way)
        found = train_models(known, start, images, own.labels, way)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(train_reference(known, start), train_reference(plain, start), rtol=0, atol=1e-13)


def test_convolutions_are_clipped_alike() -> None:
    network = ReleasedCNN((1, 10, 10), 4)
    start, own = start_of(network).double(), random_images(2, 1, side=10)
    known = private_training(network, noise=0.5, steps=2, side=10)
    loop, vmap = (
        train_models(known, start, own.pixels().double(), own.labels, way, generators(2)) for way in ("loop", "vmap")
    )
    torch.testing.assert_close(vmap, loop, rtol=0, atol=1e-12)
    assert train_reference(known, start).shape == start.shape


def test_the_reference_lacks_one_clipped_gradient_and_the_noise() -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    start, own = start_of(network).double(), random_images(1, 1)
    known = private_training(network, noise=0.0, steps=1, bound=0.05)
    trained = train_models(known, start, own.pixels().double(), own.labels, "batched_mlp")[0]
    difference = trained - train_reference(known, start)
    # One step of 0.1 along the mean of ten: the image's own gradient, which is longer than the bound.
    assert float(difference.norm()) == pytest.approx(0.1 * 0.05 / 10, rel=1e-9)
    noisy = dataclasses.replace(
        known, descent=dataclasses.replace(known.descent, dp=PrivateDescent(bound=0.05, noise_multiplier=9.0))
    )
    assert torch.equal(train_reference(noisy, start), train_reference(known, start))


def test_the_reference_of_any_network_is_that_by_hand() -> None:
    fixed = random_images(9, 0)
    elu, descent = ReleasedMLP((1, 5, 5), 4, [6]), GradientDescent(steps=5, dp=PrivateDescent(0.2, 1.0))
    start = start_of(elu)
    by_hand = train_reference(KnownTraining(elu, fixed.pixels(), fixed.labels, descent), start)
    # The same network, but of a class that is trained by vmap alone.
    other = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.ELU(), nn.Linear(6, 4))
    by_vmap = train_reference(KnownTraining(other, fixed.pixels(), fixed.labels, descent), start)
    torch.testing.assert_close(by_hand, by_vmap, rtol=0, atol=1e-13)


def test_noise_is_that_of_the_defense() -> None:
    sums = [torch.ones(3, 4, 5), torch.ones(3, 4)]
    mechanism = DPSGD(bound=2.0, noise_multiplier=1.5)
    add_noise(sums, mechanism, generators(3))
    for index, generator in enumerate(generators(3)):
        own = {"weight": torch.full((4, 5), 0.1), "bias": torch.full((4,), 0.1)}
        batch = torch.empty(10, 0)
        expected = mechanism.transform_update(own, _Round(batch), generator)  # type: ignore[arg-type]
        torch.testing.assert_close(sums[0][index] / 10, expected["weight"])
        torch.testing.assert_close(sums[1][index] / 10, expected["bias"])


class _Round:
    """Of a round, the mechanism asks for the size of the batch only."""

    def __init__(self, images: Tensor) -> None:
        self.batch = type("Batch", (), {"images": images})


def test_noise_has_the_scale_that_epsilon_is_stated_for() -> None:
    dp = PrivateDescent(bound=0.5, target_epsilon=10.0)
    steps, n = 4, 9
    assert FullBatchSGD(dp.noise(steps), steps).epsilon(dp.delta) == pytest.approx(10.0, rel=1e-9)
    assert dp.epsilon(steps) == pytest.approx(10.0, rel=1e-9)
    assert PrivateDescent(noise_multiplier=0.0).epsilon(steps) == float("inf")
    network, fixed = ReleasedMLP((1, 5, 5), 4, [6]), random_images(n, 0)
    known = KnownTraining(network, fixed.pixels(), fixed.labels, GradientDescent(steps, 1e-6, 0.0, "sgd", dp))
    start, own = start_of(network).double(), random_images(1, 1)
    exact = known.on("cpu", torch.float64)
    images, labels = own.pixels().double().expand(200, -1, -1, -1), own.labels.expand(200)
    trained = train_models(exact, start, images, labels, "batched_mlp", generators(200))
    # So small a learning rate leaves the gradients as they are: what differs is noise, of every step.
    spread = float(trained.std(dim=0).square().mean().sqrt())
    expected = 1e-6 * dp.noise(steps) * 0.5 / (n + 1) * steps**0.5
    assert spread == pytest.approx(expected, rel=0.02)  # 36,800 numbers: a standard error of 0.4 %


def test_every_model_has_noise_of_its_own(plan: ShadowPlan) -> None:
    dp = PrivateDescent(noise_multiplier=1.0)
    private = dataclasses.replace(plan, descent=dataclasses.replace(plan.descent, dp=dp))
    images = random_images(1, 1)
    same = images.subset(torch.zeros(3).long())
    reference = private.reference()
    first = private.train(same, range(3), "batched_mlp", reference)
    assert torch.equal(first, private.train(same, range(3), "batched_mlp", reference))
    torch.testing.assert_close(private.train(same, range(1, 3), "vmap", reference), first[1:], rtol=0, atol=1e-5)
    released = dataclasses.replace(private, purpose="released").train(same, range(3), "batched_mlp", reference)
    models = torch.cat([first, released])
    assert torch.pdist(models).min() > 0.1 * models.norm(dim=1).mean()
    assert fastest_execution(private.known, private.initial_weights()) in ("batched_mlp", "vmap", "loop")


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"dp": PrivateDescent(noise_multiplier=1.0)}, "descent.dp.noise_multiplier is None there, 1.0 now"),
        ({"dp": PrivateDescent(target_epsilon=3.0)}, "descent.dp.target_epsilon is None there, 3.0 now"),
        ({"optimizer": "adam"}, "descent.optimizer is None there, 'adam' now"),
    ],
)
def test_a_store_of_another_descent_is_refused(
    tmp_path: Path, plan: ShadowPlan, changed: dict[str, object], key: str
) -> None:
    ShadowStore.create(tmp_path, plan.description, "batched_mlp", 3)
    other = dataclasses.replace(plan, descent=dataclasses.replace(plan.descent, **changed))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another training") as caught:
        ShadowStore.open(tmp_path, other.description)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs a noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0"),
        ({"target_epsilon": 0.0}, "target_epsilon must be above 0"),
        ({"target_epsilon": 1.0, "delta": 1.0}, "delta must lie strictly between 0 and 1"),
        ({"target_epsilon": 1.0, "bound": -1.0}, "clipping norm must be at least 0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be at least 0"),
    ],
)
def test_impossible_privacy_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrivateDescent(**arguments)  # type: ignore[arg-type]


def test_given_noise_has_to_keep_a_given_budget() -> None:
    both = PrivateDescent(noise_multiplier=5.0, target_epsilon=10.0)
    assert both.noise(steps=100) == 5.0
    with pytest.raises(ConfigError, match=r"target_epsilon=10 cannot be reached in 200 .* leave dp.noise_mult"):
        both.noise(steps=200)


@pytest.mark.parametrize("way", ["batched_mlp", "vmap", "loop"])
def test_extreme_bounds(way: Literal["batched_mlp", "vmap", "loop"]) -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    start, own = start_of(network).double(), random_images(2, 1)

    def trained(dp: PrivateDescent | None) -> Tensor:
        known = private_training(network, noise=0.0)
        known = dataclasses.replace(known, descent=dataclasses.replace(known.descent, dp=dp))
        return train_models(known, start, own.pixels().double(), own.labels, way, generators(2))

    frozen = trained(PrivateDescent(bound=0.0, noise_multiplier=1.0))
    assert torch.equal(frozen, start.expand_as(frozen))
    free = trained(PrivateDescent(bound=float("inf"), noise_multiplier=0.0))
    torch.testing.assert_close(free, trained(None), rtol=0, atol=1e-12)


def test_noise_needs_generators() -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    start, own = start_of(network).double(), random_images(3, 1)
    known = private_training(network, noise=1.0)
    for way in ("batched_mlp", "vmap", "loop"):
        with pytest.raises(ShapeError, match="one generator per model; got 2 for 3 models"):
            train_models(known, start, own.pixels().double(), own.labels, way, generators(2))


def test_a_plan_without_noise_has_the_same_clipping_and_shares_the_reference() -> None:
    dp = PrivateDescent(bound=0.3, target_epsilon=5.0)
    noisy = ShadowPlan(ReleasedMLP((1, 5, 5), 4, [6]), random_images(9, 0), GradientDescent(4, dp=dp))
    silent = noisy.without_noise
    expected = GradientDescent(4, dp=PrivateDescent(bound=0.3, noise_multiplier=0.0))
    assert silent.descent == silent.descent.without_noise == expected
    assert silent.reference() is noisy.reference() is silent.for_purpose("own").reference()
    assert torch.equal(dataclasses.replace(silent).reference(), noisy.reference())
    assert GradientDescent(4).without_noise == GradientDescent(4)
