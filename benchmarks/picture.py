"""A picture of target images beside their reconstructions by one or more runs on the same targets.

python -m benchmarks.picture docs/images/demo_photos.png runs/demo_photos runs/demo_photos_matching
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Images = NDArray[np.float32]


def main(given: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders with the same target images")
    parser.add_argument("--titles", nargs="+", help="one for each run; default: the names of the folders")
    parser.add_argument("--columns", type=int, default=8, help="the first so many images")
    arguments = parser.parse_args(given)
    titles = arguments.titles or [run.name for run in arguments.runs]
    if len(titles) != len(arguments.runs):
        parser.error(f"--titles needs one for each of the {len(arguments.runs)} runs; got {len(titles)}")
    rows = rows_of(arguments.runs, titles)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, arguments.columns, arguments.picture)


def rows_of(runs: Sequence[Path], titles: Sequence[str]) -> dict[str, Images]:
    """Images `(n, c, h, w)` by title: targets, each run's reconstructions with their RMSE, nearest public images."""
    found = [load_file(run / "reconstructions.safetensors") for run in runs]
    for run, tensors in zip(runs, found, strict=True):
        if not np.array_equal(tensors["targets"], found[0]["targets"]):
            raise SystemExit(f"{run} must have the targets of {runs[0]}: give runs with the same data and victims")
    rows = {"target": found[0]["targets"]}
    for run, title, tensors in zip(runs, titles, found, strict=True):
        metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
        rows[f"{title}\nRMSE {metrics['rmse']:.2g}"] = tensors["reconstructions"]
    if "nearest_public" in found[0]:
        rows["nearest public image"] = found[0]["nearest_public"]
    return rows


def draw(rows: dict[str, Images], columns: int, path: Path) -> None:
    """A row of images per title, as a PNG file."""
    from matplotlib.figure import Figure

    n = min(columns, len(next(iter(rows.values()))))
    width, height = 1.1 * n + 1.8, 1.15 * len(rows)
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(len(rows), n, squeeze=False)
    for line, (title, images) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, images[:n], strict=True):
            axis.imshow(image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set_axis_off()
        line[0].text(-0.12, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=9)
    figure.subplots_adjust(left=1.75 / width, right=0.99, top=0.99, bottom=0.01, wspace=0.04, hspace=0.06)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
