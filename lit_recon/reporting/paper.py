"""The paper that a run follows, as its configuration's section `paper` names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Paper:
    """A paper and the figures that it prints.

    Attributes:
        citation: authors, title, venue; empty when the run follows no paper.
        values: printed figures by metric: numbers, or text such as `0.16 to 0.25`.
        note: how the paper's setting differs from this run's, or where the figures stand.
    """

    citation: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    note: str = ""


def paper_of(settings: Mapping[str, object]) -> Paper:
    """The section `paper` of a configuration; an empty one when it is absent."""
    section = settings.get("paper")
    if not isinstance(section, Mapping):
        return Paper()
    values = section.get("values")
    return Paper(
        citation=str(section.get("citation") or ""),
        values={str(key): value for key, value in values.items()} if isinstance(values, Mapping) else {},
        note=str(section.get("note") or ""),
    )
