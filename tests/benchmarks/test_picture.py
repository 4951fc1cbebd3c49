from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from benchmarks.picture import main, rows_of


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


def test_rows_have_the_titles_that_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run(tmp_path / name, 0) for name in ("one", "two")]
    assert [*rows_of(runs, ["no defense", "pruning"])] == ["target", "no defense\nRMSE 0.25", "pruning\nRMSE 0.25"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a.png"), *map(str, runs), "--titles", "no defense"])
    assert "--titles needs one for each of the 2 runs; got 1" in capsys.readouterr().err
    main([str(tmp_path / "a.png"), *map(str, runs), "--titles", "no defense", "pruning"])
    main([str(tmp_path / "b.png"), *map(str, runs)])
    titled, named = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in "ab")
    assert titled.shape == named.shape
    assert (titled != named).any()
