"""Victims: stratified, each used once, and as many distinct batches as there can be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.data.sources import Digits
from lit_recon.data.splits import in_pool, sample_victims, victim_batches
from lit_recon.errors import ConfigError


def random_labels(n: int, n_classes: int, seed: int) -> Tensor:
    """Labels of very unequal frequency."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(n_classes, generator=generator).square() + 0.01
    return torch.multinomial(weights, n, replacement=True, generator=generator)


def test_pools_halve_the_images_whatever_their_order() -> None:
    images = Digits().load()[0]
    development, evaluation = in_pool(images, "development"), in_pool(images, "evaluation")
    assert sorted([*development.tolist(), *evaluation.tolist()]) == in_pool(images, "all").tolist()
    assert 660 < len(development) < 780  # of 1,438; the standard deviation of the number is 19
    backwards = images.subset(torch.arange(len(images)).flip(0))
    assert torch.equal(len(images) - 1 - in_pool(backwards, "evaluation").flip(0), evaluation)


@pytest.mark.parametrize("n", [1, 9, 10, 50, 57])
def test_classes_differ_by_one_at_most(n: int) -> None:
    labels = torch.arange(10).repeat_interleave(20)
    counts = labels[sample_victims(labels, n, seed=0)].bincount(minlength=10)
    assert counts.sum() == n
    assert counts.max() - counts.min() <= 1


def test_scarce_classes_give_all_they_have() -> None:
    labels = torch.tensor([0] * 2 + [1] * 50 + [2] * 50)
    assert labels[sample_victims(labels, 22, seed=0)].bincount().tolist() == [2, 10, 10]


@pytest.mark.parametrize("seed", range(5))
def test_victims_are_drawn_once(seed: int) -> None:
    labels = random_labels(300, 7, seed)
    assert len(sample_victims(labels, 300, seed).unique()) == 300


def test_a_smaller_sample_is_a_prefix() -> None:
    labels = random_labels(300, 7, seed=0)
    whole = sample_victims(labels, 300, seed=4)
    for n in (1, 6, 50):
        assert torch.equal(sample_victims(labels, n, seed=4), whole[:n])


def test_the_first_victims_are_of_different_classes() -> None:
    labels = torch.arange(10).repeat(20)
    assert all(len(labels[sample_victims(labels, 10, seed)].unique()) == 10 for seed in range(20))


def test_every_image_may_be_drawn_and_in_any_order() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    pairs = {tuple(sample_victims(labels, 2, seed).tolist()) for seed in range(300)}
    assert pairs == {(a, b) for a in range(6) for b in range(6) if labels[a] != labels[b]}


@pytest.mark.parametrize("n", [0, -3, 11])
def test_refuses_an_impossible_number(n: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to 10, the number of images to draw from; got {n}"):
        sample_victims(torch.zeros(10, dtype=torch.int64), n)


def most_batches(counts: list[int], batch_size: int) -> int:
    """The largest m for which all batches can be filled: in m batches a class is found at most m times."""
    return max(m for m in range(sum(counts) + 1) if sum(min(count, m) for count in counts) >= m * batch_size)


@pytest.mark.parametrize("seed", range(25))
def test_distinct_batches_are_distinct_disjoint_and_as_many_as_possible(seed: int) -> None:
    labels = random_labels(200, 8, seed)
    victims = torch.randperm(200, generator=torch.Generator().manual_seed(seed))[:60]
    counts = labels[victims].bincount(minlength=8).tolist()
    for batch_size in range(1, 1 + sum(count > 0 for count in counts)):
        batches = victim_batches(labels, victims, batch_size, distinct_labels=True, seed=seed)
        used = torch.cat(batches).tolist()
        assert all(len(batch) == len(labels[batch].unique()) == batch_size for batch in batches)
        assert len(set(used)) == len(used)
        assert set(used) <= set(victims.tolist())
        assert len(batches) == most_batches(counts, batch_size)


def test_single_victims_need_no_distinction() -> None:
    labels = torch.zeros(9, dtype=torch.int64)
    batches = victim_batches(labels, torch.arange(9), batch_size=1)
    assert torch.cat(batches).sort().values.tolist() == list(range(9))


def test_batches_as_drawn_use_all_but_the_remainder() -> None:
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    batches = victim_batches(labels, torch.arange(7), batch_size=3, distinct_labels=False)
    assert [len(batch) for batch in batches] == [3, 3]
    assert len(torch.cat(batches).unique()) == 6


def test_batches_as_drawn_repeat_labels() -> None:
    labels = torch.arange(10).repeat(5)
    victims = sample_victims(labels, 50)
    batches = victim_batches(labels, victims, batch_size=8, distinct_labels=False)
    assert any(len(labels[batch].unique()) < 8 for batch in batches)


@pytest.mark.parametrize("distinct", [True, False])
def test_seed_decides(distinct: bool) -> None:
    labels = torch.arange(10).repeat(5)
    first, again, other = (torch.cat(victim_batches(labels, torch.arange(50), 4, distinct, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("batch_size", [0, 6])
def test_refuses_a_batch_size_beyond_the_victims(batch_size: int, distinct: bool) -> None:
    with pytest.raises(ConfigError, match=f"batch_size must be 1 to 5, the number of victims; got {batch_size}"):
        victim_batches(torch.arange(10), torch.arange(5), batch_size, distinct)


def test_refuses_more_distinct_labels_than_there_are() -> None:
    labels = torch.arange(3).repeat(10)
    with pytest.raises(
        ConfigError, match=r"batches of 4 distinct labels .* 30 victims have 3: .*distinct_labels to false"
    ):
        victim_batches(labels, torch.arange(30), batch_size=4)
    assert len(victim_batches(labels, torch.arange(30), batch_size=4, distinct_labels=False)) == 7
