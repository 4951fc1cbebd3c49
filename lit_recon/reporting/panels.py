"""A section of a page that one command adds to it: words, pictures, a table."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One section; whatever is empty is left out.

    Attributes:
        title: of the section.
        lead: what there is to see.
        pictures: `(address, description)` of each image, the address as of `picture`.
        header: of the table.
        rows: of the table, each with as many cells as the header; the first cell names the row.
        note: below the table.
        folded: whether the table is shown only on demand.
    """

    title: str
    lead: str = ""
    pictures: Sequence[tuple[str, str]] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""
    folded: bool = False


def picture(content: bytes, kind: str) -> str:
    """A file as an address that holds it.

    Args:
        content: of the file.
        kind: `png` or `svg`.
    """
    mime = {"png": "png", "svg": "svg+xml"}[kind]
    return f"data:image/{mime};base64,{base64.b64encode(content).decode('ascii')}"
