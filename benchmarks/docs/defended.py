"""Tables of the attack on feature maps behind defenses, and of bounds on all attacks there."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import configuration, markdown, table
from benchmarks.docs.updates import certified

Row = Mapping[str, Any]

#: Records behind noise of single images that are not those of the bound.
_OF_OTHER_IMAGES = ("defended_chain", "defended_laplace")


@table("defended", "all defended_**", "bound_noise", "bound_masks")
def defended(records: list[Content], *bounds: Content) -> str:
    """Errors of all images behind a defense, certified ones, bounds, and the figure of Liu et al. for their attack."""
    rows = []
    # a cell that was measured again counts once
    newest, networks, names = {}, {}, {}
    for record in sorted(records, key=lambda record: str(record["created"])):
        for row in record["rows"]:
            key = (row["defense"], row["batch"], row["batch_norm"])
            newest[key], networks[key], names[key] = row, record["files"].get("checkpoint"), record["name"]
    [(usual, _)] = Counter(networks.values()).most_common(1)
    for key, row in sorted(newest.items()):
        errors = row["rmse"]
        rows.append(
            [
                row["defense"],
                row["batch_norm"],
                str(row["batch"]),
                f"{len(errors)} of {row['images']}",
                shown(statistics.median(errors) if errors else None),
                shown(max(errors, default=None)),
                certified(row),
                _bound(row, bounds, None if names[key] in _OF_OTHER_IMAGES else networks[key]),
                _of_liu(row["defense"]),
                f"{shown(row['seconds']['median'], '.0f')} ({shown(row['seconds']['max'], '.0f')})",
            ]
        )
    header = ["defense", "BatchNorm", "batch", "attacked", "median RMSE", "largest RMSE", "certified, of them wrong"]
    sums = [sum(row[key] for row in newest.values()) for key in ("draws", "images", "certified", "certified_and_wrong")]
    total = "In all {} draws of {} images: {} images are certified, {} of them wrong.".format(*sums)
    lines = markdown(
        [*header, "bound", "Liu et al. 2025, their attack", "processor seconds of a batch, median (most)"], rows
    )
    others = [", ".join(map(str, key)) for key, network in sorted(networks.items()) if network != usual]
    others += [f"`{bound['name']}`" for bound in bounds if bound["files"].get("checkpoint") != usual]
    apart = f" Measured on other networks, trained with the same settings: {'; '.join(others)}." if others else ""
    return f"{lines}\n\n{total}{apart}{_misfits(newest.values())}"


def _bound(row: Row, records: Iterable[Content], network: str | None) -> str:
    """The errors with a prior of single images that the row's defense leaves, least and largest; or nothing.

    Where the row is of the same images and network, also how many times that the errors of the attack are.
    """
    if (row["batch"], row["batch_norm"]) != (1, "eval"):
        return ""
    for record in records:
        names = record["rows"][0]["defenses"]
        if row["defense"] in names:
            number = names.index(row["defense"])
            found = [float(one.get("van_trees", one.get("with_prior"))[number]) for one in record["rows"]]
            text = " to ".join(_extremes(found)) if any(found) else "0"
            # the first images behind noise are those of the bound
            own = row["rmse"][: len(found)]
            same = network is not None and record["files"].get("checkpoint") == network
            if all(found) and len(row["rmse"]) == row["images"] and same:
                ratios = [error / least for error, least in zip(own, found, strict=True)]
                text += f" (errors {shown(statistics.median(ratios), '.2g')} times that, median)"
            return text
    return ""


def _misfits(rows: Iterable[Row]) -> str:
    """How far the updates of the images found behind noise are from the observed ones, in units of the noise."""
    told = []
    for row in rows:
        found = [misfit for misfit in row.get("misfit", []) if misfit is not None]
        if found:
            told.append(f"{row['defense']}: {' to '.join(_extremes(found))}")
    if not told:
        return ""
    return (
        " Behind noise of known scale the update of the images found differs from the observed one, in the tensor "
        "where it does most, by so many standard deviations of the noise (root mean square; 1 at the true images): "
        f"{'; '.join(sorted(told))}."
    )


def _of_liu(name: str) -> str:
    """The figure of table 4 for a defense such as `prune 0.9`; empty where there is none."""
    kind, _, strength = name.partition(" ")
    grid = configuration("evaluate/liu2025_table4.yaml")
    known = {"drop": "dropout"}.get(kind, kind)
    strengths = [f"{value:g}" for value in grid["defenses"].get(known, {}).get("values", [])]
    return str(grid["paper"]["values"]["liu2025"][known][strengths.index(strength)]) if strength in strengths else ""


@table("contrast", "contrast", "all defended_**")
def contrast(record: Content, attacked: list[Content]) -> str:
    """Errors of the attack on single images with the statistics of their batch, beside those of the contrast alone."""
    rows = []
    for row in record["rows"]:
        own = [
            one
            for other in sorted(attacked, key=lambda other: str(other["created"]))
            for one in other["rows"]
            if (one["defense"], one["batch"], one["batch_norm"]) == (row["defense"], 1, "train")
        ]
        pairs = list(zip(own[-1]["rmse"], row["rmse"], strict=True)) if own else []
        apart = [abs(theirs - contrast) for theirs, contrast in pairs]
        rows.append(
            [
                row["defense"],
                shown(statistics.median(theirs for theirs, _ in pairs) if pairs else None),
                shown(statistics.median(row["rmse"])),
                shown(statistics.median(apart) if apart else None),
                shown(max(apart, default=None)),
                str(row["unknown"]),
                shown(row["cosine"], ".6f"),
            ]
        )
    header = ["defense", "RMSE of the attack, median", "RMSE of the contrast alone, median", "difference, median"]
    return markdown([*header, "largest", "directions that no entry tells", "cosine of the image with them"], rows)


@table("bound_noise", "bound_noise")
def bound_noise(record: Content) -> str:
    """The Cramer-Rao errors of images behind noise and DP-SGD, without and with a prior of independent pixels."""
    rows = []
    for i, name in enumerate(record["rows"][0]["defenses"]):
        # a direction of the image without information makes the first infinite
        errors = [[float(row[kind][i]) for row in record["rows"]] for kind in ("cramer_rao", "van_trees")]
        rows.append([name, str(len(record["rows"])), *(cell for kind in errors for cell in _extremes(kind))])
    seconds = statistics.median(row["seconds"] for row in record["rows"])
    rows.append(["seconds an image", "", shown(seconds, ".0f"), "", "", ""])
    header = ["defense", "images", "Cramér-Rao, least", "largest", "with a prior, least", "largest"]
    return markdown(header, rows)


@table("bound_masks", "bound_masks")
def bound_masks(record: Content) -> str:
    """What updates without noise leave undetermined, the most of all images, and the error that the prior leaves."""
    defenses: dict[tuple[str, ...], list[str]] = {}  # by their result, which many have in common
    for i, name in enumerate(record["rows"][0]["defenses"]):
        unknown, left = (max(row[key][i] for row in record["rows"]) for key in ("unknown", "with_prior"))
        entries = "all" if any(row["every_entry"][i] for row in record["rows"]) else "some"
        result = (str(len(record["rows"])), str(unknown), shown(left), entries)
        defenses.setdefault(result, []).append(name)
    rows = [[", ".join(names), *result] for result, names in defenses.items()]
    seconds = statistics.median(row["seconds"] for row in record["rows"])
    rows.append(["seconds an image", "", shown(seconds, ".0f")])
    return markdown(["defenses", "images", "unknown directions, most", "error with a prior, largest", "entries"], rows)


@table("likelihood", "likelihood")
def likelihood(record: Content) -> str:
    """Medians over single images behind noise that patches found, and after steps on the likelihood from there."""
    columns = [(key, when) for key in ("rmse", "misfit", "seconds") for when in ("before", "after")]
    rows = []
    for row in (row for row in record["rows"] if row["before"]):
        medians = [statistics.median(one[key] for one in row[when]) for key, when in columns]
        formats = ["error"] * 4 + [".0f"] * 2
        rows.append([row["defense"], str(len(row["before"])), *map(shown, medians, formats)])
    header = [f"{name}, {when}" for name in ("RMSE", "misfit", "seconds") for when in ("patches", "likelihood")]
    return markdown(["defense", "images", *header], rows)


@table("hidden_span", "hidden_span")
def hidden_span(record: Content) -> str:
    """What noise is expected to hide of the span of the patches, and what it hides: least and most of the layers."""
    rows = []
    for row in record["rows"]:
        shares = [f"{shown(min(row[key]), '.2g')} to {shown(max(row[key]), '.2g')}" for key in ("expected", "actual")]
        rows.append([row["defense"], str(row["images"]), *shares, shown(row["apart"], ".2g")])
    return markdown(["defense", "images", "expected", "actual", "largest difference of a layer"], rows)


def _extremes(values: list[float]) -> list[str]:
    return [shown(value) if math.isfinite(value) else "infinite" for value in (min(values), max(values))]
