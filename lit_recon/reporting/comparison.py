"""Several finished runs side by side: their metrics, the settings in which they differ, the images they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lit_recon.measures import Measure
from lit_recon.reporting.images import data_uri
from lit_recon.reporting.provenance import flatten, is_below, paper_of
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import IGNORED_SETTINGS
from lit_recon.reporting.tables import SummaryRow, class_name, is_small, summary_table
from lit_recon.reporting.wording import ABSENT, MISSING, closer_than_public, duration, format_score, verdict

_FIRST = 8  # images of each run on a page whose runs share none


class SharedImage(NamedTuple):
    """A target image that every run attacked, and its reconstructions: `(image, RMSE)` in the order of the runs."""

    title: str
    target: str
    reconstructions: list[tuple[str, str]]


class ImageGroup(NamedTuple):
    """Runs that attacked the same images, by name, and these images; of a run on its own, its first images."""

    runs: list[str]
    images: list[SharedImage]


@dataclass(frozen=True)
class RunLine:
    """One run in the table; `cells` follow the measures of the comparison, None where a run lacks one."""

    name: str
    verdict: str
    n: int
    closer: str
    cells: list[SummaryRow | None]
    duration: str


@dataclass(frozen=True)
class Comparison:
    """The content of a page that compares runs."""

    conclusion: str  # which run comes closest, a sentence for each set of images; empty without any RMSE
    measures: list[Measure]  # columns of the table
    runs: list[RunLine]
    footnotes: list[str]  # papers of the runs and reasons of missing values, each once
    alike: bool  # whether all runs are of one command, so that their settings can be compared
    settings: list[tuple[str, list[str]]]  # `(key, value in each run)` of those that differ
    shared: list[SharedImage]  # images that all runs attacked
    groups: list[ImageGroup]  # where there are none, the runs that share images
    pixelated: bool  # whether images are so small that a page has to enlarge them


def compare(records: Sequence[RunRecord]) -> Comparison:
    """The comparison of several runs, in their order."""
    tables = [{row.measure: row for row in summary_table(record)} for record in records]
    measures = list(dict.fromkeys(measure for table in tables for measure in table))
    runs = [
        _line(name, record, [table.get(measure) for measure in measures])
        for name, record, table in zip(_short_names(records), records, tables, strict=True)
    ]
    alike = len({record.folder.kind for record in records if record.folder.kind}) <= 1
    shared = _shared_images(records)
    return Comparison(
        conclusion=_conclusion(records, [run.name for run in runs]),
        measures=measures,
        runs=runs,
        footnotes=_footnotes(runs, [paper_of(record.settings).citation for record in records]),
        alike=alike,
        settings=_differing_settings(records) if alike else [],
        shared=shared,
        groups=[] if shared else _groups(records, [run.name for run in runs]),
        pixelated=all(map(is_small, records)),
    )


def _conclusion(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """One sentence for every set of images that was attacked: the run with the lowest mean RMSE, then the others."""
    scored = [(rmse, *run) for run in zip(names, records, strict=True) if (rmse := run[1].number("rmse")) is not None]

    def same_images(group: Sequence[RunRecord], record: RunRecord) -> bool:
        same_ids = [row.id for row in group[0].victims] == [row.id for row in record.victims]
        return same_ids and np.array_equal(group[0].targets, record.targets)

    groups = _grouped([record for *_, record in scored], same_images)
    return " ".join(_about_group(sorted((scored[i] for i in group), key=lambda run: run[0])) for group in groups)


def _grouped(
    records: Sequence[RunRecord], belongs: Callable[[Sequence[RunRecord], RunRecord], bool]
) -> list[list[int]]:
    """Indices of the records in groups, each in the first one that it belongs to."""
    groups: list[list[int]] = []
    for index, record in enumerate(records):
        for group in groups:
            if belongs([records[i] for i in group], record):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _about_group(runs: Sequence[tuple[float, str, RunRecord]]) -> str:
    """A sentence about runs that attacked the same images, the one with the lowest mean RMSE first."""
    (rmse, name, best), others = runs[0], runs[1:]
    public = best.number("baseline_nearest_public_rmse")
    error = f"mean RMSE {format_score('rmse', rmse)}"
    if public is not None:
        error += f", nearest public image {format_score('rmse', public)}"
    parts = [f"{name} reaches a {error}"]
    if closer := _closer(best):
        closer = closer if closer[0] != "0" else f"none{closer[1:]}"
        parts = [
            f"With {name}, {closer} reconstructions are closer to the truth than the nearest public image ({error})"
        ]
    if others:
        rest = ", ".join(f"{other} reaches {format_score('rmse', value)}" for value, other, _ in others)
        parts.append(f"on the same images, {rest}")
    return "; ".join(parts) + "."


def _closer(record: RunRecord) -> str:
    """How many reconstructions beat the nearest public image, such as `3 of 4`; empty where none is known."""
    judged = [closer for closer in closer_than_public(record) if closer is not None]
    return f"{sum(judged)} of {len(judged)}" if judged else ""


def _line(name: str, record: RunRecord, cells: list[SummaryRow | None]) -> RunLine:
    seconds = record.number("seconds")
    return RunLine(
        name=name,
        verdict=verdict(record),
        n=len(record.victims),
        closer=_closer(record) or MISSING,
        cells=cells,
        duration=MISSING if seconds is None else duration(seconds),
    )


def _footnotes(runs: Sequence[RunLine], citations: Sequence[str]) -> list[str]:
    said: dict[str, list[str]] = {}
    for run, citation in zip(runs, citations, strict=True):
        if citation:
            said.setdefault(f"after {citation}", []).append(run.name)
        for cell in run.cells:
            if cell is not None and cell.ours == MISSING:
                said.setdefault(cell.reasons[0], []).append(run.name)
    return [f"{', '.join(names)}: {text}" for text, names in said.items()]


def _short_names(records: Sequence[RunRecord]) -> list[str]:
    """The shortest ends of the folders' paths that differ from each other."""
    paths = [record.folder.path.resolve().parts for record in records]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _differing_settings(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    flat = [flatten(record.settings) for record in records]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    values = {key: [ABSENT if key not in settings else str(settings[key]) for settings in flat] for key in keys}
    skipped = (*IGNORED_SETTINGS, "name", "paper")
    return [(key, row) for key, row in values.items() if len(set(row)) > 1 and not is_below(key, skipped)]


def _shared_images(records: Sequence[RunRecord]) -> list[SharedImage]:
    places = [{row.id: index for index, row in enumerate(record.victims)} for record in records]
    shared = []
    for identity, index in places[0].items():
        target = records[0].targets[index]
        # The same number may mean another image where runs used other data.
        found = [(record, place[identity]) for record, place in zip(records, places, strict=True) if identity in place]
        if len(found) == len(records) and all(np.array_equal(record.targets[i], target) for record, i in found):
            shared.append(_image(found))
    return shared


def _groups(records: Sequence[RunRecord], names: Sequence[str]) -> list[ImageGroup]:
    """Every run in the first group with which it shares images."""
    groups = _grouped(records, lambda group, record: bool(_shared_images([*group, record])))
    return [ImageGroup([names[i] for i in own], _shared_images([records[i] for i in own])[:_FIRST]) for own in groups]


def _image(found: Sequence[tuple[RunRecord, int]]) -> SharedImage:
    """A target image and its reconstructions; `found` holds the runs with the image's place in each."""
    first, index = found[0]
    victim = first.victims[index]
    made = [(record.reconstructions[i], record.victims[i].scores.get("rmse")) for record, i in found]
    return SharedImage(
        f"#{victim.id} · {class_name(first, victim.label)}",
        data_uri(first.targets[index]),
        [(data_uri(image), format_score("rmse", rmse)) for image, rmse in made],
    )
