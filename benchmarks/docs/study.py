"""Tables of the grid of Liu et al. 2025, whose records are of its parts: defenses, or single strengths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.grids import title_of
from benchmarks.docs.marks import NOT_MEASURED
from benchmarks.docs.tables import configuration, markdown, oldest_first, row_of, select, table
from lit_recon.experiments.evaluate.comparison import DefenseComparison, Side, sides_of
from lit_recon.experiments.evaluate.conclusion import GridNames, conclude, has_result, missing
from lit_recon.experiments.evaluate.equal_utility import Protection, Strength, compare, strengths_of
from lit_recon.reporting.plots import COLOURS, MARKS, Plot, Series

Row = Mapping[str, Any]

_GRID = "liu2025_table4_small"
_NONE = "none"
#: What a row is about: a training or an attacked batch.
_IDENTITY = ("defense", "strength", "repetition", "attack", "aware", "batch_size", "batch")


def _rows(records: Sequence[Content], name: str, grid: Row | None = None) -> list[Row]:
    """The rows of a CSV file of all parts; what was measured again, or was not run in some of them, counts once.

    With a `grid`, rows of attacks that it does not have are left out. Of records of further seeds (`..._seeds_...`),
    made on another machine, only the trainings count: their attacked network was trained there, too.
    """
    if name != "utility":
        records = [record for record in records if "_seeds_" not in record["name"]]
    rows = [row for record in oldest_first(records) for row in row_of(record)["tables"].get(name, [])]
    if grid is not None:
        rows = [row for row in rows if row.get("attack") is None or row["attack"] in grid["attacks"]]
    newest = {tuple(row.get(key) for key in _IDENTITY): row for row in sorted(rows, key=has_result)}
    return list(newest.values())


def _levels(grid: Row) -> Iterator[tuple[str, float | None]]:
    yield _NONE, None
    for name, family in grid["defenses"].items():
        yield from ((name, value) for value in family["values"])


def _files(grid: Row) -> dict[str, Row]:
    """The configurations of the grid's attacks."""
    return {name: configuration(attack["config"].removeprefix("configs/")) for name, attack in grid["attacks"].items()}


def _malicious(grid: Row) -> list[str]:
    """The attacks whose server modifies the model."""
    return [name for name, file in _files(grid).items() if file.get("server")]


def _informed(grid: Row) -> list[str]:
    """The attacks that know the BatchNorm statistics of the client's batch."""
    files = _files(grid).items()
    return [name for name, file in files if file.get("knowledge", {}).get("batch_norm") == "batch"]


@table("liu2025_table4_small", f"all {_GRID}_**")
def attacks(records: Sequence[Content]) -> str:
    """RMSE of every attack under every defense, the paper's in brackets; accuracy and loss of the trainings."""
    grid = configuration(f"evaluate/{_GRID}.yaml")
    batches, trainings = _rows(records, "batches", grid), _rows(records, "utility")
    all_cells, malicious = _rows(records, "evaluation", grid), _malicious(grid)
    # a network that the server has modified has other bounds
    bounded = [row for row in all_cells if row.get("bound_rmse") and row["attack"] not in malicious]
    rows = []
    for defense, strength in _levels(grid):
        found = select(batches, defense=defense, strength=strength)
        means = {
            name: statistics.mean(row["value"] for row in own)
            for name in grid["attacks"]
            if (own := select(found, attack=name))
        }
        if not means:
            continue
        honest = min((name for name in means if name not in malicious), key=lambda name: means[name], default="")
        best = min(means, key=lambda name: means[name])
        cells = []
        for name in grid["attacks"]:
            marker = "**" if name == best else "*" if name == honest else ""
            text = f"{marker}{shown(means.get(name))}{marker}"
            cells.append(text + _printed(grid["paper"]["values"].get(name, {}), grid, defense, strength))
        if bounded:
            bounds = [row["bound_rmse"] for row in select(bounded, defense=defense, strength=strength)]
            cells.append(shown(max(bounds, default=None)))
        own = select(trainings, defense=defense, strength=strength)
        loss = _spread(own, "final_train_loss", ".2f") + _printed(grid["paper"]["losses"], grid, defense, strength)
        rows.append([title_of(grid, defense, strength), *cells, _spread(own, "accuracy", ".1%"), loss])
    titles = [*(attack["title"] for attack in grid["attacks"].values()), *(["lower bound"] if bounded else [])]
    cells = [row for row in all_cells if "nearest_public_rmse" in row]
    nearest, mean = (shown(_mean(cells, f"{name}_rmse")) for name in ("nearest_public", "mean_image"))
    start = f"Of {cells[0]['n']:g} images; the nearest public image has {nearest}, the mean image {mean}:"
    attacking, training = (sum(row.get("seconds") or 0 for row in part) / 3600 for part in (all_cells, trainings))
    spent = (
        f"The attacks took {shown(attacking, '.0f')} hours of one core and the trainings "
        f"{shown(training, '.0f')}, each counted once; further seeds of some trainings were computed on a GPU."
    )
    parts = [start, markdown(["defense", *titles, "accuracy", "training loss"], rows), spent, *_machines(records, grid)]
    return "\n\n".join(parts)


def _machines(records: Sequence[Content], grid: Row) -> list[str]:
    """What attacks with a generator reach without a defense on every machine, each of which trained one of its own."""
    told = []
    for name in (name for name, attack in grid["attacks"].items() if attack.get("generator")):
        plain: dict[str, list[float]] = {}
        newest = {}
        for record in oldest_first(records):
            rows = select(row_of(record)["tables"].get("batches", []), attack=name)
            if own := select(rows, defense=_NONE):
                plain[record["device"]] = [row["value"] for row in own]
            newest |= {(row["defense"], row["strength"]): record["device"] for row in rows if row["defense"] != _NONE}
        measured: dict[str, list[str]] = {}
        for level, device in newest.items():
            measured.setdefault(device, []).append(title_of(grid, *level))
        if len(plain) > 1 and len(measured) > 1:
            first = max(measured, key=lambda device: len(measured[device]))
            values = ", ".join(f"{shown(statistics.mean(values))} on {device}" for device, values in plain.items())
            others = "; ".join(f"{', '.join(own)} on {device}" for device, own in measured.items() if device != first)
            told.append(
                f"Each machine trained a generator of its own: without a defense the {grid['attacks'][name]['title']} "
                f"has {values}. It was measured behind {others}; behind the other defenses on {first}."
            )
    return told


@table("liu2025_tuned", "all liu2025_tuned**")
def tuned(records: Sequence[Content]) -> str:
    """RMSE and SSIM of an attack with two settings, without a defense and behind some."""
    grid, rows = configuration("evaluate/liu2025_tuned.yaml"), _rows(records, "evaluation")
    lines = []
    for defense, strength in _levels(grid):
        own = {row["attack"]: row for row in select(rows, defense=defense, strength=strength)}
        values = [shown(own.get(name, {}).get(key), ".3f") for name in grid["attacks"] for key in ("rmse", "ssim")]
        if any(has_result(row) for row in own.values()):
            lines.append([title_of(grid, defense, strength), *values])
    nearest, mean = (shown(_mean(rows, f"{name}_rmse"), ".3f") for name in ("nearest_public", "mean_image"))
    titles = [f"{attack['title']}, {key}" for attack in grid["attacks"].values() for key in ("RMSE", "SSIM")]
    images = next(row["n"] for row in rows if "n" in row)
    start = f"Of {images:g} images; the nearest public image has RMSE {nearest}, the mean image {mean}:"
    return f"{start}\n\n{markdown(['defense', *titles], lines)}"


def _mean(rows: Sequence[Row], key: str) -> float:
    """The mean of the rows that have a value."""
    return statistics.mean(row[key] for row in rows if key in row)


def _printed(values: Row, grid: Row, defense: str, strength: float | None) -> str:
    if defense not in values:
        return ""
    return f" ({values[defense][grid['defenses'][defense]['values'].index(strength)]})"


def _spread(rows: Sequence[Row], key: str, spec: str) -> str:
    """The mean of the trainings, and their standard deviation."""
    values = [row[key] for row in rows]
    if not values:
        return ""
    spread = f" ± {shown(statistics.stdev(values), spec)}" if len(values) > 1 else ""
    return shown(statistics.mean(values), spec) + spread


@table("chen2024_mnist", "chen2024_mnist")
def optimal_defenses(record: Content) -> str:
    """Images by defense and strength, beside the accuracy of trainings behind it."""
    tables, grid, lines = row_of(record)["tables"], configuration("evaluate/chen2024_mnist.yaml"), []
    for row in tables["evaluation"]:
        defense, strength = row["defense"], row.get("strength")
        trained = select(tables["utility"], defense=defense, strength=strength)
        accuracy = _spread(trained, "accuracy", ".1%") or "–"
        error = _error([one["value"] for one in select(tables["batches"], defense=defense, strength=strength)])
        mse = f"{shown(row['mse'])} ± {shown(error)}"
        lines.append([title_of(grid, defense, strength), mse, shown(row["psnr"], ".1f"), accuracy])
    return markdown(["defense", "MSE", "PSNR", "accuracy"], lines)


@table("liu2025_cost_small", f"all {_GRID}_**")
def small_cost(records: Sequence[Content]) -> str:
    return equal_cost(records, _GRID)


@table("digits_small_cost", "digits_small")
def digits_cost(record: Content) -> str:
    return equal_cost([record], "digits_small")


def equal_cost(records: Sequence[Content], name: str) -> str:
    """What the strongest attack finds on single images at a limit to the cost, by side."""
    grid = configuration(f"evaluate/{name}.yaml")
    found = _comparisons(grid, records)
    if not found:
        return NOT_MEASURED
    titles = {name: attack["title"] for name, attack in grid["attacks"].items()}
    defenses = {key: family["title"] for key, family in grid["defenses"].items()}
    names = GridNames(defenses, titles, _strengths(grid), "RMSE", shown)
    cells = select(_rows(records, "evaluation", grid), batch_size=1)
    trainings = _rows(records, "utility")
    said = [conclude(names, one, bool(missing(names, trainings, cells, one.side.barred))) for one in found]
    said += missing(names, trainings, cells)
    verdict = " ".join(said).replace("\N{NO-BREAK SPACE}", " ")
    return "\n\n".join([verdict, *(_side(grid, one) for one in found)])


@table("liu2025_ranking", f"all {_GRID}_**")
def ranking(records: Sequence[Content]) -> str:
    """Defenses by what the strongest attack of honest servers finds, best first.

    Without and with the new attacks, and with them where the statistics of the batch are not known.
    """
    grid = configuration(f"evaluate/{_GRID}.yaml")
    titles = {name: family["title"] for name, family in grid["defenses"].items()}
    malicious, new = {*_malicious(grid)}, grid["without"]
    sides = {frozenset(one.side.barred): one for one in _comparisons(grid, records)}
    left_out = (set[str](), {*new}, _knowing(grid, records))
    whole, without, uninformed = (sides.get(frozenset(malicious | barred)) for barred in left_out)
    if whole is None or without is None or uninformed is None:
        return NOT_MEASURED
    rows = []
    for limit in whole.found:
        cells = []
        for one in (without, whole, uninformed):
            order = sorted(one.found[limit].items(), key=lambda item: -item[1].value)
            ranked = [f"{titles[name]} {'> ' * own.ends}{shown(own.value)}" for name, own in order]
            cells.append("; ".join([f"**{ranked[0]}**", *ranked[1:]]))
        rows.append([f"{100 * limit:g}", *cells])
    titles_of_new = _titles(grid, new)
    header = ["cost, points at most", f"without {titles_of_new}", f"with {titles_of_new}"]
    return markdown([*header, f"with {titles_of_new}, statistics of the batch not known"], rows)


def cost_plots(records: Sequence[Content]) -> list[Plot]:
    """Accuracy lost against RMSE of the strongest attack of honest servers on single images, without and with new ones.

    The dashed line joins the points that no other one beats in both respects. Bars are standard errors: of batches, and
    of trainings where there are several.
    """
    grid = configuration(f"evaluate/{_GRID}.yaml")
    new = [*grid["without"]]
    sides = {
        f"without {_titles(grid, new)}": {*_malicious(grid), *new},
        f"with {_titles(grid, new)}": {*_malicious(grid)},
    }
    cells = [row for row in _rows(records, "evaluation", grid) if "nearest_public_rmse" in row]
    levels = {"nearest public image": _mean(cells, "nearest_public_rmse")}
    return [
        Plot(
            f"honest servers, {title}",
            x_label="accuracy lost, in percentage points",
            y_label="RMSE of the strongest attack (higher: protects better)",
            series=_cost_series(grid, records, barred),
            levels=levels,
        )
        for title, barred in sides.items()
    ]


def _cost_series(grid: Row, records: Sequence[Content], barred: set[str]) -> list[Series]:
    known = _points(grid, records, barred)
    series, points = [], []
    for number, (name, strengths) in enumerate(known.items()):
        # the first point is no defense
        own = [(100 * statistics.mean(one.losses), one.strongest, one) for one in strengths if one.value is not None]
        points += [(loss, value) for loss, value, _ in own]
        style = "-", MARKS[number % len(MARKS)], COLOURS[number % len(COLOURS)], 0.9
        bars = [_error(min(one.scores.values(), key=statistics.mean)) for *_, one in own]
        series.append(
            Series(
                grid["defenses"][name]["title"],
                [loss for loss, *_ in own],
                [value for _, value, _ in own],
                *style,
                bars,
                [f"{one.value:g}" for *_, one in own],
                x_errors=[100 * _error(one.losses) for *_, one in own],
            )
        )
    front: list[tuple[float, float]] = []
    for loss, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((loss, value))
    # a line that rises at each point only
    xs, ys = ([point[i] for point in front for _ in range(2)] for i in (0, 1))
    return [*series, Series("Pareto front", xs[1:], ys[:-1], "--")]


def _error(values: Sequence[float]) -> float:
    """Standard error of a mean; NaN of a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def _titles(grid: Row, attacks: Sequence[str]) -> str:
    return " and ".join(grid["attacks"][name]["title"] for name in attacks)


def _knowing(grid: Row, records: Sequence[Content]) -> set[str]:
    """The attacks with results that know the statistics of the batch."""
    return {row["attack"] for row in _rows(records, "batches", grid)} & {*_informed(grid)}


def _comparisons(grid: Row, records: Sequence[Content]) -> list[DefenseComparison]:
    """Defenses at equal cost, by side."""
    malicious, left_out = _malicious(grid), grid.get("without", [])
    titles = {name: attack["title"] for name, attack in grid["attacks"].items()}
    sides = sides_of(titles, malicious, left_out, _knowing(grid, records))
    sides.sort(key=lambda side: bool(malicious) and not side.barred)
    return [one for side in sides if (one := _compared(grid, records, side)) is not None]


def _strengths(grid: Row) -> dict[str, list[float]]:
    return {name: family["values"] for name, family in grid["defenses"].items()}


def _points(grid: Row, records: Sequence[Content], barred: Collection[str]) -> dict[str, list[Strength]]:
    """The strengths of every defense against single images, as the attacks that are not `barred` leave them."""
    batches = select(_rows(records, "batches", grid), batch_size=1)
    guess = {row["batch"]: row["mean_image"] for row in batches if "mean_image" in row}
    cells = [
        row
        for row in select(_rows(records, "evaluation", grid), batch_size=1)
        if row["attack"] not in barred and row["defense"] != _NONE
    ]
    stopped = {(row["defense"], row["strength"]) for row in cells}
    stopped -= {(row["defense"], row["strength"]) for row in cells if row.get("applicable") != "false"}
    own = [row for row in batches if row["attack"] not in barred]
    return strengths_of(_strengths(grid), _rows(records, "utility"), own, 1, stopped, [*guess.values()])


def _compared(grid: Row, records: Sequence[Content], side: Side) -> DefenseComparison | None:
    # a defense is compared once all its strengths are measured
    known = {
        name: points
        for name, points in _points(grid, records, side.barred).items()
        if [point.value for point in points] == [None, *_strengths(grid)[name]]
    }
    cells = select(_rows(records, "evaluation", grid), batch_size=1)
    if not known:
        return None
    limits = grid.get("max_accuracy_drops", (0.01, 0.02, 0.05, 0.1))
    plain = next(iter(known.values()))[0].strongest
    nearest = _mean(cells, "nearest_public_rmse")
    return DefenseComparison(1, side, {limit: compare(known, limit) for limit in limits}, plain, plain > nearest)


def _side(grid: Row, compared: DefenseComparison) -> str:
    names = list(next(iter(compared.found.values())))
    rows = []
    for limit, found in compared.found.items():
        best = max(found, key=lambda name: found[name].value)
        rows.append([f"{100 * limit:g}", *(_protection(found[name], name == best, len(names)) for name in names)])
    header = ["cost, points at most", *(grid["defenses"][name]["title"] for name in names)]
    title = compared.side.title
    return f"{title[0].upper()}{title[1:]}:\n\n{markdown(header, rows)}" if title else markdown(header, rows)


def _protection(own: Protection, strong: bool, n: int) -> str:
    marker = "**" if strong and own.strengths != (None,) else ""
    strengths = " to ".join("none" if value is None else f"{value:g}" for value in own.strengths)
    interval = f", {shown(max(own.interval[0], 0.0))} to {shown(own.interval[1])}" if own.interval else ""
    sure = f", best in {own.best:.0%}".replace("%", " %") if own.interval and n > 1 else ""
    return f"{marker}{'> ' * own.ends}{shown(own.value)}{marker} (at {strengths}{interval}{sure})"
