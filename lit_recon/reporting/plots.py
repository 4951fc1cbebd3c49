"""Images as PNG: one by one at native size for pages, and whole grids for logs.

Pixels are drawn as they are, never smoothed: a page or a grid enlarges them by repetition.
"""

from __future__ import annotations

import base64
import io
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

from lit_recon.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELL = 64  # smallest side of an image in a grid, in pixels of the grid
_GAP = 6
_FONT_SIZE = 14


def png(image: ArrayLike) -> bytes:
    """An image `(c, h, w)` in [0, 1], of one (grey) or three (RGB) channels, as a PNG of `w` by `h` pixels."""
    buffer = io.BytesIO()
    Image.fromarray(_pixels(image)).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def data_uri(image: ArrayLike) -> str:
    """`png` as an address that holds the image itself, for `<img src=...>`."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode('ascii')}"


def image_grid(rows: Mapping[str, ArrayLike], columns: int = 10) -> bytes:
    """A PNG with one labelled row per kind of image and one column per victim; blocks below each other when many.

    Args:
        rows: images `(n, c, h, w)` in [0, 1] by their label, e.g. `target` and `reconstruction`; all of one shape.
        columns: victims side by side at most.

    Raises:
        ShapeError: rows differ in shape, are empty, or images have neither one channel nor three.
    """
    stacks = {label: np.asarray(images) for label, images in rows.items()}
    shapes = {stack.shape for stack in stacks.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 4 or 0 in shape:
        raise ShapeError(f"a grid needs rows of one shape (n, c, h, w); got {[s.shape for s in stacks.values()]}")
    n, _, height, width = shape
    scale = max(1, math.ceil(_CELL / min(height, width)))
    font = ImageFont.load_default(_FONT_SIZE)
    margin = 2 * _GAP + math.ceil(max(font.getlength(label) for label in stacks))
    step_x, step_y = scale * width + _GAP, scale * height + _GAP
    blocks = math.ceil(n / columns)
    block_height = len(stacks) * step_y + _GAP
    canvas = Image.new("RGB", (margin + min(n, columns) * step_x, blocks * block_height + _GAP), "white")
    draw = ImageDraw.Draw(canvas)
    for line, (label, stack) in enumerate(stacks.items()):
        for block in range(blocks):
            top = _GAP + block * block_height + line * step_y
            draw.text((_GAP, top + scale * height // 2), label, fill="black", font=font, anchor="lm")
            for column, image in enumerate(stack[block * columns : (block + 1) * columns]):
                enlarged = _pixels(image).repeat(scale, axis=0).repeat(scale, axis=1)
                canvas.paste(Image.fromarray(enlarged), (margin + column * step_x, top))
    buffer = io.BytesIO()
    canvas.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _pixels(image: ArrayLike) -> NDArray[np.uint8]:
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[0] not in (1, 3):
        raise ShapeError(f"an image to draw must be (1, h, w) or (3, h, w); got {array.shape}")
    pixels = np.rint(array.clip(0, 1) * 255).astype(np.uint8)
    return pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))


#: Colours that stay apart for the colour-blind (Okabe and Ito), and marks for those who print in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b6470", "#8c6d1f")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def new_figure(width: float, height: float) -> Figure:
    """An empty drawing of so many inches."""
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure) -> bytes:
    """The drawing's file: without a date, and with fixed identities."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "lit_recon"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


_BINS = 40
_STYLES = ("-", "--", "-.", ":")


def error_histogram(errors: Mapping[str, Sequence[float]], levels: Mapping[str, float]) -> Figure:
    """Shares of the targets by squared error, and upright lines to compare them with.

    Args:
        errors: of all targets, by the name of the attack or case; one or more of each.
        levels: by name.
    """
    figure = new_figure(6.8, 3.4)
    panel = figure.subplots()
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel("squared error of a target", fontsize=9)
    panel.set_ylabel("share of the targets", fontsize=9)
    top = max([*levels.values(), *(value for own in errors.values() for value in own)]) or 1.0
    for index, (name, own) in enumerate(errors.items()):
        panel.hist(
            own,
            bins=_BINS,
            range=(0, top),
            weights=[1 / len(own)] * len(own),
            alpha=0.8,
            label=name,
            color=COLOURS[index % len(COLOURS)],
            histtype="stepfilled" if index == 0 else "step",
        )
    for index, (name, value) in enumerate(levels.items()):
        panel.axvline(value, label=name, color="#6b7280", linewidth=1.1, linestyle=_STYLES[index % len(_STYLES)])
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


#: Errors below the rounding of a pixel are drawn there: a logarithmic axis has no zero.
_FLOOR = 1e-17


def error_scatter(points: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """A picture (SVG) of `(estimate, error)` pairs by the name of their model, both axes logarithmic."""
    figure = new_figure(5.6, 4.4)
    panel = figure.subplots()
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("error estimate, known to the attacker")
    panel.set_ylabel("largest error of a pixel")
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    everything = [max(value, _FLOOR) for pairs in points.values() for pair in pairs for value in pair]
    for index, (name, pairs) in enumerate(points.items()):
        if pairs:
            estimates, errors = zip(*pairs, strict=True)
            panel.plot(
                estimates,
                [max(error, _FLOOR) for error in errors],
                linestyle="",
                marker=MARKS[index % len(MARKS)],
                color=COLOURS[index % len(COLOURS)],
                markersize=4.5,
                alpha=0.75,
                label=name,
            )
    if everything:
        span = (min(everything), max(everything))
        panel.plot(span, span, color="#6b7280", linewidth=1, linestyle="--", label="error = estimate", zorder=0)
        panel.axhspan(panel.get_ylim()[0], 1 / 255, color="#dcecea", alpha=0.4, zorder=-1, linewidth=0)
        panel.legend(frameon=False, fontsize=8)
    return svg(figure)


#: From this many different values on, losses are drawn as a histogram, else as lines.
_LINES = 5


def loss_histogram(losses: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> bytes:
    """A picture (SVG): `(losses with, losses without)` the image by the title of their panel."""
    figure = new_figure(5.0 * len(losses), 3.4)
    panels = figure.subplots(1, len(losses), squeeze=False)[0]
    for panel, (title, (members, others)) in zip(panels, losses.items(), strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("loss on the image")
        panel.set_yticks([])
        panel.spines[["top", "right", "left"]].set_visible(False)
        edges = np.histogram_bin_edges(np.concatenate([members, others]), bins=40)
        for values, name, colour in ((others, "without the image", COLOURS[1]), (members, "with it", COLOURS[0])):
            if len(set(values)) < _LINES:
                for index, value in enumerate(values):
                    label = f"{name} ({len(values)} model{'s' if len(values) > 1 else ''})"
                    panel.axvline(value, color=colour, linewidth=2, label=label if not index else None)
            else:
                weights = np.full(len(values), 1 / len(values))
                label = f"{name} ({len(values)} models)"
                panel.hist(values, bins=edges, weights=weights, color=colour, alpha=0.55, label=label)
        panel.legend(frameon=False, fontsize=8)
    return svg(figure)


def roc_curves(curves: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], floor: float) -> bytes:
    """A picture (SVG) of ROC curves.

    Args:
        curves: `(false positive rates, true positive rates)` by panel, then by the name of the attack.
        floor: smallest rate that the number of games can show; smaller ones are drawn there.
    """
    figure = new_figure(4.6 * len(curves), 3.8)
    panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    for panel, (title, attacks) in zip(panels, curves.items(), strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlim(floor, 1.1)
        panel.set_ylim(floor, 1.1)
        panel.set_xlabel("false positive rate")
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.plot([floor, 1], [floor, 1], color="#6b7280", linewidth=1, linestyle="--", label="chance")
        for index, (name, (false, true)) in enumerate(attacks.items()):
            shown = [max(rate, floor) for rate in false], [max(rate, floor) for rate in true]
            style = ("-", (0, (5, 2)), (0, (1.5, 1.5)), "-.")[index % 4]
            panel.plot(*shown, color=COLOURS[index], linewidth=1.8, linestyle=style, label=name, clip_on=False)
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    panels[0].set_ylabel("true positive rate")
    return svg(figure)
