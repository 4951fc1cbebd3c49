"""Finished victims come back from their files as they went in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lit_recon.errors import CorruptFileError
from lit_recon.modules.attack_state import (
    AttackOutcome,
    FinishedBatch,
    finished_batches,
    group_name,
    load_finished,
    run_identity,
    save_finished,
)
from lit_recon.records import Reconstruction


def batch(index: int) -> FinishedBatch:
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(index))
    curve = {"step": [0.0, 1.0], "loss": [0.5, 0.1 + index]}
    certified = None if index == 1 else torch.tensor([False, True])
    note = ("labels were counted",)
    found = Reconstruction(images, torch.tensor([index, 1]), 0.1 + index, curve, note, certified=certified)
    return FinishedBatch(index, found, [curve, curve], 2.0, 1.5, 10)


def test_round_trip_of_several_groups(tmp_path: Path) -> None:
    save_finished(tmp_path, [batch(0), batch(2)])
    save_finished(tmp_path, [batch(1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "victims_0000-0002.safetensors",
        "victims_0001-0001.safetensors",
    ]
    found = load_finished(tmp_path)
    assert sorted(found) == [0, 1, 2]
    for index, loaded in found.items():
        made = batch(index)
        assert torch.equal(loaded.reconstruction.images, made.reconstruction.images)
        assert torch.equal(loaded.reconstruction.labels, made.reconstruction.labels)
        assert loaded.reconstruction.loss == made.reconstruction.loss
        assert loaded.reconstruction.notes == made.reconstruction.notes
        assert (made.reconstruction.certified is None) == (loaded.reconstruction.certified is None) == (index == 1)
        if loaded.reconstruction.certified is not None:
            assert loaded.reconstruction.certified.tolist() == [False, True]
        blank = replace(made.reconstruction, images=torch.empty(0), labels=torch.empty(0), certified=None)
        assert replace(loaded.reconstruction, images=blank.images, labels=blank.labels, certified=None) == blank
        assert replace(loaded, reconstruction=blank) == replace(made, reconstruction=blank)


def test_a_groups_cost_is_shared_out(tmp_path: Path) -> None:
    results = [batch(3).reconstruction, batch(5).reconstruction]
    parts = finished_batches(
        [3, 5], AttackOutcome(results, [[{}], [{}]], seconds=10.0, timed_seconds=8.0, timed_steps=99), [{}, {}]
    )
    assert [part.index for part in parts] == [3, 5]
    assert [(part.seconds, part.timed_seconds, part.timed_steps) for part in parts] == [(5.0, 4.0, 99)] * 2


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert load_finished(tmp_path) == {}


@pytest.mark.parametrize("kept", [0, 20, -10])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    save_finished(tmp_path, [batch(0)])
    path = tmp_path / f"{group_name([0])}.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptFileError, match="delete it"):
        load_finished(tmp_path)


def test_victims_of_another_model_are_refused(tmp_path: Path) -> None:
    """One whose weights differ by a rounding error, under the same settings, and other images."""
    torch.manual_seed(0)
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    assert run_identity("0123", model, "ab") == run_identity("0123", other, "ab")
    save_finished(tmp_path, [batch(0)], run_identity("0123", model, "ab"))
    assert list(load_finished(tmp_path, run_identity("0123", other, "ab"))) == [0]
    with pytest.raises(CorruptFileError, match="with other settings"):
        load_finished(tmp_path, run_identity("4567", model, "ab"))
    assert other.running_var is not None
    other.running_var[1] += 1e-6
    for identity in (run_identity("0123", other, "ab"), run_identity("0123", model, "cd")):
        with pytest.raises(CorruptFileError, match="another model or other images: a file that the settings name has"):
            load_finished(tmp_path, identity)


def test_victims_of_a_release_that_did_not_name_the_model_are_taken(tmp_path: Path) -> None:
    save_finished(tmp_path, [batch(0)], "0123")
    assert list(load_finished(tmp_path, run_identity("0123", nn.BatchNorm1d(3), "ab"))) == [0]
