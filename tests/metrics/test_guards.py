"""Guards, and values at the edge of their range."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_recon.errors import MissingDataError
from lit_recon.metrics import perceptual
from lit_recon.metrics.perceptual import PerceptualDistance, Unavailable


def test_given_weights_are_read_at_once_and_others_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDataError, match="absent"):
        PerceptualDistance(weights=tmp_path / "absent.pth")
    asked: list[object] = []

    def load(*arguments: object) -> Unavailable:
        asked.append(arguments)
        return Unavailable("not here")

    monkeypatch.setattr(perceptual, "load_lpips", load)
    metric = PerceptualDistance(download=False)
    assert asked == []
    assert metric.unavailable() == "not here"
    assert asked == [("alex", None, False)]
