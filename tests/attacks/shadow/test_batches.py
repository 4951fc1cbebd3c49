"""Mini-batches and snapshots of many models at once, against PyTorch's own optimizers and data loader, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_recon.attacks.shadow import (
    Execution,
    GradientDescent,
    KnownTraining,
    PrivateDescent,
    ShadowPlan,
    ShadowStore,
    fastest_execution,
    train_models,
    train_reference,
)
from lit_recon.attacks.shadow import plan as plans
from lit_recon.attacks.shadow.engines.batched_mlp import chunk_size, train_batched_mlp
from lit_recon.attacks.shadow.engines.general import train_vmap
from lit_recon.attacks.shadow.steps import Batches
from lit_recon.attacks.shadow.training import flat_weights, unflatten
from lit_recon.data import ImageSet
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP, ReleasedNetwork
from tests.attacks.shadow.conftest import random_images
from tests.attacks.shadow.test_store import complete, content

N_FIXED, N_MODELS = 9, 3
WAYS: tuple[Execution, ...] = ("batched_mlp", "vmap", "loop")


def seeded(seeds: Sequence[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def training(descent: GradientDescent, network: ReleasedNetwork | None = None, side: int = 5) -> KnownTraining:
    fixed = random_images(N_FIXED, 0, side=side)
    network = network or ReleasedMLP((1, side, side), 4, [6])
    return KnownTraining(network, fixed.pixels(), fixed.labels, descent).on("cpu", torch.float64)


def start_of(known: KnownTraining) -> Tensor:
    known.network.initialize(torch.Generator().manual_seed(7))  # type: ignore[operator]
    return flat_weights(known.network)


def spelled_out(known: KnownTraining, start: Tensor, image: Tensor | None, label: Tensor, seed: int) -> list[Tensor]:
    """The models after every step, by a data loader over all images; without an own one its place stays empty."""
    network, descent, n = known.network, known.descent, len(known.images)
    network.load_state_dict(unflatten(network, start))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=descent.lr, momentum=descent.momentum)
    if descent.optimizer == "adam":
        optimizer = torch.optim.Adam(network.parameters(), lr=descent.lr, betas=(descent.momentum, 0.999))
    own = torch.zeros_like(known.images[0]) if image is None else image
    data = TensorDataset(
        torch.cat([known.images, own[None]]), torch.cat([known.labels, label[None]]), torch.arange(n + 1)
    )
    generator, after = torch.Generator().manual_seed(seed), []
    while len(after) < known.n_steps:
        order = torch.randperm(n + 1, generator=generator).tolist()
        for images, labels, numbers in DataLoader(data, descent.batch_size, sampler=order):
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(network(images), labels, reduction="none")
            losses[(numbers < n) | (image is not None)].sum().div(len(images)).backward()
            optimizer.step()
            after.append(flat_weights(network))
    return after[: known.n_steps]


@pytest.mark.parametrize("order", ["known", "unknown"])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 3, "epochs": 3, "snapshots": [1, 2]},  # four batches an epoch, the last one of a single image
        {"batch_size": 4, "steps": 7, "snapshots": [2, 3]},  # ends within the third epoch
        {"batch_size": 4, "steps": 7, "snapshots": [2, 3], "optimizer": "adam"},
        {"batch_size": 1, "epochs": 1},
        {"batch_size": 10, "steps": 3},  # the whole training set, shuffled
    ],
    ids=lambda settings: f"batch_{settings['batch_size']}_{settings.get('optimizer', 'sgd')}",
)
def test_three_ways_follow_torch(order: Any, settings: dict[str, Any]) -> None:
    known, own = training(GradientDescent(lr=0.1, order=order, **settings)), random_images(N_MODELS, 1)
    start, images = start_of(known), own.pixels().double()
    seeds = [3] if order == "known" else list(range(N_MODELS))
    each = seeds * N_MODELS if order == "known" else seeds
    expected = []
    for image, label, seed in zip(images, own.labels, each, strict=True):
        after = spelled_out(known, start, image, label, seed)
        expected.append(torch.cat([after[step - 1] for step in known.kept_steps]))
    found = {way: train_models(known, start, images, own.labels, way, seeded(seeds)) for way in WAYS}
    found["hand in chunks"] = train_batched_mlp(known, start, images, own.labels, seeded(seeds), chunk=2)
    found["vmap in chunks"] = train_vmap(known, start, images, own.labels, seeded(seeds), chunk=2)
    for way, models in found.items():
        assert models.shape == (N_MODELS, (1 + len(settings.get("snapshots", []))) * 184), way
        # Differences of rounding alone; measured at most 2e-14, with Adam 3e-12.
        torch.testing.assert_close(
            models, torch.stack(expected), rtol=0, atol=1e-10, msg=lambda text, w=way: f"{w}: {text}"
        )
    reference = train_reference(known, start, seeded(seeds))
    without = [spelled_out(known, start, None, own.labels[0], seed) for seed in seeds]
    mean = torch.stack([torch.cat([after[step - 1] for step in known.kept_steps]) for after in without]).mean(0)
    torch.testing.assert_close(reference, mean, rtol=0, atol=1e-10)


def test_snapshots_of_full_batches_are_shorter_trainings() -> None:
    own = random_images(3, 1)
    descent = GradientDescent(steps=6, snapshots=[2, 5])
    for dp in (None, PrivateDescent(0.3, 0.0)):
        known = training(dataclasses.replace(descent, dp=dp))
        start, images = start_of(known), own.pixels().double()
        shorter = [training(GradientDescent(steps=steps, dp=dp)) for steps in (2, 5, 6)]
        for way in WAYS:
            parts = [train_models(one, start, images, own.labels, way) for one in shorter]
            assert torch.equal(train_models(known, start, images, own.labels, way), torch.cat(parts, dim=1))
        assert torch.equal(train_reference(known, start), torch.cat([train_reference(one, start) for one in shorter]))
    other = nn.Sequential(nn.Flatten(), nn.Linear(25, 4)).double()  # clipped by vmap, not by hand
    clipped = KnownTraining(
        other, known.images, known.labels, dataclasses.replace(descent, dp=PrivateDescent(0.3, 0.0))
    )
    assert train_reference(clipped, flat_weights(other)).shape == (3 * 104,)


def test_convolutions_see_the_same_batches() -> None:
    own = random_images(2, 1, side=10)
    for order, seeds in (("known", [3]), ("unknown", [3, 4])):
        descent = GradientDescent(batch_size=4, epochs=1, order=order, snapshots=[])  # type: ignore[arg-type]
        known = training(descent, ReleasedCNN((1, 10, 10), 4), side=10)
        start, images = start_of(known), own.pixels().double()
        loop, vmap = (train_models(known, start, images, own.labels, way, seeded(seeds)) for way in ("loop", "vmap"))  # type: ignore[arg-type]
        torch.testing.assert_close(vmap, loop, rtol=0, atol=1e-12)
        assert fastest_execution(known, start) in ("loop", "vmap")


def test_every_epoch_takes_every_image_once() -> None:
    known = training(GradientDescent(batch_size=4, epochs=3, order="unknown"))
    batches = list(Batches(known, seeded([0, 1, 2])).of(slice(1, 3)))
    assert [tuple(numbers.shape) for numbers in batches if numbers is not None] == [(2, 4), (2, 4), (2, 2)] * 3
    for epoch in range(3):
        whole = torch.cat([numbers for numbers in batches[3 * epoch : 3 * epoch + 3] if numbers is not None], dim=1)
        assert torch.equal(whole.sort(dim=1).values, torch.arange(10).expand(2, 10))
        assert not torch.equal(whole[0], whole[1])
    shared = Batches(training(GradientDescent(batch_size=4, epochs=1)), seeded([0]))
    first, again = (torch.cat(list(shared.of(slice(start, start + 1)))) for start in (0, 4))  # type: ignore[arg-type]
    assert torch.equal(first, again)


def test_fewer_images_at_a_time_take_fewer_models_along() -> None:
    def chunk(**settings: Any) -> int:
        network = ReleasedMLP((1, 28, 28), 10, [10])
        descent = GradientDescent(**settings)
        return chunk_size(KnownTraining(network, torch.zeros(500, 1, 28, 28), torch.zeros(500).long(), descent))

    assert chunk() == 65
    assert chunk(batch_size=32) == 4 * 2**20 // (4 * 7_960)  # as many as their weights fit
    assert chunk(batch_size=32, order="unknown") == 4 * 2**20 // (4 * 784 * 32)  # and as their batches fit


MINI = {"batch_size": 4, "epochs": 2, "snapshots": [1]}


@pytest.mark.parametrize(
    ("order", "execution"),
    [("known", "batched_mlp"), ("unknown", "batched_mlp"), ("known", "vmap"), ("unknown", "loop")],
)
def test_shards_ranks_and_interruptions_give_one_store(
    tmp_path: Path,
    plan: ShadowPlan,
    shadows: ImageSet,
    monkeypatch: pytest.MonkeyPatch,
    order: Any,
    execution: Execution,
) -> None:
    monkeypatch.setattr(plans, "_REFERENCE_ORDERS", 2)
    plan = dataclasses.replace(plan, descent=GradientDescent(order=order, **MINI))  # type: ignore[arg-type]
    whole = complete(tmp_path / "whole", plan, shadows, execution=execution)
    for rank in range(2):  # two processes, each with its own copy of everything
        complete(tmp_path / "ranks", dataclasses.replace(plan), shadows, [0, 1, 2, 3][rank::2], execution)
    generator = torch.Generator().manual_seed(0)
    done = torch.randperm(4, generator=generator)[: int(torch.randint(4, (), generator=generator))].tolist()
    complete(tmp_path / "broken", plan, shadows, done, execution)
    complete(tmp_path / "broken", plan, shadows, execution=execution)
    assert content(tmp_path / "ranks") == content(tmp_path / "whole") == content(tmp_path / "broken")
    found = whole.read(shadows)
    assert found.shape == (11, 2 * 184)
    other = complete(tmp_path / "large", plan, shadows, execution=execution, shard_size=11)
    torch.testing.assert_close(other.read(shadows), found, rtol=0, atol=2e-6)


def test_orders_are_shared_or_everyones_own(plan: ShadowPlan) -> None:
    same = random_images(1, 1).subset(torch.zeros(3).long())

    def trained(order: Any, purpose: str = "shadow", seed: int = 0) -> Tensor:
        own = dataclasses.replace(
            plan, descent=GradientDescent(batch_size=4, epochs=2, order=order), purpose=purpose, seed=seed
        )
        return own.train(same, range(3), "batched_mlp", own.reference() * 0)

    known = trained("known")
    torch.testing.assert_close(known[[0, 0]], known[1:], rtol=0, atol=1e-6)
    assert torch.equal(known, trained("known", "released"))
    unknown = torch.cat([trained("unknown"), trained("unknown", "released")])
    assert torch.pdist(unknown).min() > 0.01 * unknown.norm(dim=1).mean()
    assert torch.equal(trained("unknown"), unknown[:3])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"batch_size": 4}, "descent.batch_size is None there, 4 now"),
        ({"snapshots": [3]}, r"descent.snapshots is None there, \[3\] now"),
        ({"batch_size": 4, "epochs": 2}, "descent.epochs is None there, 2 now"),
    ],
)
def test_a_store_of_other_batches_is_refused(
    tmp_path: Path, plan: ShadowPlan, changed: dict[str, Any], named: str
) -> None:
    ShadowStore.create(tmp_path, plan.description, "batched_mlp", 3)
    other = dataclasses.replace(plan, descent=dataclasses.replace(plan.descent, **changed))
    with pytest.raises(ConfigError, match=f"another training .*{named}"):
        ShadowStore.open(tmp_path, other.description)


def test_stores_of_full_batches_keep_their_description(plan: ShadowPlan) -> None:
    descent = {key: value for key, value in plan.description.items() if key.startswith("descent.")}
    assert descent == {"descent.steps": 10, "descent.lr": 0.2, "descent.momentum": 0.9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "unknown"}, "got no descent.batch_size: full batches have no order"),
        ({"epochs": 3}, "their epochs are descent.steps"),
        ({"batch_size": 0}, "must be at least 1; got 0 and None"),
        ({"batch_size": 4, "epochs": 0}, "must be at least 1; got 4 and 0"),
        ({"batch_size": 4, "dp": PrivateDescent(noise_multiplier=1.0)}, "descent.dp needs full batches"),
        ({"snapshots": [100]}, r"from 1 to 99, before the end of training; got \[100\]"),
        ({"snapshots": [3, 2]}, "ascending"),
        ({"batch_size": 4, "epochs": 3, "snapshots": [1, 3]}, r"from 1 to 2, .* got \[1, 3\]"),
    ],
)
def test_impossible_batches_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientDescent(**arguments)


def test_batches_beyond_the_training_set_and_missing_orders_are_refused() -> None:
    with pytest.raises(ConfigError, match="descent.batch_size must be at most 10, the fixed set and one image; got 11"):
        training(GradientDescent(batch_size=11))
    own = random_images(3, 1)
    for order, message in (("known", "one generator for all models; got 0"), ("unknown", "one generator per model")):
        known = training(GradientDescent(batch_size=4, order=order))  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match=message):
            train_models(known, start_of(known), own.pixels().double(), own.labels, "batched_mlp")


def test_an_image_that_no_step_uses_is_refused() -> None:
    """Of 10 images, two batches of 2 have 4."""
    fixed, images = random_images(N_FIXED, 0, side=5), random_images(1, 1, side=5)
    network, refused = ReleasedMLP((1, 5, 5), 4, [6]), 0
    for seed in range(10):
        how: dict[str, Any] = {"seed": seed}
        used = N_FIXED in torch.randperm(N_FIXED + 1, generator=seeded_generator(seed, "order"))[:4].tolist()
        descent = GradientDescent(steps=2, batch_size=2)
        if used:
            plan = ShadowPlan(network, fixed, descent, **how)
            assert plan.train(images, range(1), "loop", plan.reference()).norm() > 1e-3
        else:
            refused += 1
            with pytest.raises(ConfigError, match=r"do not contain the unknown image.* take 5 steps"):
                ShadowPlan(network, fixed, descent, **how)
        ShadowPlan(network, fixed, dataclasses.replace(descent, order="unknown"), **how)
        whole = ShadowPlan(network, fixed, dataclasses.replace(descent, steps=5), **how)
        whole.require_own_image(5)
        with nullcontext() if used else pytest.raises(ConfigError, match="first 2 mini-batches"):
            whole.require_own_image(2)
    assert 0 < refused < 10
