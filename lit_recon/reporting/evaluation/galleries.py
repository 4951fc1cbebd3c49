"""What the strongest attack makes of the same images at every strength of a defense."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lit_recon.reporting.evaluation.judgement import Level, levels
from lit_recon.reporting.evaluation.results import Evaluation
from lit_recon.reporting.figures import image_grid
from lit_recon.reporting.record import RunRecord

#: Images side by side.
_IMAGES = 8


def gallery_grids(evaluation: Evaluation) -> dict[str, bytes]:
    """One PNG per defense and batch size, by title: the targets, then a row per strength, from weak to strong.

    None where features are judged: attacks on them need not return images.
    """
    grids: dict[str, bytes] = {}
    if evaluation.figure.of_features:
        return grids
    for size in evaluation.batch_sizes:
        points = [level for level in levels(evaluation, size) if level.strongest is not None]
        records = {id(level): RunRecord.read(level.strongest.folder) for level in points if level.strongest}
        for name, title in evaluation.defenses.items():
            shown = [level for level in points if level.strength is None or level.defense == name]
            if any(level.defense == name for level in shown):
                grids[f"{title}, batch {size}"] = _grid(evaluation, [(level, records[id(level)]) for level in shown])
    return grids


def _grid(evaluation: Evaluation, rows: list[tuple[Level, RunRecord]]) -> bytes:
    shared = set.intersection(*({row.id for row in record.victims} for _, record in rows))
    ids = [row.id for row in rows[0][1].victims if row.id in shared][:_IMAGES]
    images = {"target": _of(rows[0][1], rows[0][1].targets, ids)}
    for level, record in rows:
        attack = evaluation.attack_title(level.strongest) if level.strongest else ""
        strength = "no defense" if level.strength is None else f"{level.strength:g}"
        images[f"{strength}: {level.figure.format(level.value)}, {attack}"] = _of(record, record.reconstructions, ids)
    return image_grid(images, columns=_IMAGES)


def _of(record: RunRecord, images: NDArray[np.float32], ids: list[int]) -> NDArray[np.float32]:
    """The rows of `images` that belong to the victims with these ids."""
    places = {row.id: index for index, row in enumerate(record.victims)}
    return images[[places[identity] for identity in ids]]
