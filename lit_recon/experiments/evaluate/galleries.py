"""Galleries of an evaluation: the same target images beside their reconstructions by every attack on a defense."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_recon.experiments.evaluate.judgement import levels
from lit_recon.experiments.evaluate.results import NO_DEFENSE, CellResult, Evaluation
from lit_recon.experiments.evaluate.tables import reason_of_absence
from lit_recon.reporting.images import ImageBlock, image_table
from lit_recon.reporting.pages import Panel, Picture
from lit_recon.reporting.record import read_victim_images
from lit_recon.reporting.run_folder import RunFolder

#: Target images of a gallery: the first ones of its cells.
IMAGES = 4
#: Pixel values of all galleries together, so that a page stays within a few megabytes: in large grids, large images are
#: averaged down, but to no shorter side than the first of these.
_VALUES = 4_000_000
_SIDES = (32, 96)


class _Targets(NamedTuple):
    """The images that all galleries of a batch size show."""

    ids: list[int]
    images: NDArray[np.float32]


def gallery_panels(evaluation: Evaluation) -> list[Panel]:
    """A picture of every defense at every batch size, or the reasons why it has none; none for metrics of features."""
    if evaluation.metric.of_features:
        return []
    panels = []
    targets = {size: _first_targets(evaluation, size) for size in evaluation.batch_sizes}
    for defense, name in (evaluation.defenses or {NO_DEFENSE: "no defense"}).items():
        for size, shown in targets.items():
            title = f"{name}, batch {size}"
            rows = _rows(evaluation, defense, size, shown)
            own = [block for row in (list(rows.values())[1:] or rows.values()) for block in row]
            if shown is None or all(block.images is None for block in own):
                panels.append(Panel(title, f"No images: {'; '.join(dict.fromkeys(block.text for block in own))}."))
                continue
            columns = _columns(evaluation, size)
            above = {"target images": [ImageBlock(shown.images)] * len(columns)}
            png = image_table([*columns.values()], {**above, **rows}, _largest_side(evaluation))
            description = f"Target images, and their reconstructions by every attack under {title}"
            panels.append(Panel(title, pictures=[Picture(png, description, f"gallery_{_file_name(title)}.png")]))
    return panels


def _largest_side(evaluation: Evaluation) -> int:
    """The shorter side, in pixels, to which larger images are averaged down; known before any cell is run."""
    rows = sum(len(values) + 2 for values in evaluation.strengths.values()) or 2  # targets and no defense are in each
    n = IMAGES * rows * sum(len(_columns(evaluation, size)) for size in evaluation.batch_sizes)
    low, high = _SIDES
    return min(high, max(low, math.isqrt(_VALUES // (3 * n))))


def _columns(evaluation: Evaluation, size: int) -> dict[tuple[str, bool], str]:
    """Titles of the attacks at a batch size, by name and whether they do not know the defense."""
    cells = [cell for cell in evaluation.attacked if cell.batch_size == size]
    return {evaluation.column(cell): evaluation.attack_title(cell) for cell in cells}


def _first_targets(evaluation: Evaluation, size: int) -> _Targets | None:
    """The first target images of the first cell that keeps images, on the grid's network if one does; else None."""
    others = [cell for cell in evaluation.attacked if cell.batch_size == size]
    cells = [*evaluation.compared(size), *others]
    cell = next((cell for cell in cells if not cell.reason and _keeps_images(cell)), None)
    if cell is None:
        return None
    victims, images = read_victim_images(RunFolder(cell.folder))
    return _Targets([row.id for row in victims[:IMAGES]], images.targets[:IMAGES].copy())


def _rows(evaluation: Evaluation, defense: str, size: int, targets: _Targets | None) -> dict[str, list[ImageBlock]]:
    """By title of a strength, from no defense on, a block for every attack."""
    found = {
        (cell.strength, *evaluation.column(cell)): cell
        for cell in evaluation.attacked
        if cell.batch_size == size and (cell.strength is None or cell.defense == defense)
    }
    strongest = {id(level.strongest) for level in levels(evaluation, size)}
    rows = {}
    for strength in (None, *evaluation.strengths.get(defense, ())):
        blocks = []
        for attack, unaware in _columns(evaluation, size):
            cell = found.get((strength, attack, unaware))
            if cell is None:
                blocks.append(ImageBlock(None, reason_of_absence(strength, unaware)))
            else:
                blocks.append(_block(evaluation, cell, targets, ", strongest" * (id(cell) in strongest)))
        rows[evaluation.title(defense, strength)] = blocks
    return rows


def _block(evaluation: Evaluation, cell: CellResult, targets: _Targets | None, mark: str) -> ImageBlock:
    """The reconstructions of a cell and its metric, or the reason why there are none to show."""
    if cell.reason:
        return ImageBlock(None, cell.reason if cell.applicable else "not applicable")
    if targets is None or not _keeps_images(cell):
        return ImageBlock(None, "no images kept")
    victims, images = read_victim_images(RunFolder(cell.folder))
    places = {row.id: place for place, row in enumerate(victims)}
    if not {*targets.ids} <= places.keys():
        return ImageBlock(None, "other target images")
    chosen = [places[identity] for identity in targets.ids]
    if not np.array_equal(images.targets[chosen], targets.images):
        return ImageBlock(None, "other target images")
    metric = evaluation.metric
    text = f"{metric.measure.name} {metric.format(cell.number(metric.key))}{mark}"
    return ImageBlock(images.reconstructions[chosen], text)


def _keeps_images(cell: CellResult) -> bool:
    run = RunFolder(cell.folder)
    return run.victims.is_file() and run.reconstructions.is_file()


def _file_name(title: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in title.lower())
