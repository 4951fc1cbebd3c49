"""Items of the papers: what each prints, what the records here say, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.docs.figures import Content, Figures, link
from benchmarks.docs.tables import markdown, row_of, select

#: What stands in the column of ours where no record holds the figure, and where the paper's item holds no result.
MISSING, NO_RESULT = "missing", "no result"
_OTHER_DATA = "*Other data*: "
#: Links to records in one cell.
_LINKS = 2
_EXPRESSION = re.compile(r"\{((?:(?:min|max|mean|sum) )?([\w*-]+):[^}]*)\}")
_RUN = re.compile(r"^python -m benchmarks\.command \S+ ")
_UNIMPORTANT = re.compile(r" --(?:overwrite true|trainer\.threads \d+|name \S+|out \S+)")
_HEADER = ("table or figure", "quantity", "paper", "ours", "setting of ours", "measured", "command")


class Found(NamedTuple):
    """Our value as text, and the records that it is from."""

    text: str
    records: Sequence[Content]


@dataclass(frozen=True)
class Item:
    """One cell, row or plot of a paper.

    Args:
        where: table or figure of the paper.
        quantity: what it shows.
        paper: the printed value.
        ours: a text with expressions of `Figures` in braces, or a function that returns None where no record holds the
            value; None: no measurement exists that could be recorded.
        setting: of our measurement, and in what it differs from the paper's.
        needs: what a missing measurement takes.
        other_data: whether ours is of other data than the paper's.
        is_result: whether the paper's item holds results.
    """

    where: str
    quantity: str
    paper: str
    ours: str | Callable[[Figures], Found | None] | None = None
    setting: str = ""
    needs: str = ""
    other_data: bool = False
    is_result: bool = True

    def find(self, figures: Figures) -> Found | None:
        """Our value, with every record that it is from once; None where it is missing."""
        value = self._read(figures, self.ours) if isinstance(self.ours, str) else self.ours and self.ours(figures)
        if value is None:
            return None
        return Found(value.text, list({str(record["path"]): record for record in value.records}.values()))

    @staticmethod
    def _read(figures: Figures, text: str) -> Found | None:
        found = [figures.find(name) for _, name in _EXPRESSION.findall(text)]
        if not all(found):
            return None
        used = [record for records in found for record in records]
        return Found(_EXPRESSION.sub(lambda match: figures.text(match[1]), text), used)


class Counts(NamedTuple):
    """How many items of a paper are measured, on other data than the paper's, missing, and without a result."""

    measured: int
    other_data: int
    missing: int
    no_result: int


def counts(items: Sequence[Item], figures: Figures) -> Counts:
    """The items of a paper by what is known of them."""
    results = [item for item in items if item.is_result]
    found = [item for item in results if item.find(figures) is not None]
    other = sum(item.other_data for item in found)
    return Counts(len(found) - other, other, len(results) - len(found), len(items) - len(results))


def listed(items: Sequence[Item], figures: Figures, page: Path) -> str:
    """One row for every item."""
    return markdown(_HEADER, [_row(item, figures, page) for item in items])


def _row(item: Item, figures: Figures, page: Path) -> list[str]:
    start = [item.where, item.quantity, item.paper]
    if not item.is_result:
        return [*start, NO_RESULT, item.needs]
    found = item.find(figures)
    if found is None:
        return [*start, MISSING, item.needs]
    setting = _OTHER_DATA + item.setting if item.other_data else item.setting
    return [*start, found.text, setting, _measured(found.records, page), _commands(found.records)]


def _measured(records: Sequence[Content], page: Path) -> str:
    dates = sorted({record["created"][:10] for record in records})
    links = [link(record, page) for record in records[:_LINKS]]
    return f"{' and '.join(dates)}: {', '.join(links)}{_more(len(records) - _LINKS)}"


def _commands(records: Sequence[Content]) -> str:
    """The first command without what names its output, and how many others there are."""
    lines = list(dict.fromkeys(_UNIMPORTANT.sub("", _RUN.sub("python ", record["command"])) for record in records))
    return f"`{lines[0]}`{_more(len(lines) - 1)}"


def _more(number: int) -> str:
    return f" and {number} more" if number > 0 else ""


def newest(figures: Figures, name: str) -> Content | None:
    """The newest record of a name; None where there is none."""
    found = figures.find(name)
    return found[0] if found else None


def table_of(record: Content, name: str) -> list[Mapping[str, object]]:
    """The rows of a CSV file of the run behind a record; none where it has no such file."""
    rows: list[Mapping[str, object]] = row_of(record)["tables"].get(name, [])
    return rows


def rows_of(record: Content, name: str, **entries: object) -> list[Mapping[str, object]]:
    """Rows of such a file with these entries."""
    return select(table_of(record, name), **entries)
