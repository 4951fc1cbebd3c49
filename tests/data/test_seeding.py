"""Streams: repeatable, and apart for every seed and purpose."""

from __future__ import annotations

import torch

from lit_recon.data.dataset import seeded_generator


def draw(seed: int, *purpose: int | str) -> tuple[float, ...]:
    return tuple(torch.rand(4, generator=seeded_generator(seed, *purpose)).tolist())


def test_repeats() -> None:
    assert draw(3, "shuffle", 1) == draw(3, "shuffle", 1)


def test_streams_differ() -> None:
    keys = [
        (0, "a"),
        (1, "a"),
        (-1, "a"),
        (0, "b"),
        (0, "a", 0),
        (0, "a", 1),
        (1, "a", 0),
        (0, "a", 0, 0),
        (2**70, "a"),
    ]
    assert len({draw(*key) for key in keys}) == len(keys)


def test_leaves_the_global_stream_alone() -> None:
    before = torch.get_rng_state()
    draw(0, "a")
    assert torch.equal(torch.get_rng_state(), before)
