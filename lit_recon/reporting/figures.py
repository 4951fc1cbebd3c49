"""Images as PNG: one by one at native size for pages, and whole grids for logs.

Pixels are drawn as they are, never smoothed: a page or a grid enlarges them by repetition.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

from lit_recon.errors import ShapeError

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
