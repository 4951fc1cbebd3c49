"""Loaders: what each process gets, in which order, and where a resumed one goes on."""

from __future__ import annotations

from itertools import chain, islice

import pytest
import torch
from torch import Tensor

from lit_recon.data.batches import EvaluationBatches, TrainingBatches, VictimBatches
from lit_recon.data.dataset import ImageSet
from lit_recon.errors import ConfigError

N = 103


def numbered_images(n: int = N) -> ImageSet:
    """Each image is a constant, its own index, so that batches tell what is in them; the label is the index mod 5."""
    images = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 1, 4, 4).contiguous()
    return ImageSet(images, torch.arange(n) % 5, list("abcde"), "numbers")


def members(images: Tensor) -> list[int]:
    return (images[:, 0, 1, 1] * 255).round().int().tolist()


def joined(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def epoch_of(loader: TrainingBatches | EvaluationBatches) -> list[list[int]]:
    return [members(images) for images, _ in loader]


def plain(**settings: int) -> TrainingBatches:
    return TrainingBatches(numbered_images(), batch_size=10, padding=0, flip=False, **settings)


def test_an_epoch_has_every_image_once() -> None:
    batches = epoch_of(plain())
    assert [len(batch) for batch in batches] == [10] * 10 + [3]
    assert sorted(joined(batches)) == list(range(N))
    assert len(plain()) == 11


def test_images_keep_their_labels() -> None:
    for images, labels in plain():
        assert images.dtype == torch.float32
        assert labels.tolist() == [index % 5 for index in members(images)]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    loader = plain()
    first, again = epoch_of(loader), epoch_of(loader)
    loader.sampler.set_epoch(1)
    second = epoch_of(loader)
    assert first == again == epoch_of(plain())
    assert first != second
    assert second != epoch_of(plain(seed=1))


def test_processes_share_an_epoch_equally() -> None:
    shares = [joined(epoch_of(plain(rank=rank, world_size=4))) for rank in range(4)]
    assert [len(share) for share in shares] == [25] * 4
    assert len(set(joined(shares))) == 100


def test_other_images_sit_out_each_epoch() -> None:
    idle = set()
    for epoch in range(6):
        used: set[int] = set()
        for rank in range(4):
            loader = plain(rank=rank, world_size=4)
            loader.sampler.set_epoch(epoch)
            used |= set(loader.sampler.indices().tolist())
        idle.add(frozenset(range(N)) - used)
    assert len(idle) == 6


def augmented(seed: int = 0, rank: int = 0) -> TrainingBatches:
    noise = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = ImageSet(noise, torch.zeros(40, dtype=torch.int64), ["a"], "noise")
    return TrainingBatches(images, batch_size=16, padding=2, seed=seed, rank=rank, world_size=2)


def test_augmentation_differs_by_epoch_seed_and_rank_only() -> None:
    loader = augmented()
    first = next(iter(loader))[0]
    assert torch.equal(next(iter(augmented()))[0], first)
    assert 0 <= first.min() < first.max() <= 1
    loader.sampler.set_epoch(1)
    for other in (loader, augmented(seed=1), augmented(rank=1)):
        assert not torch.equal(next(iter(other))[0], first)


@pytest.mark.parametrize("given", [0, 1, 7, 11])
def test_resumes_with_the_batch_that_was_next(given: int) -> None:
    whole = plain()
    whole.sampler.set_epoch(2)
    expected = epoch_of(whole)

    stopped = plain()
    stopped.sampler.set_epoch(2)
    list(islice(stopped, given))
    resumed = plain()
    resumed.load_state_dict(stopped.state_dict())
    resumed.sampler.set_epoch(2)
    assert epoch_of(resumed) == expected[given:]
    assert epoch_of(resumed) == expected  # only the first pass is cut short


def test_a_state_of_another_epoch_changes_nothing() -> None:
    resumed = plain()
    resumed.load_state_dict({"epoch": 0, "given": 11})
    resumed.sampler.set_epoch(1)
    assert sum(map(len, epoch_of(resumed))) == N


def test_a_run_stopped_between_epochs_misses_nothing() -> None:
    stopped, resumed = plain(), plain()
    epoch_of(stopped)
    for loader in (stopped, resumed):
        loader.sampler.set_epoch(1)
    resumed.load_state_dict(stopped.state_dict())
    assert epoch_of(resumed) == epoch_of(stopped)


@pytest.mark.parametrize(("batch_size", "world_size"), [(10, 1), (10, 2), (17, 3), (1, 2), (500, 7), (52, 2)])
def test_evaluation_covers_all_without_repetition_and_in_step(batch_size: int, world_size: int) -> None:
    loaders = [EvaluationBatches(numbered_images(), batch_size, rank, world_size) for rank in range(world_size)]
    shares = [epoch_of(loader) for loader in loaders]
    assert len({len(share) for share in shares}) == 1
    assert all(batch for share in shares for batch in share)
    assert sorted(index for share in shares for batch in share for index in batch) == list(range(N))
    assert [len(loader) for loader in loaders] == [len(share) for share in shares]


def test_victims_are_shared_without_repetition() -> None:
    batches = [torch.tensor([3, 50]), torch.tensor([7, 8]), torch.tensor([102, 0])]
    shares = [list(VictimBatches(numbered_images(), batches, rank, world_size=2)) for rank in range(2)]
    assert [[batch.index for batch in share] for share in shares] == [[0, 2], [1]]
    for batch in shares[0] + shares[1]:
        assert torch.equal(batch.ids, batches[batch.index])
        assert members(batch.images) == batch.ids.tolist()
        assert batch.labels.tolist() == [index % 5 for index in batch.ids.tolist()]
        assert batch.images.dtype == torch.float32


@pytest.mark.parametrize(
    ("world_size", "together", "kept", "shares"),
    [
        (1, 3, 3, [[0, 1, 2, 3, 4, 5, 6]]),
        (2, 3, 3, [[0, 1, 2, 6], [3, 4, 5]]),
        (3, 3, 3, [[0, 1, 2], [3, 4, 5], [6]]),
        (2, 8, 3, [[0, 1, 2, 6], [3, 4, 5]]),
        (4, 3, 1, [[0, 4], [1, 5], [2, 6], [3]]),
    ],
)
def test_groups_of_victims_do_not_depend_on_processes(
    world_size: int, together: int, kept: int, shares: list[list[int]]
) -> None:
    """Unless there are too few of them: then they are as large as leaves each process one."""
    batches = [torch.tensor([index]) for index in range(7)]
    for rank, share in enumerate(shares):
        loader = VictimBatches(numbered_images(), batches, rank, world_size)
        assert loader.group_by(together) == kept
        assert [batch.index for batch in loader] == loader.positions == share


def test_refuses_processes_without_work() -> None:
    with pytest.raises(ConfigError, match="each of 4 processes needs a training image; got 3"):
        TrainingBatches(numbered_images(3), batch_size=1, world_size=4)
    with pytest.raises(ConfigError, match="each of 4 processes needs a test image; got 3"):
        EvaluationBatches(numbered_images(3), batch_size=1, world_size=4)
    with pytest.raises(ConfigError, match="needs a batch of victims; got 1: start at most 1 processes"):
        VictimBatches(numbered_images(), [torch.tensor([0])], world_size=2)
