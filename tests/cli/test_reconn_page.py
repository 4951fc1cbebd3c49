"""What the page says that the adversary knew follows from the settings and facts of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_recon.cli.reconn_page import grants
from lit_recon.reporting import RunFolder, RunRecord


def told(descent: dict[str, Any], **facts: Any) -> dict[str, bool]:
    """Every grant, and whether it was known."""
    images = np.zeros((0, 1, 2, 2), dtype=np.float32)
    settings = {"initialization": "known", "descent": {"order": "known", **descent}}
    record = RunRecord(RunFolder(Path("nowhere")), settings, {"n_fixed": 3, **facts}, [], images, images, images)
    return {grant.text: grant.known for grant in grants(record)}


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("known", "Which images each mini-batch of 32 held."),
        (
            "unknown",
            "Which images each mini-batch of 32 held: every model, released or the adversary's, draws its own.",
        ),
    ],
)
def test_the_order_of_batches_was_known_or_not(order: str, text: str) -> None:
    found = told({"batch_size": 32, "order": order})
    assert found[text] == (order == "known")


def test_what_was_seen_of_the_model_is_named() -> None:
    whole = told({"batch_size": None})
    assert whole["Of the released model its weights, its architecture, and the optimizer that trained it."]
    assert not any("mini-batch" in text or "several steps" in text for text in whole)
    part = told({}, seen="its logits for 9 images", hidden="Any of its weights.", released_steps="4, 20")
    assert part["Of the released model its logits for 9 images, its architecture, and the optimizer that trained it."]
    assert part["The same after several steps of training: 4, 20."]
    assert part["Any of its weights."] is False
