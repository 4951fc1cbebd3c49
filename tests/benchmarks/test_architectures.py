"""Photographs of the benchmark of other architectures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.architectures import photographs


def test_photographs_are_the_squares_in_the_middle(tmp_path: Path) -> None:
    wide, tall = np.zeros((4, 8, 3), np.uint8), np.zeros((8, 4, 3), np.uint8)
    wide[:, 2:6], tall[2:6] = 255, 100
    for name, pixels in (("b.png", wide), ("a.png", tall)):
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    found = photographs(tmp_path, 2)
    assert found.shape == (2, 3, 2, 2)
    torch.testing.assert_close(found, torch.tensor([100 / 255, 1.0]).view(2, 1, 1, 1).expand(-1, 3, 2, 2))
