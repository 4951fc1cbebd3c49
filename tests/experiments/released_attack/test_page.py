"""What the page says that the adversary knew follows from the settings and facts of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_recon.experiments.released_attack.page import grants, panels
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import VictimRow


def told(descent: dict[str, Any], initialization: object = "known", **facts: Any) -> dict[str, bool]:
    """Every grant, and whether it was known."""
    images = np.zeros((0, 1, 2, 2), dtype=np.float32)
    settings = {"initialization": initialization, "descent": {"order": "known", **descent}}
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


@pytest.mark.parametrize(
    ("initialization", "known", "text"),
    [
        ("known", True, "began from."),
        ("fresh", False, "began from: every model, released or shadow, has its own."),
        ({"images": 70, "steps": 5}, True, "began from: those of a model that was trained on 70 other images before."),
    ],
)
def test_what_training_began_from_is_named(initialization: object, known: bool, text: str) -> None:
    assert told({}, initialization)[f"The initial weights that training {text}"] == known


def test_what_was_seen_of_the_model_is_named() -> None:
    whole = told({"batch_size": None}, seen="its weights")
    assert whole["Of the released model its weights, its architecture, and the optimizer that trained it."]
    assert not any("mini-batch" in text or "several steps" in text for text in whole)
    assert not any("its weights" in text for text in told({}))  # an old record that does not say what was seen
    part = told({}, seen="its logits for 9 images", hidden="Any of its weights.", released_steps="4, 20")
    assert part["Of the released model its logits for 9 images, its architecture, and the optimizer that trained it."]
    assert part["The same after several steps of training: 4, 20."]
    assert part["Any of its weights."] is False


def test_the_models_of_another_training_set_are_named() -> None:
    before = "Another training set, 4 images with their labels, and its shadow models of 7 other images, to which the"
    text = f"{before} attack was fitted first."
    found = told({}, n_shadow=0, n_fixed_before=4, n_shadow_before=7)
    assert found[text]
    assert not found["Shadow models of this training set."]
    assert not any("other images of the same shape" in one for one in found)
    assert text not in told({}, n_shadow=2)


def test_errors_stand_beside_the_distances_of_other_images() -> None:
    images = np.zeros((0, 1, 2, 2), dtype=np.float32)
    levels = {"oracle_mse": 0.01, "oracle_mse_percentile_1": 0.02, "baseline_mean_image_mse": 0.05}
    victims = [VictimRow(i, i, 0, 0, 0.0, {"mse": 0.001 * i}) for i in range(5)]
    whole = RunRecord(RunFolder(Path("nowhere")), {}, levels, victims, images, images, images)
    (panel,) = panels(whole)
    plot = panel.pictures[0].content.decode()
    for words in ("attack", "nearest other image", "nearest 1 %", "mean image", "share of the target images"):
        assert words in plot
    assert "nearest half" not in plot  # this run did not note it
    assert panels(RunRecord(RunFolder(Path("nowhere")), {}, levels, [], images, images, images)) == []
