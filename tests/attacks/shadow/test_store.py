"""A store belongs to one training, and is the same however often its making was interrupted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.shadow import GradientDescent, ShadowPlan, ShadowStore
from lit_recon.attacks.shadow.store import image_keys
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, ShapeError
from lit_recon.models.released import ReleasedMLP
from tests.attacks.shadow.conftest import random_images


def complete(
    folder: Path,
    plan: ShadowPlan,
    images: ImageSet,
    order: list[int] | None = None,
    execution: str = "batched_mlp",
    shard_size: int = 3,
) -> ShadowStore:
    store = ShadowStore.open(folder, plan.description)
    store = store or ShadowStore.create(folder, plan.description, execution, shard_size)
    reference = plan.reference()
    for shard in order if order is not None else store.missing(len(images)):
        plan.train_shard(store, shard, images, reference)
    return store


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_what_is_read_is_what_training_gives(tmp_path: Path, plan: ShadowPlan, shadows: ImageSet) -> None:
    store = complete(tmp_path, plan, shadows)
    expected = plan.train(shadows, range(11), "loop", plan.reference())
    torch.testing.assert_close(store.read(shadows), expected, rtol=0, atol=1e-6)
    first = shadows.subset(torch.arange(7))
    assert torch.equal(store.read(first), store.read(shadows)[:7])
    assert torch.equal(store.read(shadows, lambda found: found[:, :9] * 2), store.read(shadows)[:, :9] * 2)


@pytest.mark.parametrize("seed", range(5))
def test_any_order_and_interruption_give_the_same_store(
    tmp_path: Path, plan: ShadowPlan, shadows: ImageSet, seed: int
) -> None:
    complete(tmp_path / "whole", plan, shadows)
    generator = torch.Generator().manual_seed(seed)
    done = torch.randperm(4, generator=generator)[: int(torch.randint(4, (), generator=generator))].tolist()
    store = complete(tmp_path / "broken", plan, shadows, done)
    assert set(store.missing(11)) == set(range(4)) - set(done)
    (tmp_path / "broken" / ".shard_00002.safetensors.abc.unfinished").write_bytes(b"half a shard")
    complete(tmp_path / "broken", plan, shadows)
    (tmp_path / "broken" / ".shard_00002.safetensors.abc.unfinished").unlink()
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_a_write_that_is_killed_leaves_the_shard_missing(
    tmp_path: Path, plan: ShadowPlan, shadows: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = complete(tmp_path, plan, shadows, [0])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            plan.train_shard(store, 1, shadows, plan.reference())
    assert store.missing(11) == [1, 2, 3]


def test_more_shadow_targets_extend_a_store(tmp_path: Path, plan: ShadowPlan, shadows: ImageSet) -> None:
    few = shadows.subset(torch.arange(7))
    store = complete(tmp_path, plan, few)
    assert store.missing(7) == []
    assert store.missing(11) == [2, 3]
    complete(tmp_path, plan, shadows)
    complete(tmp_path / "whole", plan, shadows)
    assert torch.equal(store.read(shadows), ShadowStore.open(tmp_path / "whole", plan.description).read(shadows))  # type: ignore[union-attr]


def test_of_two_that_extend_a_store_at_the_same_time_the_one_that_needs_fewer_models_takes_none_away(
    tmp_path: Path, plan: ShadowPlan, shadows: ImageSet
) -> None:
    few = shadows.subset(torch.arange(7))
    store = complete(tmp_path, plan, shadows, [])
    slow, fast = (plan.train_shards(store, store.missing(len(own)), own) for own in (few, shadows))
    assert next(slow) == 0
    assert list(fast) == [0, 1, 2, 3]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard_*")}
    plan.train_shard(store, 2, few, plan.reference())  # it had begun before the other one ended
    assert store.read(shadows).shape == (11, 184)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShadowPlan, "train_shard", lambda *_: pytest.fail("models are trained twice"))
        assert list(slow) == [1, 2]
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "initial_weights is .*; seed is 0 there, 1 now"),
        ({"fixed": random_images(15, 9)}, "fixed_set is"),
        ({"network": ReleasedMLP((1, 5, 5), 4, [7])}, r"network.hidden is \[6\] there, \[7\] now"),
        ({"descent": GradientDescent(steps=10, lr=0.1)}, "descent.lr is 0.2 there, 0.1 now"),
        ({"initialization": "fresh"}, "initialization is 'known' there, 'fresh' now"),
        ({"purpose": "released"}, "purpose is 'shadow' there"),
    ],
)
def test_a_store_of_another_training_is_refused(
    tmp_path: Path, plan: ShadowPlan, shadows: ImageSet, change: dict[str, object], named: str
) -> None:
    complete(tmp_path, plan, shadows, [])
    assert ShadowStore.open(tmp_path, plan.description) is not None
    with pytest.raises(ConfigError, match=f"another training .*{named}"):
        ShadowStore.open(tmp_path, dataclasses.replace(plan, **change).description)  # type: ignore[arg-type]


def test_models_of_other_images_are_refused(tmp_path: Path, plan: ShadowPlan, shadows: ImageSet) -> None:
    store = complete(tmp_path, plan, shadows)
    with pytest.raises(ConfigError, match="models of other images than random 2: the store belongs to another split"):
        store.read(random_images(11, 2))
    relabelled = dataclasses.replace(shadows, labels=(shadows.labels + 1) % 4)
    for refuse in (store.read, store.check):
        with pytest.raises(ConfigError, match="another split"):
            refuse(relabelled)
    store.check(shadows)
    # What is there is held against the images before anything is trained, however little it is.
    (tmp_path / "shard_00000.safetensors").unlink()
    swapped = shadows.subset(torch.tensor([*range(10), 0]))
    with pytest.raises(ConfigError, match="shard_00003.safetensors holds models of other images"):
        store.check(swapped)
    assert len(image_keys(shadows).unique()) == 11


def test_a_shard_of_another_store_is_refused(tmp_path: Path, plan: ShadowPlan, shadows: ImageSet) -> None:
    store = complete(tmp_path / "a", plan, shadows)
    complete(tmp_path / "b", dataclasses.replace(plan, seed=1), shadows)
    shard = "shard_00001.safetensors"
    (tmp_path / "a" / shard).write_bytes((tmp_path / "b" / shard).read_bytes())
    with pytest.raises(ConfigError, match="shard_00001.safetensors belongs to another store"):
        store.missing(11)


def test_damage_is_named(tmp_path: Path, plan: ShadowPlan, shadows: ImageSet) -> None:
    store = complete(tmp_path, plan, shadows)
    shard = tmp_path / "shard_00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(CorruptFileError, match="delete it, and its models are trained again"):
        store.missing(11)
    with pytest.raises(CorruptFileError, match="shard_00001"):
        store.read(shadows)
    header = int.from_bytes(whole[:8], "little") + 8
    nan = torch.full((), torch.nan).numpy().tobytes()
    shard.write_bytes(whole[:header] + nan * ((len(whole) - header) // 4))
    with pytest.raises(CorruptFileError, match="NaN or infinite weights"):
        store.read(shadows)
    shard.unlink()
    with pytest.raises(MissingDataError, match="shard_00001.safetensors does not exist or is incomplete"):
        store.read(shadows)
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="not the description of a store"):
        ShadowStore.open(tmp_path, plan.description)


def test_what_is_not_finite_is_not_kept(tmp_path: Path, plan: ShadowPlan, shadows: ImageSet) -> None:
    store = complete(tmp_path, plan, shadows, [])
    with pytest.raises(ShapeError, match="one finite difference per image"):
        store.write(0, torch.full((11, 4), torch.nan), shadows)
    with pytest.raises(ConfigError, match="shard_size must be at least 1"):
        ShadowStore.create(tmp_path, plan.description, "batched_mlp", 0)
    json.dumps(plan.description)


def test_fresh_models_start_from_weights_of_their_own(plan: ShadowPlan, shadows: ImageSet) -> None:
    fresh = dataclasses.replace(plan, initialization="fresh")
    starts = fresh.starts(range(4))
    assert starts.shape == (4, 184)
    assert torch.equal(fresh.starts(range(2, 4)), starts[2:])
    released = dataclasses.replace(fresh, purpose="released").starts(range(4))
    assert len(torch.cat([starts, released]).unique(dim=0)) == 8

    def spread(differences: Tensor) -> float:
        return float(differences.std(dim=0).norm())

    reference = plan.reference()
    known = spread(plan.train(shadows, range(11), "batched_mlp", reference))
    assert spread(fresh.train(shadows, range(11), "batched_mlp", reference)) > 3 * known  # measured 4.5 times
