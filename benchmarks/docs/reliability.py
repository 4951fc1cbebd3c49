"""Tables of faults that commands were put under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.docs.figures import Content
from benchmarks.docs.tables import markdown, table

_Rows = Sequence[Mapping[str, Any]]


def _counts(rows: _Rows) -> list[str]:
    survived = [row for row in rows if not row["lost"]]
    identical = [row for row in survived if not row["different"]]
    injections = sum(len(row["injections"]) for row in rows)
    return [str(injections), f"{len(survived)} of {len(rows)}", f"{len(identical)} of {len(rows)}"]


def _grouped(record: Content, *keys: str) -> dict[tuple[str, ...], _Rows]:
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault(tuple(str(row[key]) for key in keys), []).append(row)
    return dict(found)


@table("faults", "faults")
def faults(record: Content) -> str:
    """One row per fault, and the sum of all kills."""
    groups = _grouped(record, "fault")
    kills = [row for (fault,), rows in groups.items() if fault.startswith("killed") for row in rows]
    shown = [("**all kills**", kills), *((fault, rows) for (fault,), rows in groups.items())]
    rows = [[fault, str(len({row["command"] for row in own})), *_counts(own)] for fault, own in shown]
    return markdown(["fault", "commands", "injections", "runs that survived", "result identical"], rows)


@table("faults_by_command", "faults")
def faults_by_command(record: Content) -> str:
    groups = _grouped(record, "fault", "command")
    rows = [[fault, command, *_counts(own)] for (fault, command), own in groups.items()]
    return markdown(["fault", "command", "injections", "runs that survived", "result identical"], rows)
