"""Figures of records: the newest record of a name, a value in it by its path, and the value as text.

An expression is `RECORD: PATH FORMAT`:

    mnist_small: metrics.mse .4f
    maps: rows[batch=4,batch_norm=eval,defense=none].seconds.median .1f
    mean mnist_retraining_*: metrics.certified_rate .1%
    max maps: rows[batch=4].worst_one_minus_cosine error

A path begins at the record or, where that has one row, at the row. Keys may hold dots. Brackets select rows by their
entries (`key=` selects those without the key) or one by its position. `min`, `max`, `mean` or `sum` before the record
takes all values that the path finds, `*` all records of a numbered name. Formats are Python's, and `error`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.record import RESULTS, ROOT

Content = dict[str, Any]

AGGREGATES: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "mean": fmean, "sum": sum}
_EXPRESSION = re.compile(r"(?:(min|max|mean|sum) )?([\w*-]+): *(.+?) +(\S+)")
_STEP = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")


class FigureError(ValueError):
    """An expression that names no figure, or one that may not be cited."""


class Figures:
    """The records of a folder.

    Args:
        folder: of the records.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder

    @cached_property
    def _complete(self) -> dict[str, list[Content]]:
        """Complete records by name, oldest first, each with its file's `path`."""
        found: dict[str, list[Content]] = {}
        for path in self.folder.glob("*.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            if not content["partial"]:
                found.setdefault(content["name"], []).append({**content, "path": path})
        for records in found.values():
            records.sort(key=lambda record: (record["created"], record["path"].stem))
        return found

    def find(self, name: str) -> list[Content]:
        """The newest complete record of a name, or of each name that ends in a number in place of `*`, or in anything
        in place of `**`; after `all` every complete record of these names, the oldest of each first.

        None where nothing was measured. A FigureError says that the images were those that settings are chosen on.
        """
        every, name = name.startswith("all "), name.removeprefix("all ")
        pattern = re.escape(name).replace(r"\*\*", r"[\w-]*").replace(r"\*", r"\d+")
        names = [found for found in sorted(self._complete) if re.fullmatch(pattern, found)]
        records = [one for found in names for one in self._complete[found][0 if every else -1 :]]
        for record in records:
            if record["pool"] not in (None, "evaluation"):
                raise FigureError(f"{record['path'].name} is of the pool {record['pool']}, which no page may cite")
        return records

    def text(self, expression: str) -> str:
        """The value of an expression, as the page has it."""
        match = _EXPRESSION.fullmatch(expression.strip())
        if match is None:
            raise FigureError(f"`{expression.strip()}` is not of the form `RECORD: PATH FORMAT`")
        aggregate, name, path, spec = match.groups()
        records = self.find(name)
        if not records:
            raise FigureError(f"there is no complete record {name}")
        values = [value for record in records for value in _values(_start(record, path), path, expression)]
        try:
            numbers = [float(value) for value in values]
            if aggregate:
                numbers = [AGGREGATES[aggregate](numbers)]
        except (TypeError, ValueError) as error:
            raise FigureError(f"`{expression.strip()}` finds no number: {error}") from error
        if len(numbers) != 1:
            raise FigureError(f"`{expression.strip()}` finds {len(numbers)} values, not one")
        return shown(numbers[0], spec)


def _start(record: Content, path: str) -> Any:
    first = next(_STEP.finditer(path)).group(0)
    rows = record["rows"]
    return rows[0] if first not in record and len(rows) == 1 else record


def _values(start: Any, path: str, expression: str) -> list[Any]:
    """Everything that a path leads to; lists at its end are taken apart."""
    steps = [(key, selector) for selector, key in _STEP.findall(path)]
    found = list(_walk(start, steps))
    if not found:
        raise FigureError(f"`{expression.strip()}`: the record has no {path}")
    return [value for values in found for value in (values if isinstance(values, list) else [values])]


def _walk(node: Any, steps: list[tuple[str, str]]) -> Iterator[Any]:
    if not steps:
        yield node
        return
    key, selector = steps[0]
    if isinstance(node, list):
        if key:  # of all rows
            rest = steps
            chosen = node
        else:
            rest = steps[1:]
            chosen = [node[int(selector)]] if selector.isdigit() else [row for row in node if _fits(row, selector)]
        for row in chosen:
            yield from _walk(row, rest)
    elif isinstance(node, dict):
        names = [name for name, _ in steps]
        for n in range(len(steps), 0, -1):  # keys such as `rmse.none.b1` hold dots themselves
            if all(names[:n]) and (whole := ".".join(names[:n])) in node:
                yield from _walk(node[whole], steps[n:])
                return


def _fits(row: Content, selector: str) -> bool:
    wanted = dict(part.strip().split("=") for part in selector.split(","))
    return all(_text(row.get(key)) == _text(value) for key, value in wanted.items())


def _text(value: object) -> str:
    try:
        return str(float(value))  # type: ignore[arg-type]  # what is no number raises
    except (TypeError, ValueError):
        return "" if value is None else str(value).lower()


def shown(value: Any, spec: str = "error") -> str:
    """A value in a format: Python's, `%` after a space, exponents without zeros; `error` fits the size of the value.

    >>> shown(0.5, ".0%"), shown(3e-15, ".0e"), shown(0.1234), shown(4.4e-8), shown(None)
    ('50 %', '3e-15', '0.123', '4e-8', '–')
    """
    if value is None:
        return "–"
    number = float(value)
    if spec == "error":
        spec = "d" if number == 0 else ".0e" if abs(number) < 1e-3 else ".3f"
    if spec.endswith("d"):
        number = round(number)
    text = format(number, spec)
    return re.sub(r"e([-+])0*(\d)", lambda m: f"e{m[1].replace('+', '')}{m[2]}", text).replace("%", " %")


def link(record: Content, page: Path) -> str:
    """A Markdown link from a page to a record."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    return f"[{record['name']}]({up}benchmarks/results/{record['path'].name})"
