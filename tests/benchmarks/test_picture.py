from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from benchmarks.picture import main


def run(folder: Path, seed: int) -> Path:
    """A run folder with three targets."""
    folder.mkdir()
    images = np.random.default_rng(seed).random((3, 3, 4, 4), dtype=np.float32)
    save_file({"targets": images, "reconstructions": 1 - images}, folder / "reconstructions.safetensors")
    (folder / "metrics.json").write_text(json.dumps({"rmse": 0.25}))
    return folder


def test_targets_and_reconstructions_are_drawn(tmp_path: Path) -> None:
    main([str(tmp_path / "out" / "a.png"), str(run(tmp_path / "one", 0)), str(run(tmp_path / "two", 0))])
    drawn = np.asarray(Image.open(tmp_path / "out" / "a.png").convert("RGB")) / 255
    assert drawn.shape[0] > 300  # three rows
    assert drawn[:, drawn.shape[1] // 2 :].std() > 0.1


def test_other_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="two must have the targets of"):
        main([str(tmp_path / "a.png"), str(run(tmp_path / "one", 0)), str(run(tmp_path / "two", 1))])
