"""What the attack makes of the same targets under every value of a factor, and which targets are easy or hard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lit_recon.reporting.factors.results import CellFigures, FactorResult
from lit_recon.reporting.figures import image_grid
from lit_recon.reporting.formats import format_score
from lit_recon.reporting.reading import read_images

#: Targets side by side, and easy or hard ones.
_IMAGES, _EXTREME = 12, 6

_Images = NDArray[np.float32]


def factor_galleries(factor: FactorResult) -> list[bytes]:
    """A PNG per shape of images: targets, then a row per value; the targets again where a value has others."""
    shapes: dict[tuple[int, ...], dict[str, _Images]] = {}
    last: dict[tuple[int, ...], _Images] = {}
    for words, point in factor.points:
        if not point.known:
            continue
        cell = point.known[0]
        images = read_images(cell.folder.reconstructions)
        targets = images.targets[:_IMAGES]
        key = targets.shape
        rows = shapes.setdefault(key, {})
        if key not in last or not np.array_equal(last[key], targets):
            rows["target" if key not in last else f"target, {words}"] = targets
            last[key] = targets
        rows[f"{words}: {format_score('mse', cell.number('mse'))}"] = images.reconstructions[:_IMAGES]
    return [image_grid(rows, columns=_IMAGES) for rows in shapes.values()]


def extremes(cells: Sequence[CellFigures]) -> bytes | None:
    """Targets with the smallest and with the largest errors of the first run that has figures; None without one."""
    cell = next((cell for cell in cells if not cell.reason), None)
    if cell is None:
        return None
    images, order = read_images(cell.folder.reconstructions), np.argsort(cell.errors)
    chosen = np.concatenate([order[:_EXTREME], order[_EXTREME:][-_EXTREME:]])
    rows = {"target": images.targets[chosen], "reconstruction": images.reconstructions[chosen]}
    return image_grid(rows, columns=2 * _EXTREME)
