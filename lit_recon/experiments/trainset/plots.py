"""Plots and galleries of a study of training sets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lit_recon.experiments.trainset.cell import IMAGES
from lit_recon.experiments.trainset.results import DISTANCES, TrainsetGroup, TrainsetStudy, ends
from lit_recon.reporting.images import image_grid
from lit_recon.reporting.plots import COLOURS, MARKS, Plot, Series, draw
from lit_recon.reporting.record import read_arrays

#: Training images in a gallery, and in one of its rows.
_SHOWN, _COLUMNS = 20, 10


def gallery(study: TrainsetStudy, group: TrainsetGroup) -> bytes:
    """Training images of the first seed above their nearest candidates, by SSIM in descending order (PNG)."""
    cell = group.cells[0]
    path = study.folder / study.folders[group.key][0] / IMAGES
    arrays = read_arrays(path)
    order = np.argsort([-row["ssim"] for row in cell["images"]], kind="stable")[:_SHOWN]
    return image_grid({"training": arrays["truths"][order], "found": arrays["matched"][order]}, _COLUMNS)


def quality_plots(study: TrainsetStudy) -> bytes | None:
    """Distance to the released weights against the quality of reconstructions, a point per start and seed (SVG)."""
    plots = []
    for quantity, name in DISTANCES.items():
        series = []
        for index, attack in enumerate(_names(study, "attack")):
            points = [
                (found[1], one["scores"]["best_ssim"])
                for group in study.where(lambda group, attack=attack: group.attack == attack)  # type: ignore[misc]
                for cell in group.cells
                for one in cell["restarts"]
                if (found := ends(one, quantity)) is not None
            ]
            if points:
                xs, ys = zip(*sorted(points), strict=True)
                series.append(Series(attack, xs, ys, "", MARKS[index % len(MARKS)], COLOURS[index % len(COLOURS)]))
        if series:
            scale = _scale([x for one in series for x in one.x])
            plots.append(Plot("", f"{name} at the end", "mean SSIM of the best 10", series=series, x_scale=scale))
    return draw(plots, columns=3, size=(3.8, 3.3)) if plots else None


def landscape_plots(study: TrainsetStudy) -> bytes | None:
    """Distances before and after the attack, and SSIM, over the share of the truth in the start (SVG)."""
    plots = []
    for (attack, start), groups in study.landscape().items():
        shares = [group.share for group in groups]
        for quantity, name in DISTANCES.items():
            both = [group.before_and_after(quantity) for group in groups]
            if not all(before for before, _ in both):
                continue
            series = [
                _band(label, shares, [own[place] for own in both], index)
                for index, (label, place) in enumerate((("at the start", 0), ("after the attack", 1)))
            ]
            scale = _scale([value for own in both for values in own for value in values])
            plots.append(
                Plot(f"{attack}, {start}", "share of the truth in the start", name, series=series, y_scale=scale)
            )
        values = [
            [[cell[key]["ssim"] for cell in group.cells] for group in groups] for key in ("scores_at_start", "scores")
        ]
        series = [
            _band(label, shares, own, index)
            for index, (label, own) in enumerate(zip(("at the start", "after the attack"), values, strict=True))
        ]
        plots.append(Plot(f"{attack}, {start}", "share of the truth in the start", "mean SSIM", series=series))
    return draw(plots, columns=3, size=(3.8, 3.3)) if plots else None


def start_plot(study: TrainsetStudy) -> bytes:
    """Mean SSIM of the best images by start, a series per attack, with the nearest public image (SVG)."""
    plain = study.where(lambda group: group.defense == "none")
    starts = list(dict.fromkeys(_start_name(group) for group in plain))
    series = []
    for index, attack in enumerate(_names(study, "attack")):
        own = [group for group in plain if group.attack == attack]
        means = [group.mean("scores", "best_ssim") for group in own]
        places = [float(starts.index(_start_name(group))) for group in own]
        look = "", MARKS[index % len(MARKS)], COLOURS[index % len(COLOURS)]
        bars = [one.half or 0.0 for one in means]
        series.append(Series(attack, places, [one.value for one in means], *look, errors=bars))
    levels = {
        name: plain[0].mean("baselines", name, "best_ssim").value for name in ("mean image", "nearest public image")
    }
    ticks = {name: float(index) for index, name in enumerate(starts)}
    return draw([Plot("", "start", "mean SSIM of the best 10", series=series, levels=levels, x_ticks=ticks)])


def _start_name(group: TrainsetGroup) -> str:
    return f"{group.start} {group.share:g}"


def _band(label: str, shares: Sequence[float], values: Sequence[Sequence[float]], index: int) -> Series:
    """Means over seeds, with bars from the least to the largest value."""
    means = [math.fsum(own) / len(own) for own in values]
    below = [mean - min(own) for mean, own in zip(means, values, strict=True)]
    above = [max(own) - mean for mean, own in zip(means, values, strict=True)]
    return Series(label, shares, means, "-", MARKS[index], COLOURS[index], errors=(below, above))


def _names(study: TrainsetStudy, attribute: str) -> list[str]:
    return list(dict.fromkeys(getattr(group, attribute) for group in study.groups))


def _scale(values: Sequence[float]) -> str:
    """Logarithmic for positive values of several orders of magnitude."""
    return "log" if min(values) > 0 and max(values) > 10 * min(values) else "linear"
