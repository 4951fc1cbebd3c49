"""The short profile: some inputs for every reader, the same in every run."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzzing.harness import Files, Reader, examine, scratch
from tests.fuzzing.readers import READERS


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """PyTorch logs what it cannot read."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS.values(), ids=lambda reader: reader.name.replace(" ", "_"))
def test_every_input_is_read_or_refused(reader: Reader) -> None:
    ends: list[str] = []

    @settings(
        max_examples=reader.short,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        print_blob=False,
    )
    @given(reader.inputs)
    def read(files: Files) -> None:
        with scratch() as folder:
            verdict = examine(reader, files, folder / "input")
        ends.append(verdict.kind)
        assert not verdict.is_fault, f"{verdict.kind}: {verdict.told}"

    read()
    # past the first check: some mutated inputs are still sound, and some are not; no pickle of CIFAR is
    assert "refused" in ends
    assert "valid" in ends or reader.name == "CIFAR10"
