"""Stores of linear response: measured first, the same after any interruption, exact where they say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from filelock import FileLock, Timeout
from pytorch_lightning import Trainer
from torch import Tensor

from lit_recon.attacks.shadow import (
    ApproximationError,
    GradientDescent,
    LinearPlan,
    LinearResponse,
    Plan,
    ShadowPlan,
    ShadowStore,
    linear_plan,
)
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError
from lit_recon.io.files import LOCK
from lit_recon.models.released import ReleasedMLP
from lit_recon.modules.shadows import models_per_file, train_store
from lit_recon.training.trainer import TrainerSettings, build_trainer
from tests.attacks.shadow.conftest import random_images

SHADOWS = random_images(11, 1)
EXACT = ShadowPlan(ReleasedMLP((1, 5, 5), 4, [6]), random_images(60, 0), GradientDescent(steps=10))
RESPONSE = LinearResponse(rank=26, hessian_images=30, sample=4)


def trainer() -> Trainer:
    return build_trainer(TrainerSettings(accelerator="cpu"), [])


def complete(folder: Path, plan: Plan, images: ImageSet = SHADOWS) -> ShadowStore:
    return train_store(trainer(), plan, images, folder, "batched_mlp", 3)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def exact() -> Tensor:
    return EXACT.train(SHADOWS, range(11), "batched_mlp", EXACT.reference())


def test_linear_shadows_are_near_exact_ones(tmp_path: Path, exact: Tensor) -> None:
    plan = LinearPlan(EXACT, RESPONSE, "linear")
    store = complete(tmp_path, plan)
    found = store.read(SHADOWS)
    errors = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < errors.max() < 0.2  # measured 0.1
    assert store.execution == "batched_mlp"
    measured = plan.measured(tmp_path)
    assert measured.errors == pytest.approx(errors[:4].tolist(), rel=1e-2)
    assert not torch.equal(found[:4], exact[:4])


@pytest.mark.parametrize(
    ("n", "processes", "execution", "size"),
    [(7, 2, "vmap", 250), (999, 1, "batched_mlp", 250), (200, 1, "loop", 10), (6, 4, "loop", 2)],
)
def test_of_a_loop_every_process_has_a_file_and_a_killed_one_loses_ten_models(
    n: int, processes: int, execution: str, size: int
) -> None:
    assert models_per_file(250, n, processes, execution) == size


def test_files_of_models_that_are_trained_one_by_one_are_small(tmp_path: Path) -> None:
    store = train_store(trainer(), EXACT, SHADOWS, tmp_path, "loop", 250)
    assert [len(store.members(shard, 11)) for shard in store.shards(11)] == [10, 1]
    assert len(list(tmp_path.glob("shard_*"))) == 2


@pytest.mark.parametrize(
    ("kind", "tolerance", "sizes"), [("mixed", 1e-3, [10, 1]), ("mixed", 1.0, [10, 1]), ("linear", 1.0, [11])]
)
def test_files_are_small_where_an_approximation_may_give_way_to_models_trained_one_by_one(
    tmp_path: Path, exact: Tensor, kind: Literal["mixed", "linear"], tolerance: float, sizes: list[int]
) -> None:
    plan = LinearPlan(EXACT, dataclasses.replace(RESPONSE, tolerance=tolerance), kind)
    store = train_store(trainer(), plan, SHADOWS, tmp_path / "new", "loop", 250)
    assert [len(store.members(shard, 11)) for shard in store.shards(11)] == sizes
    assert len(list((tmp_path / "new").glob("shard_*"))) == len(sizes)
    found = store.read(SHADOWS)
    assert (found - exact).norm(dim=1).max() < (1e-5 if tolerance < 1 else 0.2) * exact.norm(dim=1).max()
    (tmp_path / "old").mkdir()
    ShadowStore.create(tmp_path / "old", plan.description, "loop", 250)
    assert train_store(trainer(), plan, SHADOWS, tmp_path / "old", "loop", 250).shard_size == 250


def test_mixed_shadows_keep_the_sample(tmp_path: Path, exact: Tensor) -> None:
    linear = complete(tmp_path / "linear", LinearPlan(EXACT, RESPONSE, "linear")).read(SHADOWS)
    mixed = complete(tmp_path / "mixed", LinearPlan(EXACT, RESPONSE, "mixed")).read(SHADOWS)
    torch.testing.assert_close(mixed[:4], exact[:4], rtol=0, atol=1e-6)
    assert torch.equal(mixed[4:], linear[4:])


def test_an_error_beyond_the_tolerance_stops_linear_and_makes_mixed_exact(tmp_path: Path, exact: Tensor) -> None:
    strict = dataclasses.replace(RESPONSE, tolerance=1e-3)
    linear = LinearPlan(EXACT, strict, "linear")
    for _ in range(2):
        with pytest.raises(ConfigError, match="where a median of 0.001 is tolerated: raise linear.rank"):
            complete(tmp_path / "linear", linear)
        assert not list((tmp_path / "linear").glob("shard_*"))
    mixed = complete(tmp_path / "mixed", LinearPlan(EXACT, strict, "mixed")).read(SHADOWS)
    torch.testing.assert_close(mixed, exact, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "mixed"])
def test_a_store_is_the_same_after_any_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    plan = LinearPlan(EXACT, RESPONSE, kind)  # type: ignore[arg-type]
    complete(tmp_path / "whole", plan)
    written: list[int] = []
    write, read, broken = ShadowStore.write, ApproximationError.write, tmp_path / "broken"

    def killed(store: ShadowStore, shard: int, *content: object) -> None:
        if len(written) == 2:
            raise RuntimeError("killed")
        written.append(shard)
        write(store, shard, *content)  # type: ignore[arg-type]

    def killed_before(*_: object) -> None:
        raise RuntimeError("killed")

    # Two models at a time on the way, so that there is something to go on with.
    monkeypatch.setattr(linear_plan, "_TOGETHER_BYTES", 1)
    monkeypatch.setattr(ShadowStore, "write", killed)
    monkeypatch.setattr(ApproximationError, "write", killed_before)
    with pytest.raises(RuntimeError, match="killed"):  # after the sample, before it is measured
        complete(broken, plan)
    assert written == [0, 1]
    written.clear()
    monkeypatch.setattr(ApproximationError, "write", read)
    with pytest.raises(RuntimeError, match="killed"):
        complete(broken, plan)
    assert written == [0, 1]
    assert {path.name for path in broken.glob("shard_*")} == {"shard_00000.safetensors", "shard_00001.safetensors"}
    monkeypatch.setattr(ShadowStore, "write", write)
    complete(broken, plan)
    assert content(broken) == content(tmp_path / "whole")


def test_a_finished_store_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LinearPlan(EXACT, RESPONSE, "linear")
    whole = complete(tmp_path, plan).read(SHADOWS)

    def again(*_: object) -> Iterator[Tensor]:
        raise AssertionError("nothing is missing")

    monkeypatch.setattr(linear_plan, "respond", again)
    assert torch.equal(complete(tmp_path, plan).read(SHADOWS), whole)


def test_a_folder_of_other_models_is_refused_and_left_alone(tmp_path: Path) -> None:
    complete(tmp_path, EXACT)
    there = content(tmp_path)
    with pytest.raises(ConfigError, match="shadows is None there, 'linear' now"):
        complete(tmp_path, LinearPlan(EXACT, RESPONSE, "linear"))
    assert content(tmp_path) == there
    with pytest.raises(ConfigError, match="models of other images"):
        complete(tmp_path, EXACT, random_images(11, 3))


def test_of_two_commands_that_begin_a_store_one_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(plan: ShadowPlan) -> str:
        with pytest.raises(Timeout):  # two locks of one process exclude each other like those of two
            FileLock(tmp_path / LOCK).acquire(timeout=0)
        return "loop"

    monkeypatch.setattr(ShadowPlan, "execution", measured)
    assert train_store(trainer(), EXACT, SHADOWS, tmp_path, "auto", 3).execution == "loop"
    opened, looks = ShadowStore.open, iter([None])
    monkeypatch.setattr(
        ShadowStore, "open", lambda *given: next(looks, opened(*given))
    )  # it was not there a moment ago
    monkeypatch.setattr(ShadowPlan, "execution", lambda plan: pytest.fail("it was measured again"))
    assert train_store(trainer(), EXACT, SHADOWS, tmp_path, "auto", 3).execution == "loop"
