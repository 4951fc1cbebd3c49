"""Images as PNG: single ones, in rows, and in a table with captions; small ones enlarged by repetition."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

from lit_recon.errors import ShapeError

_CELL = 64  # smallest side of an image in a grid, in pixels of the grid
_GAP = 6
_FONT_SIZE, _LINE = 14, 18  # height of letters, and of a line of several
_SMALL_SIZE, _SMALL_LINE = 12, 15  # the same for captions
_MUTED = "#5b6470"  # of words in the place of images
_BOX = "#eef0f2"  # behind them
_TABLE = 1180  # largest width of a table, that of a page
_LABEL = 150  # largest width of the labels of its rows
_BLOCK = 140  # smallest width of its columns


def png(image: ArrayLike) -> bytes:
    """An image `(c, h, w)` in [0, 1] as a PNG of `w` by `h` pixels.

    Three channels are RGB; of other numbers the mean over the channels is drawn in grey.
    """
    return _encoded(Image.fromarray(_pixels(image)))


def data_uri(image: ArrayLike | bytes, kind: str = "png") -> str:
    """An image `(c, h, w)`, or the content of an image file of a kind, as a data URI for `<img src=...>`."""
    content = image if isinstance(image, bytes) else png(image)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def image_grid(rows: Mapping[str, ArrayLike], columns: int = 10) -> bytes:
    """A PNG with one row of images `(n, c, h, w)` in [0, 1] per label, wrapped after `columns` columns.

    Images are drawn as by `png`. A ShapeError says that rows differ in shape or are empty.
    """
    stacks = {label: np.asarray(images) for label, images in rows.items()}
    n, _, height, width = _common_shape(stacks.values())
    sizes = _Sizes.of(height, width)
    margin = 2 * _GAP + _text_width(stacks, _FONT_SIZE)
    pitch = min(n, columns) * (sizes.width + _GAP)
    bands = [
        [
            sizes.row(label, [ImageBlock(stack[start : start + columns])], margin, pitch)
            for label, stack in stacks.items()
        ]
        for start in range(0, n, columns)
    ]
    return _stacked(bands)


class ImageBlock(NamedTuple):
    """Images `(n, c, h, w)` in [0, 1] side by side above a caption, or a text in the place of missing ones."""

    images: NDArray[np.float32] | None
    text: str = ""


def image_table(columns: Sequence[str], rows: Mapping[str, Sequence[ImageBlock]], largest: int | None = None) -> bytes:
    """A PNG of a table: titles of its columns, then per label a row with one block of images for every column.

    Columns that do not fit on a page continue below, with all rows. Images whose shorter side has more than `largest`
    pixels are averaged down to it. Raises as `image_grid` does.
    """
    known = [block.images for row in rows.values() for block in row if block.images is not None]
    n, _, height, width = _common_shape(known)
    sizes = _Sizes.of(height, width, largest)
    margin = 3 * _GAP + min(_LABEL, _text_width(rows, _FONT_SIZE))
    pitch = max(_BLOCK, n * (sizes.width + _GAP) - _GAP) + 3 * _GAP
    in_band = max(1, (_TABLE - margin) // pitch)
    bands = []
    for start in range(0, len(columns), in_band):
        end = start + in_band
        titles = _titles(columns[start:end], margin, pitch)
        bands.append([titles, *(sizes.row(label, row[start:end], margin, pitch) for label, row in rows.items())])
    return _stacked(bands)


@dataclass(frozen=True)
class _Sizes:
    """The size of an image as it is drawn, in pixels: `scale` times that to which it is averaged down."""

    height: int
    width: int
    scale: int

    @classmethod
    def of(cls, height: int, width: int, largest: int | None = None) -> _Sizes:
        share = min(1.0, largest / min(height, width)) if largest else 1.0
        height, width = max(1, round(share * height)), max(1, round(share * width))
        scale = max(1, math.ceil(_CELL / min(height, width)))
        return cls(scale * height, scale * width, scale)

    def row(self, label: str, blocks: Sequence[ImageBlock], margin: int, pitch: int) -> Image.Image:
        """A label of `margin` pixels, then blocks of `pitch` pixels each, spaces included."""
        room = pitch - 3 * _GAP
        label = _wrapped(label, _FONT_SIZE, margin - 2 * _GAP)
        captions = [_wrapped(block.text, _SMALL_SIZE, room) if block.images is not None else "" for block in blocks]
        below = max((_SMALL_LINE * len(caption.split("\n")) for caption in captions if caption), default=0)
        height = max(self.height + below, _LINE * (label.count("\n") + 1)) + _GAP
        canvas = Image.new("RGB", (margin + len(blocks) * pitch, height), "white")
        draw = ImageDraw.Draw(canvas)
        _write(draw, (_GAP, max(self.height, _LINE * (label.count("\n") + 1)) // 2), label, _FONT_SIZE, "lm")
        for number, (block, caption) in enumerate(zip(blocks, captions, strict=True)):
            left = margin + number * pitch
            if block.images is None:
                draw.rectangle((left, 0, left + room - 1, self.height - 1), fill=_BOX)
                words = _wrapped(block.text, _SMALL_SIZE, room - 2 * _GAP, self.height // _SMALL_LINE)
                _write(draw, (left + _GAP, self.height // 2), words, _SMALL_SIZE, "lm", _MUTED)
                continue
            for place, image in enumerate(block.images):
                canvas.paste(self._drawn(image), (left + place * (self.width + _GAP), 0))
            _write(draw, (left, self.height + 1), caption, _SMALL_SIZE, "la")
        return canvas

    def _drawn(self, image: ArrayLike) -> Image.Image:
        small = self.width // self.scale, self.height // self.scale
        shown = Image.fromarray(_pixels(image))
        if shown.size != small:
            shown = shown.resize(small, Image.Resampling.BOX)
        return shown.resize((self.width, self.height), Image.Resampling.NEAREST)


def _titles(titles: Sequence[str], margin: int, pitch: int) -> Image.Image:
    """Titles of columns, which end at the same height."""
    shown = [_wrapped(title, _FONT_SIZE, pitch - 3 * _GAP) for title in titles]
    lines = max(title.count("\n") + 1 for title in shown)
    canvas = Image.new("RGB", (margin + len(titles) * pitch, lines * _LINE + 2 * _GAP), "white")
    for number, title in enumerate(shown):
        top = _GAP + _LINE * (lines - title.count("\n") - 1)
        _write(ImageDraw.Draw(canvas), (margin + number * pitch, top), title, _FONT_SIZE, "la")
    return canvas


def _write(
    draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, size: int, anchor: str, colour: str = "black"
) -> None:
    draw.multiline_text(place, text, fill=colour, font=ImageFont.load_default(size), anchor=anchor, spacing=4)


def _text_width(texts: Iterable[str], size: int) -> int:
    font = ImageFont.load_default(size)
    return math.ceil(max(font.getlength(text) for text in texts))


def _wrapped(text: str, size: int, width: int, most: int | None = None) -> str:
    """The text in lines of at most `width` pixels, of which the last of `most` ends in dots where more would come."""
    font, lines = ImageFont.load_default(size), [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(joined) > width:
            lines.append(joined := word)
        while font.getlength(joined) > width and len(joined) > 1:  # a word that is longer than a line
            fits = next(n for n in range(len(joined) - 1, 0, -1) if n == 1 or font.getlength(joined[:n]) <= width)
            lines[-1], joined = joined[:fits], joined[fits:]
            lines.append("")
        lines[-1] = joined
    if most is not None and len(lines) > most:
        last = lines[most - 1]
        while last and font.getlength(f"{last} ...") > width:
            last = last[:-1]
        lines = [*lines[: most - 1], f"{last.rstrip()} ..."]
    return "\n".join(lines)


def _stacked(bands: Sequence[Sequence[Image.Image]]) -> bytes:
    """Rows below each other as a PNG, with a gap before each band of them."""
    width = max(row.width for band in bands for row in band)
    height = sum(row.height for band in bands for row in band) + _GAP * (len(bands) + 1)
    canvas, top = Image.new("RGB", (width, height), "white"), 0
    for band in bands:
        top += _GAP
        for row in band:
            canvas.paste(row, (0, top))
            top += row.height
    return _encoded(canvas)


def _common_shape(stacks: Iterable[NDArray[np.float32]]) -> tuple[int, ...]:
    """The shape `(n, c, h, w)` of all stacks; a ShapeError where they differ, or are none."""
    shapes = [stack.shape for stack in stacks]
    if len({*shapes}) != 1 or len(shapes[0]) != 4 or 0 in shapes[0]:
        raise ShapeError(f"a grid needs rows of one shape (n, c, h, w); got {shapes}")
    return shapes[0]


def _encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _pixels(image: ArrayLike) -> NDArray[np.uint8]:
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[0] == 0:
        raise ShapeError(f"an image to draw must be (c, h, w) with at least one channel; got {array.shape}")
    if array.shape[0] not in (1, 3):
        array = array.mean(axis=0, keepdims=True)
    pixels = np.rint(array.clip(0, 1) * 255).astype(np.uint8)
    return pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
