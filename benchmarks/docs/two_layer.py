"""Tables of bounds and attacks on two-layer networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import configuration, markdown, metrics_of, row_of, select, table

Rows = Sequence[Mapping[str, Any]]

#: Columns of the study, and what they are called here.
_COLUMNS = {
    "bound_unit_norm": "bound, norms known",
    "bound_van_trees": "van Trees",
    "error_exact": "exact attack",
    "error_tensor": "tensor method",
}
#: Exponents of d, m, B and s in the paper's orders of its lower bound and of its attack.
_ORDERS = {"d": (0.5, 0.5), "m": (-0.5, -0.5), "batch": (0.0, 1.0), "noise": (1.0, 0.0)}
_NAMES = {"d": "`d`", "m": "`m`", "batch": "`B`", "noise": "`s`"}


def _means(rows: Rows) -> dict[str, float]:
    """Of every column over the draws that have it."""
    values = {column: [row[column] for row in rows if row.get(column) is not None] for column in _COLUMNS}
    return {column: fmean(own) for column, own in values.items() if own}


@table("two_layer_defenses", "two_layer_small")
def defenses(record: Content) -> str:
    """Means over the draws of the base network, behind every defense."""
    rows: Rows = row_of(record)["tables"]["bounds"]
    settings = configuration("bounds/two_layer_small.yaml")
    base = select(rows, **settings["base"])
    lines = []
    for defense, strength in dict.fromkeys((row["defense"], row.get("strength")) for row in base):
        own = [row for row in base if (row["defense"], row.get("strength")) == (defense, strength)]
        title = settings["defenses"].get(defense, {}).get("title", defense).replace("|", "\\|")
        means = _means(own)
        name = title if strength is None else f"{title} {strength:g}"
        lines.append([name, *(shown(means.get(column), ".2g") for column in _COLUMNS)])
    found = metrics_of(record)
    draws = len({row["draw"] for row in base})
    note = (
        f"Means of {draws} draws. Below its bound beyond chance: {found['n_below_bound']} of {found['n_compared']} "
        "comparisons of an attack with a bound."
    )
    return f"{markdown(['defense', *_COLUMNS.values()], lines)}\n\n{note}"


@table("two_layer_orders", "two_layer_small")
def orders(record: Content) -> str:
    """Exponents of sizes in errors without a defense, beside the paper's."""
    rows: Rows = row_of(record)["tables"]["bounds"]
    settings = configuration("bounds/two_layer_small.yaml")
    lines = []
    for size, values in settings["sweeps"].items():
        others = {key: value for key, value in settings["base"].items() if key != size}
        means = [_means(select(rows, defense="none", **{**others, size: value})) for value in values]
        slopes = [np.polyfit(np.log(values), np.log([mean[column] for mean in means]), 1)[0] for column in _COLUMNS]
        lower, attack = _ORDERS[size]
        lines.append([_NAMES[size], *(shown(float(slope), ".2f") for slope in slopes), f"{lower:g}", f"{attack:g}"])
    return markdown(["exponent of", *_COLUMNS.values(), "paper: lower bound", "paper: tensor method"], lines)
