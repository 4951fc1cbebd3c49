"""Readers of the states of searches by retraining, and files of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lit_recon.attacks.released.retraining.anderson import SearchState
from lit_recon.attacks.released.retraining.newton import Rounds
from lit_recon.attacks.released.retraining.state import read_state, write_state
from tests.fuzzing.harness import Files, Reader
from tests.fuzzing.tensor_files import one, pixels, variants, written


def _reader(name: str, what: str, content: bytes, kind: type, check: Callable[[Any, Files], None]) -> Reader:
    """Of files of one kind of state."""
    read = functools.partial(read_state, kind=kind)
    return Reader(name, what, one(variants(content)), lambda folder: read(folder / "file.safetensors"), check, short=60)


@functools.cache
def search_file() -> bytes:
    """The state of a search by retraining."""
    state = SearchState.of(pixels(2, 4), torch.tensor([0, 1]))
    return written(functools.partial(write_state, state=state))


def _check_search(found: Any, files: Files) -> None:
    assert found.images.dim() == 4
    assert found.labels.shape == found.distances.shape == found.searches.shape == found.images.shape[:1]


SEARCH = _reader("SearchState", "states of searches", search_file(), SearchState, _check_search)


@functools.cache
def rounds_file() -> bytes:
    """All trainings of a search by Newton's method."""
    differences = torch.rand(2, 3, 5)
    distances = torch.rand(2, 3, dtype=torch.float64)
    rounds = Rounds(
        pixels(2, 3)[:, None].expand(-1, 3, -1, -1, -1), torch.tensor([0, 1]), differences, differences + 1, distances
    )
    return written(functools.partial(write_state, state=rounds))


def _check_rounds(found: Any, files: Files) -> None:
    assert found.images.dim() == 5
    assert found.distances.shape == found.images.shape[:2] == found.predicted.shape[:2] == found.trained.shape[:2]
    assert found.labels.shape == found.images.shape[:1]


ROUNDS = _reader("Rounds", "trainings of searches by Newton's method", rounds_file(), Rounds, _check_rounds)
