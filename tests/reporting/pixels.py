"""Where images and words are in a picture, by a search for their pixels."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]


def decoded(content: bytes) -> Pixels:
    """The pixels of a file."""
    return np.asarray(Image.open(io.BytesIO(content)))


def enlarged(image: ArrayLike, scale: int = 1) -> Pixels:
    """An image `(c, h, w)` in [0, 1] as RGB `(h, w, 3)`, every pixel `scale` times in both directions."""
    levels = (np.asarray(image).transpose(1, 2, 0) * 255).round().astype(np.uint8)
    return np.kron(np.broadcast_to(levels, (*levels.shape[:2], 3)), np.ones((scale, scale, 1), np.uint8))


def places(picture: Pixels, part: Pixels) -> list[tuple[int, int]]:
    """The (top, left) corners at which `part` lies in `picture`, pixel by pixel."""
    height, width = part.shape[:2]
    corners = max(0, picture.shape[0] - height + 1), max(0, picture.shape[1] - width + 1)
    tops, lefts = np.indices(corners).reshape(2, -1)
    for y, x in np.random.default_rng(0).integers((height, width), size=(32, 2)):  # leave few to compare in full
        same = (picture[tops + y, lefts + x] == part[y, x]).all(axis=-1)
        tops, lefts = tops[same], lefts[same]
    found = zip(tops.tolist(), lefts.tolist(), strict=True)
    return [(y, x) for y, x in found if np.array_equal(picture[y : y + height, x : x + width], part)]


def place(picture: Pixels, part: Pixels) -> tuple[int, int]:
    """The one corner at which `part` lies in `picture`."""
    (only,) = places(picture, part)
    return only


def written(words: str, size: int = 14, colour: str = "black", background: str = "white") -> Pixels:
    """Words in the font of pictures, without any margin."""
    font = ImageFont.load_default(size)
    canvas = Image.new("RGB", (20 + int(font.getlength(words)), 3 * size), background)
    ImageDraw.Draw(canvas).text((5, size), words, fill=colour, font=font)
    ink = np.argwhere((np.asarray(canvas) != np.asarray(canvas)[0, 0]).any(axis=-1))
    (top, left), (bottom, right) = ink.min(axis=0), ink.max(axis=0)
    return np.asarray(canvas)[top : bottom + 1, left : right + 1]


def in_box(words: str) -> Pixels:
    """Words that stand in the place of missing images."""
    return written(words, 12, "#5b6470", "#eef0f2")
