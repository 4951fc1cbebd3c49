"""Tables of grids of defenses and attacks, `attack.py evaluate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import configuration, markdown, oldest_first, row_of, select, table

Row = Mapping[str, Any]


def _strength(row: Row) -> tuple[str, Any]:
    return row["defense"], row.get("strength")


def title_of(grid: Row, defense: str, strength: Any) -> str:
    if defense == "none":
        return "no defense"
    return f"{grid['defenses'].get(defense, {}).get('title', defense)} {strength:g}"


def _cells(record: Content) -> list[Row]:
    return list(row_of(record)["tables"]["evaluation"])


def _cost(row: Row, cells: Iterable[Row]) -> float:
    """Points of accuracy that the defense costs."""
    undefended = next(cell["accuracy"] for cell in cells if cell["defense"] == "none")
    return float(100 * (undefended - row["accuracy"]))


def _cell(rows: list[Row]) -> str:
    """An attack's RMSE: bold for the strongest, italics for the strongest with an honest server."""
    if not rows or rows[0].get("rmse") is None:
        return "–"
    [row] = rows
    marker = "**" if row.get("strongest") == "true" else "*" if row.get("strongest_honest") == "true" else ""
    return f"{marker}{shown(row['rmse'])}{marker}"


def _grid(record: Content) -> str:
    """Every batch size of a grid: attacks by defense and strength; accuracy and cost where networks were trained."""
    cells, grid = _cells(record), configuration(f"evaluate/{record['name']}.yaml")
    attacks = [name for name in grid["attacks"] if select(cells, attack=name)]
    header = ["defense", *(grid["attacks"][name]["title"] for name in attacks)]
    header += ["accuracy", "cost in points"] if grid["utility"] else []
    parts = []
    for batch in sorted({cell["batch_size"] for cell in cells}):
        chosen = select(cells, batch_size=batch)
        rows = []
        for defense, strength in dict.fromkeys(map(_strength, chosen)):
            same = [row for row in chosen if _strength(row) == (defense, strength)]
            found = [_cell([row for row in same if row["attack"] == name]) for name in attacks]
            if grid["utility"]:
                cost = "" if defense == "none" else shown(_cost(same[0], cells), "+.1f")
                found += [shown(same[0]["accuracy"], ".1%"), cost]
            rows.append([title_of(grid, defense, strength), *found])
        base = next(row for row in chosen if row.get("nearest_public_rmse") is not None)
        nearest, mean = (shown(base[f"{name}_rmse"]) for name in ("nearest_public", "mean_image"))
        distinct = batch > 1 and grid.get("victims", {}).get("distinct_labels", True)
        images = f"RMSE over {base['n']:g} images{', distinct labels in a batch' if distinct else ''}"
        start = f"Batch {batch}. {images}; the nearest public image has {nearest}, the mean image {mean}:"
        parts.append(f"{start}\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


table("digits_small", "digits_small")(_grid)
table("digits_attackers", "digits_attackers")(_grid)
table("digits_mlp", "digits_mlp")(_grid)
table("nvflare_digits", "nvflare_digits")(_grid)
table("liu2025_aggregation_small", "liu2025_aggregation_small")(_grid)


@table("kariyappa2023_conv", "kariyappa2023_conv")
def feature_inversion(record: Content) -> str:
    """Features and images by attack, of one batch size without a defense."""
    rows = select(_cells(record), defense="none")
    attacks = configuration("evaluate/kariyappa2023_conv.yaml")["attacks"]
    specs = {"feature_cosine": ".3f", "rmse": ".3f", "ssim": ".3f", "seconds": ".0f"}
    lines = [
        [attacks[row["attack"]]["title"], *(shown(row.get(key), spec) for key, spec in specs.items())] for row in rows
    ]
    baselines = {"nearest public image": "nearest_public_rmse", "mean image": "mean_image_rmse"}
    lines += [[title, "", shown(rows[0][key], ".3f")] for title, key in baselines.items()]
    sizes = f"{rows[0]['n']:.0f} images in {rows[0]['n_batches']:.0f} batches"
    return f"{markdown(['', 'cosine of features', 'RMSE', 'SSIM', 'seconds'], lines)}\n\n{sizes}."


@table("liu2025_table2", "liu2025_table2")
def feature_errors(record: Content) -> str:
    """Mean feature error by defense, method and batch size, and the paper's value for its method."""
    cells, grid = _cells(record), configuration("evaluate/liu2025_table2.yaml")
    printed = grid["paper"]["values"]["moments"]
    rows = []
    for defense, strength in dict.fromkeys(map(_strength, cells)):
        number = 0 if strength is None else grid["defenses"][defense]["values"].index(strength)
        for name, attack in grid["attacks"].items():
            own = select(cells, defense=defense, strength=strength, attack=name)
            found = {row["batch_size"]: shown(row.get("feature_error")) for row in own}
            title = title_of(grid, defense, strength) if name == next(iter(grid["attacks"])) else ""
            rows.append([title, attack["title"], *(found.get(batch, "–") for batch in grid["batch_sizes"])])
        values = [str(printed[defense][batch][number]).partition(" (")[0] for batch in grid["batch_sizes"]]
        rows.append(["", "the paper's method in the paper", *values])
    return markdown(["defense", "method", *(f"batch {batch}" for batch in grid["batch_sizes"])], rows)


@table("liu2025_table3_small", "liu2025_table3_small**")
def large_batches(records: Sequence[Content]) -> str:
    """Images by attack and batch size, without a defense; attacks may have records of their own."""
    grid = configuration("evaluate/liu2025_table3_small.yaml")
    order = list(grid["attacks"])
    newest = {(row["batch_size"], row["attack"]): row for record in oldest_first(records) for row in _cells(record)}
    cells = [row for (_, attack), row in newest.items() if attack in order]
    specs = {"ssim": ".3f", "rmse": "error", "mse": "error", "label_accuracy": ".0%", "seconds": ".0f"}
    lines = []
    for row in sorted(cells, key=lambda row: (row["batch_size"], order.index(row["attack"]))):
        title = grid["attacks"][row["attack"]]["title"]
        lines.append([str(row["batch_size"]), title, *(shown(row.get(key), spec) for key, spec in specs.items())])
    baselines = {"nearest public image": "nearest_public_rmse", "mean image": "mean_image_rmse"}
    lines += [["", title, "", shown(cells[0][key])] for title, key in baselines.items()]
    return markdown(["batch", "", "SSIM", "RMSE", "MSE", "labels right", "seconds of all batches"], lines)
