"""Distances of the adversary's copies to released models, and what the page says of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_recon.attacks.shadow import GradientDescent
from lit_recon.experiments.membership.page import KINDS, LOSSES, _histograms, grants
from lit_recon.experiments.membership.score import _copy_error, _notes
from lit_recon.privacy.noisy_sgd import PrivateDescent
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder

NOISE = {"dp": PrivateDescent(noise_multiplier=5.0)}
OWN_ORDER = {"batch_size": 16, "order": "unknown"}


@pytest.mark.parametrize(
    ("descent", "begins"),
    [
        ({}, "Training is full-batch gradient descent without further randomness: with known"),
        ({"dp": PrivateDescent(noise_multiplier=0.0)}, "Training is full-batch gradient descent without further"),
        ({"batch_size": 16}, "Training is gradient descent on mini-batches that the adversary knows without further"),
        (OWN_ORDER, "Every training draws mini-batches in an order of its own, which can hide the candidate"),
        (
            NOISE,
            "Every training but the adversary's own two of each game draws noise of its own, which can hide",
        ),
    ],
)
def test_the_note_about_randomness_is_about_this_training(descent: dict[str, Any], begins: str) -> None:
    first = _notes(GradientDescent(**descent), 0.5, 0.1)[0]
    assert first.startswith(begins)
    assert "is at most 0.5 of that of the model trained on the other candidate." in first


@pytest.mark.parametrize(
    ("descent", "differ"),
    [
        ({}, False),
        ({"batch_size": 16, "order": "known"}, False),
        ({"order": "unknown", "batch_size": None}, False),
        ({"dp": {"noise_multiplier": 0.0, "target_epsilon": None}}, False),
        (OWN_ORDER, True),
        ({"dp": {"noise_multiplier": 5.0}}, True),
        ({"dp": {"noise_multiplier": None, "target_epsilon": 8.0}}, True),
    ],
)
def test_the_page_says_that_models_are_equal_where_they_are(
    tmp_path: Path, descent: dict[str, Any], differ: bool
) -> None:
    (tmp_path / LOSSES).write_text(
        "initialization,image,member,loss\n"
        + "".join(f"{kind},0,{member},0.{n}\n" for kind in KINDS for member in (0, 1) for n in (1, 2))
    )
    images = np.zeros((0, 1, 2, 2), dtype=np.float32)
    found = {"epsilon": 0.5} if differ and "dp" in descent else {}
    record = RunRecord(RunFolder(tmp_path), {"descent": descent}, found, [], images, images, images)
    assert ("are equal, so there is only one" in _histograms(record).lead) != differ
    noise = [grant for grant in grants(record) if grant.text.startswith("The noise of the released model's training")]
    assert [grant.known for grant in noise] == [False] * len(found)


def test_candidates_with_equal_models_are_equally_near() -> None:
    """Two equal images in a game leave one model; the other game has a copy at a tenth of the distance."""
    released = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    right, wrong = torch.tensor([[1.0, 2.0], [0.1, 0.0]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]])
    bits = torch.zeros(2, dtype=torch.int64)
    assert _copy_error(released, right, wrong, bits) == 1
    assert abs(_copy_error(released[1:], right[1:], wrong[1:], bits[1:]) - 0.1) < 1e-6
