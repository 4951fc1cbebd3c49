"""The classifier that scores reconstructions, and the reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_recon.data import ImageSet
from lit_recon.errors import MissingDataError, ShapeError
from lit_recon.experiments.released_attack.score import classifier_of
from lit_recon.metrics import Unavailable
from lit_recon.models import MLP, Backbone, BackboneCheckpoint, save_backbone
from lit_recon.records import Normalization


def images(side: int = 4, classes: int = 3) -> ImageSet:
    pixels = torch.zeros(3, 1, side, side, dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(3) % classes, [str(label) for label in range(classes)], "black")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = Backbone(MLP((1, 4, 4), hidden=[5]), 3, Normalization((0.5,), (0.5,)))
    save_backbone(tmp_path / "c.safetensors", BackboneCheckpoint(model, ["0", "1", "2"], "0" * 16, 1, 0.9))
    return tmp_path / "c.safetensors"


def test_without_a_file_there_is_a_reason() -> None:
    found = classifier_of(None, images())
    assert isinstance(found, Unavailable)
    assert "train.py backbone" in found.reason


def test_a_file_gives_a_classifier_of_these_images(checkpoint: Path) -> None:
    found = classifier_of(checkpoint, images())
    assert isinstance(found, Backbone)
    assert not found.training
    assert found(images().pixels()).shape == (3, 3)


def test_a_classifier_of_other_images_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ShapeError, match="of 3 classes; black has"):
        classifier_of(checkpoint, images(side=5))
    with pytest.raises(ShapeError, match=r"has \(1, 4, 4\) of 2"):
        classifier_of(checkpoint, images(classes=2))
    with pytest.raises(MissingDataError):
        classifier_of(checkpoint.with_name("none.safetensors"), images())
