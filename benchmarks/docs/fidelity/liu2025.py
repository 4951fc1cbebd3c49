"""Items of Liu, Wang, Chen, Lei: Data Reconstruction Attacks and Defenses: A Systematic Evaluation, 2025."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

from benchmarks.docs import study
from benchmarks.docs.fidelity.items import Found, Item, newest, rows_of
from benchmarks.docs.figures import Content, Figures, shown
from benchmarks.docs.marks import NOT_MEASURED
from benchmarks.docs.tables import configuration, select
from lit_recon.bounds import RATES

Compute = Callable[[Figures], Found | None]

GRID = "liu2025_table4_small"
#: Columns of tables 4 and 5: defense, its strengths, and the defense's name in the records of single images.
COLUMNS = (
    *(("clip", strength, "clip") for strength in (2, 4, 8)),
    *(("dropout", strength, "drop") for strength in (0.3, 0.5, 0.7, 0.9)),
    *(("noise", strength, "noise") for strength in (0.001, 0.01, 0.1)),
    *(("prune", strength, "prune") for strength in (0.3, 0.5, 0.7, 0.9, 0.99)),
)
#: Printed values of table 4 by attack: one line for each of the three batch sizes, in the order of the columns.
TABLE_4 = {
    "liu2025": (
        "0.17 0.17 0.19 0.16 0.16 0.18 0.18 0.17 0.22 0.28 0.16 0.17 0.20 0.26 0.27",
        "0.16 0.16 0.16 0.16 0.16 0.19 0.19 0.19 0.24 0.27 0.16 0.16 0.21 0.27 0.27",
        "0.16 0.16 0.16 0.16 0.17 0.19 0.19 0.19 0.29 0.30 0.15 0.16 0.20 0.29 0.29",
    ),
    "geiping2020": (
        "0.19 0.23 0.25 0.19 0.20 0.20 0.21 0.30 0.32 0.35 0.19 0.20 0.24 0.28 0.27",
        "0.21 0.22 0.23 0.21 0.21 0.21 0.22 0.31 0.31 0.31 0.19 0.18 0.23 0.29 0.28",
        "0.22 0.21 0.21 0.22 0.22 0.22 0.23 0.30 0.31 0.31 0.20 0.21 0.25 0.30 0.30",
    ),
    "fowl2021": (
        "0.23 0.23 0.23 0.28 0.32 0.32 0.30 0.26 0.25 0.27 0.22 0.25 0.32 0.37 0.46",
        "0.18 0.18 0.18 0.27 0.31 0.32 0.31 0.19 0.19 0.22 0.20 0.25 0.32 0.39 0.42",
        "0.16 0.16 0.16 0.29 0.31 0.31 0.31 0.16 0.16 0.25 0.22 0.30 0.30 0.36 0.43",
    ),
    "kariyappa2023": (
        "0.21 0.22 0.23 0.23 0.22 0.22 0.24 0.22 0.23 0.28 0.21 0.23 0.29 0.28 0.32",
        "0.21 0.21 0.20 0.21 0.23 0.22 0.24 0.23 0.23 0.25 0.18 0.21 0.24 0.29 0.31",
        "0.21 0.21 0.22 0.22 0.22 0.23 0.25 0.20 0.22 0.24 0.19 0.22 0.26 0.32 0.33",
    ),
}
#: Printed values of table 5.
TABLE_5 = (
    "0.390 0.481 0.377 0.466 0.363 0.564 0.864 0.445 0.769 1.889 0.585 0.430 0.621 0.763 1.020",
    "0.408 0.353 0.329 0.552 0.316 0.275 0.460 0.527 0.551 1.764 0.253 0.389 0.561 0.505 0.935",
    "0.377 0.201 0.357 0.259 0.178 0.231 0.461 0.365 0.343 1.540 0.256 0.161 0.257 0.344 0.725",
)
_NAMES = {
    "feature_maps": "our exact maps",
    "liu2025": "deep image prior and features",
    "geiping2020": "gradient inversion",
    "fowl2021": "Robbing the Fed",
    "kariyappa2023": "Cocktail Party",
}
#: Table 2 by defense: printed values for batches of 1, 2, 4 and 8, and the defense and its strength in our grid.
TABLE_2 = {
    "no defense": ("0.171, 0.171, 0.174, 0.175", "none", None),
    "pruning, first strength (lost)": ("0.173, 0.171, 0.186, 0.188", "prune", 0.7),
    "pruning, second strength (lost)": ("0.173, 0.218, 0.277, 0.266", "prune", 0.9),
    "pruning, third strength (lost)": ("0.248, 0.443, 0.483, 0.425", "prune", 0.99),
    "clipping, first strength (lost)": ("0.173, 0.169, 0.174, 0.179", "clip", 8),
    "clipping, second strength (lost)": ("0.173, 0.169, 0.175, 0.179", "clip", 4),
    "clipping, third strength (lost)": ("0.173, 0.170, 0.177, 0.179", "clip", 2),
    "noise 0.001": ("0.172, 0.166, 0.190, 0.198", "noise", 0.001),
    "noise 0.01": ("0.174, 0.252, 0.252, 0.499", "noise", 0.01),
    "noise 0.1": ("0.259, 0.850, 0.714, 0.953", "noise", 0.1),
    "3 local steps": ("0.181, 0.186, 0.192, 0.202", "local_steps", 3),
    "5 local steps": ("0.213, 0.210, 0.218, 0.223", "local_steps", 5),
}
#: Two-layer studies, the larger one first.
_STUDIES = ("liu2025_table1", "two_layer_small")
#: Defenses of the paper as the grids title them: figure 3 compares all of them.
_COMPARED = ("clipping", "gradient dropout", "Gaussian noise", "pruning")
#: Columns of table 1: title, name among our orders, and defense in our study.
_TABLE_1 = {
    "no defense": ("none", "none"),
    "local aggregation": ("local_steps", "local_steps"),
    "gradient noise": ("noise", "none"),
    "gradient clipping": ("clipping", "clipping"),
    "DP-SGD": ("dp_sgd", "dp_sgd"),
    "dropout": ("dropout", "dropout"),
    "gradient pruning": ("pruning", "pruning"),
}


def printed(lines: Sequence[str], column: int) -> str:
    """The entries of a column of a table whose lines are texts."""
    return ", ".join(line.split()[column] for line in lines)


def under_grid(defense: str, strength: float) -> Compute:
    """RMSE of every attack behind a defense and the accuracy behind it, from the parts of the grid for two cores."""
    return lambda figures: _under_grid(figures, defense, strength)


def _under_grid(figures: Figures, defense: str, strength: float) -> Found | None:
    records = _parts(figures, "batches", defense, strength)
    rows = select(study._rows(records, "batches"), defense=defense, strength=strength)
    cells = [
        f"{words} {shown(statistics.mean(float(row['value']) for row in own))}"
        for name, words in _NAMES.items()
        if (own := select(rows, attack=name))
    ]
    trainings = select(study._rows(records, "utility"), defense=defense, strength=strength)
    if accuracy := study._spread(trainings, "accuracy", ".1%"):
        cells.append(f"accuracy {accuracy}")
    return Found("; ".join(cells), records) if rows else None


def _parts(figures: Figures, name: str, defense: str, strength: float) -> list[Content]:
    """The records of the grid whose file of this name has rows of a defense at a strength."""
    return [
        record for record in figures.find(f"all {GRID}_**") if rows_of(record, name, defense=defense, strength=strength)
    ]


def _loss(defense: str, strength: float) -> Compute:
    def compute(figures: Figures) -> Found | None:
        records = _parts(figures, "utility", defense, strength)
        rows = select(study._rows(records, "utility"), defense=defense, strength=strength)
        return Found(study._spread(rows, "final_train_loss", ".2f"), records) if rows else None

    return compute


def _single_images(defense: str) -> Compute:
    """Errors of our attack by patches, in the newest measurement of each batch size and BatchNorm mode."""

    def compute(figures: Figures) -> Found | None:
        cells = {
            (row["batch"], row["batch_norm"]): (record, row["rmse"], row["images"])
            for record in sorted(figures.find("all defended_**"), key=lambda record: str(record["created"]))
            for row in select(record["rows"], defense=defense)
        }
        texts = [
            f"batch {batch}, {mode}: median {shown(statistics.median(errors))}, mean {shown(statistics.mean(errors))}, "
            f"{len(errors)} of {images} images"
            for (batch, mode), (_, errors, images) in sorted(cells.items())
            if errors
        ]
        return Found("; ".join(texts), [record for record, *_ in cells.values()]) if texts else None

    return compute


def _features(defense: str, strength: float | None) -> Compute:
    """Feature errors of the paper's method and of the exact one, for all batch sizes."""

    def compute(figures: Figures) -> Found | None:
        record = newest(figures, "liu2025_table2")
        cells = []
        for name, words in {"moments": "moments", "exact": "exact recovery"}.items():
            own = rows_of(record, "evaluation", attack=name, defense=defense, strength=strength) if record else []
            if own:
                errors = {row["batch_size"]: shown(row["feature_error"]) for row in own}
                cells.append(f"{words} {', '.join(errors[batch] for batch in (1, 2, 4, 8))}")
        return Found("; ".join(cells), [record]) if record and cells else None

    return compute


def _cells(name: str, metric: str, **entries: object) -> Compute:
    """A metric of every attack of a grid in the cells with these entries."""

    def compute(figures: Figures) -> Found | None:
        record = newest(figures, name)
        rows = rows_of(record, "evaluation", **entries) if record else []
        known = [f"{row['attack']} {shown(row[metric])}" for row in rows if row.get(metric) is not None]
        return Found("; ".join(known), [record]) if record and known else None

    return compute


def under_bound(defense: str) -> Compute:
    """The bound of a two-layer study behind a defense, and the errors of the paper's method and of the exact one."""

    def compute(figures: Figures) -> Found | None:
        records = [record for name in _STUDIES if (record := newest(figures, name))]
        return next((Found(text, [record]) for record in records if (text := _bounds(record, defense))), None)

    return compute


def _bounds(record: Content, defense: str) -> str:
    base = configuration(f"bounds/{record['name']}.yaml")["base"]
    rows = rows_of(record, "bounds", defense=defense, **base)
    cells = []
    for strength in dict.fromkeys(row.get("strength") for row in rows):
        own = select(rows, strength=strength)
        columns = {"bound_unit_norm": "bound", "error_tensor": "tensor method", "error_exact": "exact attack"}
        values = [
            f"{words} {shown(statistics.fmean(numbers), '.2g')}"
            for column, words in columns.items()
            if (numbers := [float(str(row[column])) for row in own if row.get(column) is not None])
        ]
        cells.append(("" if strength is None else f"at {strength:g}: ") + ", ".join(values))
    return "; ".join(cells)


def best_defenses(text: str) -> str:
    """The defense with the largest error for each limit, and how often it is, from a table of `study.equal_cost`.

    Empty before all defenses of the paper are in it.
    """
    header, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    if not set(_COMPARED) <= set(header):
        return ""
    best = []
    for limit, *cells in rows:
        title, cell = next((pair for pair in zip(header[1:], cells, strict=True) if "**" in pair[1]), ("none", ""))
        share = re.search(r"best in \d+ %", cell)
        best.append(f"{title} at {limit}{f' ({share[0]})' if share else ''}")
    return "; ".join(best)


def _cost(records: str, name: str, side: str = "") -> Compute:
    """The best defense by limit of the cost, against attacks of a side of `study.equal_cost`, by default the last."""

    def compute(figures: Figures) -> Found | None:
        found = figures.find(records)
        text = study.equal_cost(found, name) if found else NOT_MEASURED
        parts = text.split("\n\n")  # the last side is that of any server
        if NOT_MEASURED in text or (side and side not in parts):
            return None
        best = best_defenses(parts[parts.index(side) + 1] if side else parts[-1])
        return Found(best, found) if best else None

    return compute


_ONE_IMAGE = (
    "another attack: images from patches and exact maps; ResNet-18 without a wide layer after one epoch, labels not "
    "given; BatchNorm in the named mode, where the paper knows its statistics"
)
_SMALL = (
    "4 single images instead of 50 in batches; 10,000 images seen once; 200 to 500 iterations instead of 10,000; "
    "labels recovered"
)


def _only(defense: str, strength: float) -> str:
    return f'`configs/evaluate/{GRID}.yaml` with `--only "[{defense}_{strength:g}]"`'


_TABLE_1_ITEMS = tuple(
    Item(
        "table 1",
        f"{title}: error of the tensor method, and lower bound",
        f"orders, lost in our copy; by its theorems {RATES[rate].upper} and {RATES[rate].lower}".replace(
            "|g|", "norm(g)"
        ),
        ours=under_bound(defense),
        setting="random two-layer networks; the paper proves orders and measures none",
        needs="`configs/bounds/two_layer_small.yaml`, minutes, or `configs/bounds/liu2025_table1.yaml`, hours",
    )
    for title, (rate, defense) in _TABLE_1.items()
)
_TABLE_2_ITEMS = tuple(
    Item(
        "table 2",
        f"feature error, {title}; batches of 1, 2, 4, 8",
        values,
        ours=_features(defense, strength),
        setting="48 images; 4,096 random neurons, GELU, one epoch"
        + (f"; at {strength:g}, since the paper's strength is not known" if "lost" in title else ""),
        needs="`configs/evaluate/liu2025_table2.yaml`, two hours on one core",
    )
    for title, (values, defense, strength) in TABLE_2.items()
)
_TABLE_3_ITEMS = tuple(
    Item(
        "table 3",
        f"LPIPS without a defense, batch {batch}",
        values,
        ours=_cells("liu2025_table3", "lpips", batch_size=batch),
        setting="64 images instead of 50, a generator of our own",
        needs="`configs/evaluate/liu2025_table3.yaml`, days on one GPU; LPIPS needs weights that are not bundled; SSIM "
        "of a small size is in [the evaluation](evaluation.md#large-batches-the-papers-table-3)",
    )
    for batch, values in {
        16: "their attack 0.14, Geiping 0.41, Jeon 0.17",
        32: "their attack 0.15, Geiping 0.45, Jeon 0.24",
    }.items()
)
_TABLE_4_ITEMS = tuple(
    Item(
        "table 4",
        f"RMSE behind {defense} {strength:g}, three batch sizes (lost)",
        "; ".join(f"{_NAMES[name]} {printed(lines, column)}" for name, lines in TABLE_4.items()),
        ours=under_grid(defense, strength),
        setting=_SMALL,
        needs=f"{_only(defense, strength)}; in batches `configs/evaluate/liu2025_table4.yaml`, days on one GPU",
    )
    for column, (defense, strength, _) in enumerate(COLUMNS)
)
_SINGLE_ITEMS = tuple(
    Item(
        "table 4, our own attack",
        f"RMSE behind {defense} {strength:g}",
        f"their attack {printed(TABLE_4['liu2025'], column)}",
        ours=_single_images(f"{short} {strength:g}"),
        setting=_ONE_IMAGE,
        needs=f"a record of `python -m benchmarks.defended --kinds {short}`",
    )
    for column, (defense, strength, short) in enumerate(COLUMNS)
)
_TABLE_5_ITEMS = tuple(
    Item(
        "table 5",
        f"final training loss behind {defense} {strength:g}",
        printed(TABLE_5, column),
        ours=_loss(defense, strength),
        setting="two epochs over 10,000 images instead of 200; ± standard deviation of several seeds",
        needs=f"{_only(defense, strength)}; 200 epochs `configs/evaluate/liu2025_table4.yaml`, days on one GPU",
    )
    for column, (defense, strength, _) in enumerate(COLUMNS)
)
_REST = (
    Item(
        "table 6",
        "not mentioned in our copy of the text",
        "not known",
        needs="the paper's appendices G to I, which our copy lacks",
    ),
    *(
        Item(
            f"table {number}",
            "summary of reconstructions (appendix I)",
            "not known: our copy lacks the appendix",
            needs="the appendix",
        )
        for number in (7, 8)
    ),
    Item("figure 1", "reconstruction as an inverse problem, a drawing", "no numbers", is_result=False),
    Item(
        "figure 2",
        "pictures of reconstructions, without and with defenses; ours: "
        "[evaluation.md](evaluation.md#the-papers-setting-on-two-cores)",
        "no numbers",
        is_result=False,
    ),
    Item(
        "figure 3",
        "best defense at equal utility",
        "gradient pruning has the largest RMSE at the same loss",
        ours=_cost(f"all {GRID}_**", GRID),
        setting=f"limits in points of accuracy, attacks of any server and exact maps among them; {_SMALL}",
        needs="all strengths of `configs/evaluate/liu2025_table4_small.yaml`",
    ),
    *(
        Item(
            "figure 3",
            f"the same, {name}",
            "gradient pruning has the largest RMSE at the same loss",
            ours=_cost(f"all {GRID}_**", GRID, side),
            setting=f"limits in points of accuracy; {_SMALL}",
            needs="all strengths of `configs/evaluate/liu2025_table4_small.yaml`",
        )
        for name, side in (
            ("honest servers and exact maps", "Honest servers:"),
            ("honest servers and the paper's kind of attacks", "Honest servers, without exact maps:"),
        )
    ),
    Item(
        "figure 3",
        "the same on 8x8 digits",
        "no such experiment",
        ours=_cost("digits_small", "digits_small"),
        setting="ConvNet, two attacks, single images; limits in points of accuracy",
        needs="`configs/evaluate/digits_small.yaml`, minutes",
        other_data=True,
    ),
)
ITEMS = (
    *_TABLE_1_ITEMS,
    *_TABLE_2_ITEMS,
    *_TABLE_3_ITEMS,
    *_TABLE_4_ITEMS,
    *_SINGLE_ITEMS,
    *_TABLE_5_ITEMS,
    *_REST,
)
