"""Tables of the pages: functions by name, each with the records that it reads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from benchmarks.docs.figures import Content, FigureError, Figures, link
from benchmarks.docs.marks import NOT_MEASURED
from benchmarks.record import ROOT

#: More records than this below a table are not listed one by one.
_FEW = 8

_TABLES: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {}


def table(name: str, *records: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Register the function that makes a table from the newest record of each name; a list for a name with `*`.

    `all` before the name stands for older records too, see `Figures.find`. Without a name the function gets all
    records, as `Figures`, and the page, and says itself what is from which record.
    """

    def register(function: Callable[..., str]) -> Callable[..., str]:
        _TABLES[name] = records, function
        return function

    return register


def oldest_first(records: Sequence[Content]) -> list[Content]:
    """In the order in which they were made: what later ones measured again takes the place of what is there."""
    return sorted(records, key=lambda record: str(record["created"]))


def make(name: str, figures: Figures, page: Path) -> str:
    """The lines of a table and the records that they are from; one sentence where a record is missing."""
    if name not in _TABLES:
        raise FigureError("there is no such table")
    names, function = _TABLES[name]
    if not names:
        return function(figures, page)
    found = [figures.find(record) for record in names]
    if not all(found):
        return NOT_MEASURED
    chosen = [records if "*" in record else records[0] for record, records in zip(names, found, strict=True)]
    used = [record for records in found for record in records]
    pool = " Target images are of the pool `evaluation`." if any(record["pool"] for record in used) else ""
    devices = sorted({device_of(record) for record in used})
    dates = sorted({record["created"][:10] for record in used})
    days = " and ".join(dates) if len(dates) < 3 else f"{dates[0]} to {dates[-1]}"
    source = f"{days}, {' and '.join(devices)}: {_links(used, page)}."
    try:
        lines = function(*chosen)
    except KeyError as error:
        raise FigureError(f"{', '.join(names)}: the record has no {error}") from error
    return lines if NOT_MEASURED in lines else f"{lines}\n\nMeasured on {source}{pool}"


def _links(records: Sequence[Content], page: Path) -> str:
    """Links to the records; of many, how many there are, and what their names begin with."""
    if len(records) <= _FEW:
        return ", ".join(link(record, page) for record in records)
    names = sorted({record["name"] for record in records})
    families = [list(group) for _, group in groupby(names, lambda name: name.partition("_")[0])]
    groups = [os.path.commonprefix(family) for family in families]  # noqa: RUF071  # by characters
    begin = " or ".join(f"`{begins}`" for begins in groups)
    return f"{len(records)} records in `benchmarks/results` whose names begin with {begin}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; empty cells for missing ones at the end of a row. Without rows: that nothing was measured."""
    if not (rows := list(rows)):
        return NOT_MEASURED
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join([*line, *[''] * (len(header) - len(line))])} |" for line in lines)


def row_of(record: Content) -> dict[str, Any]:
    """The one row of a record that `benchmarks.command` made."""
    [row] = record["rows"]
    return dict(row)


def metrics_of(record: Content) -> dict[str, Any]:
    """`metrics.json` of the run behind a record."""
    return dict(row_of(record)["metrics"])


def factor_rows(records: Sequence[Content]) -> list[tuple[Mapping[str, Any], Content]]:
    """Rows of a study of factors that was run in parts, and where each is from.

    The newest record has all settings; of those that it was not run with, the newest result is taken.
    """
    found: dict[tuple[Any, ...], tuple[Mapping[str, Any], Content]] = {}
    for record in oldest_first(records)[::-1]:
        times: Counter[tuple[Any, ...]] = Counter()
        first = not found
        for row in row_of(record)["tables"]["factors"]:
            setting = tuple(row.get(key) for key in ("factor", "line", "value"))
            times[setting] += 1  # once for every seed
            place = (*setting, times[setting])
            if first or (place in found and found[place][0].get("mse") is None and row.get("mse") is not None):
                found[place] = row, record
    return list(found.values())


def device_of(record: Content) -> str:
    """The processor or GPU that did the work; of a command's record that of the run, not of what called it."""
    rows = record["rows"]
    run = rows[0].get("metrics") if len(rows) == 1 else None
    device = str((run or record).get("device", record["device"]))
    # a study's own record names the processor that wrote its page
    on_gpu = "--trainer.accelerator gpu" in record.get("command", "") and device == record["device"]
    return f"{device} with a GPU" if on_gpu else device


def configuration(path: str) -> dict[str, Any]:
    """A file of `configs`."""
    return dict(yaml.safe_load((ROOT / "configs" / path).read_text(encoding="utf-8")))


def select(rows: Iterable[Mapping[str, Any]], **entries: Any) -> list[Mapping[str, Any]]:
    """Rows with these entries."""
    return [row for row in rows if all(row.get(key) == value for key, value in entries.items())]
