"""The list of the papers' tables and figures: what is measured, what is missing, and where both are from."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import tables
from benchmarks.docs.fidelity import PAPERS, chen2024, liu2025, totals
from benchmarks.docs.fidelity.factors import Factor, curve
from benchmarks.docs.fidelity.items import MISSING, NO_RESULT, Found, Item, counts, listed
from benchmarks.docs.figures import FigureError, Figures
from benchmarks.docs.tables import configuration, make
from benchmarks.record import ROOT
from lit_recon.experiments.factors.settings import shown as label
from tests.benchmarks.test_docs_tables import lines

PAGE = ROOT / "docs" / "fidelity.md"
ALL = [item for items in PAPERS.values() for item in items]
COMMAND = "python -m benchmarks.command {} reconn.py run --config a.yaml --overwrite true --name x --trainer.threads 1"


def keep(folder: Path, name: str, rows: list[dict[str, Any]], again: int = 1, **changes: Any) -> None:
    """A record as far as the list reads it."""
    content = {"name": name, "pool": "evaluation", "partial": False, "command": COMMAND.format(name), "rows": rows}
    content |= {"created": f"2026-11-2{again}T10:00:00+00:00", **changes}
    (folder / f"{name}-{again}.json").write_text(json.dumps(content))


def of_tables(**tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a record of a run with these tables."""
    return [{"metrics": {}, "tables": tables}]


def row(item: Item, folder: Path) -> list[str]:
    """The cells of an item's row."""
    return lines(listed([item], Figures(folder), PAGE))[1]


def find(figures: Figures, item: Item) -> Found:
    found = item.find(figures)
    assert found is not None
    return found


def commands(found: Found | None) -> list[str]:
    """The last option of every record's command."""
    return [" ".join(record["command"].split()[-2:]) for record in (found.records if found else ())]


ITEM = Item("table 1", "MSE", "0.5", "{small: metrics.mse .4f} of {small: metrics.n d}", "8 images", "`a.yaml`")


def test_a_value_without_its_record_is_missing_until_the_record_is_complete(tmp_path: Path) -> None:
    missing = ["table 1", "MSE", "0.5", "missing", "`a.yaml`", "", ""]
    assert row(ITEM, tmp_path) == missing
    rows = [{"metrics": {"mse": 0.25, "n": 8}}]
    keep(tmp_path, "small", rows, partial=True)
    assert row(ITEM, tmp_path) == missing
    keep(tmp_path, "small", rows, again=2)
    assert row(ITEM, tmp_path) == [
        *("table 1", "MSE", "0.5", "0.2500 of 8", "8 images"),
        "2026-11-22: [small](../benchmarks/results/small-2.json)",
        "`python reconn.py run --config a.yaml`",
    ]


def test_a_record_without_the_value_is_an_error(tmp_path: Path) -> None:
    keep(tmp_path, "small", [{"metrics": {"n": 8}}])
    with pytest.raises(FigureError, match=r"no metrics\.mse"):
        row(ITEM, tmp_path)


def test_tuning_images_are_not_listed(tmp_path: Path) -> None:
    keep(tmp_path, "small", [{"metrics": {"mse": 0.25, "n": 8}}], pool="development")
    with pytest.raises(FigureError, match="development"):
        row(ITEM, tmp_path)


def test_several_records_are_counted_and_dated(tmp_path: Path) -> None:
    for number in range(4):
        keep(tmp_path, f"draw_{number}", [{"metrics": {"mse": number}}], again=1 + number % 2)
    *_, ours, _, measured, command = row(Item("t", "q", "p", "{mean draw_*: metrics.mse .1f}"), tmp_path)
    assert ours == "1.5"
    assert measured.startswith("2026-11-21 and 2026-11-22: [draw_0]")
    assert measured.endswith("draw_1-2.json) and 2 more")
    assert command == "`python reconn.py run --config a.yaml`"  # the same but for what is left out


def test_items_are_counted_by_what_is_known(tmp_path: Path) -> None:
    keep(tmp_path, "small", [{"metrics": {"mse": 0.25, "n": 8}}])
    items = [
        ITEM,
        Item("t", "digits", "p", "{small: metrics.mse .4f}", "digits", other_data=True),
        Item("t", "q", "p", "{large: metrics.mse .4f}"),
        Item("t", "q", "p"),
        Item("t", "drawing", "p", "{small: metrics.mse .4f}", is_result=False),
    ]
    assert counts(items, Figures(tmp_path)) == (1, 1, 2, 1)
    cells = [line[3:5] for line in lines(listed(items, Figures(tmp_path), PAGE))[1:]]
    assert [ours for ours, _ in cells] == ["0.2500 of 8", "0.2500", MISSING, MISSING, NO_RESULT]
    assert cells[1][1] == "*Other data*: digits"


def test_nothing_is_measured_without_records(tmp_path: Path) -> None:
    found = lines(totals(Figures(tmp_path), PAGE))
    assert found[-1][0] == "all"
    assert [line[2:4] for line in found[1:]] == [["0", "0"]] * 5
    assert sum(int(line[1]) for line in found[1:-1]) == int(found[-1][1]) == len(ALL)


@pytest.mark.parametrize("name", [*(f"fidelity_{paper}" for paper in PAPERS), "fidelity_counts"])
def test_every_row_has_all_cells(name: str) -> None:
    made = make(name, Figures(), PAGE)
    header, *rows = lines(made)
    assert {len(cells) for cells in rows} == {len(header)}
    assert "Measured on" not in made  # every row has its own records


def test_a_table_without_names_of_records_gets_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_TABLES", {})
    keep(tmp_path, "small", [{"metrics": {"mse": 0.25}}])
    tables.table("free")(lambda figures, page: f"{figures.text('small: metrics.mse .4f')} on {page.name}")
    assert make("free", Figures(tmp_path), PAGE) == "0.2500 on fidelity.md"


def test_what_is_not_measured_says_what_it_takes() -> None:
    figures = Figures()
    assert [item for item in ALL if item.is_result and not (item.needs or item.find(figures))] == []
    assert [item for item in ALL if item.ours is not None and not (item.setting and item.needs)] == []


def test_every_named_file_and_page_exists() -> None:
    text = " ".join(f"{item.paper} {item.setting} {item.needs} {item.quantity}" for item in ALL)
    named = set(re.findall(r"configs/[\w/]+\.yaml", text))
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert [path for path in re.findall(r"\]\((\w+\.md)\)", text) if not (ROOT / "docs" / path).is_file()] == []


def test_every_table_and_figure_has_a_row() -> None:
    def numbers(paper: str, kind: str) -> set[str]:
        found = " ".join(item.where for item in PAPERS[paper])
        return set(re.findall(rf"{kind} (\d+|[IVX]+)\b", found))

    assert numbers("liu2025", "table") == set("12345678")
    assert numbers("liu2025", "figure") == set("123")
    assert numbers("balle2022", "figure") | {"5"} == {str(number) for number in range(1, 25)}
    assert {"5a", "5b", "5c", "5d"} <= {item.where.partition(" ")[2] for item in PAPERS["balle2022"]}
    assert numbers("balle2022", "table") == {"I", "II", "III", "IV", "IX"}
    assert any(item.where == "tables V to VIII" for item in PAPERS["balle2022"])


def test_what_papers_without_numbered_results_say_has_rows() -> None:
    chen, runkel = PAPERS["chen2024"], PAPERS["runkel2024"]
    places = Counter(item.where for item in chen)
    assert places == {"code": 1, "code, MNIST": 4, "code, CIFAR-10": 4, "setting of Liu et al.": 6, "bound": 2}
    for data in ("MNIST", "CIFAR-10"):
        said = [item.quantity for item in chen if item.where == f"code, {data}"]
        starts = (
            "MSE and PSNR, optimal gradient noise",
            "MSE and PSNR, optimal gradient pruning",
            "MSE and PSNR, clamped",
        )
        assert all(any(one.startswith(start) for one in said) for start in (*starts, "training behind each defense"))
    grid = configuration("evaluate/liu2025_table4_small.yaml")["defenses"]
    strengths = [
        f"RMSE and accuracy behind optimal gradient {name} {value:g}"
        for name in ("noise", "pruning")
        for value in grid[f"optimal_{name}"]["values"]
    ]
    assert [item.quantity for item in chen if item.where == "setting of Liu et al."] == strengths
    for network in ("affine classifier", "network with one hidden layer"):
        starts = [item.quantity for item in runkel if item.where == network]
        for start in ("random noise", "other images of the data", "the training images"):
            assert sum(one.startswith(f"reconstruction from {start}") for one in starts) == 1
        assert any("starts with 0, 25, 75 and 100 % of the truth" in one for one in starts)
        assert any(one.startswith("candidates nearer to a training image") for one in starts)
        conclusions = [item.paper for item in runkel if item.where == f"{network}, conclusion"]
        assert len(set(conclusions)) == 4
    assert any(item.where == "tables and figures" for item in runkel)


def cases(study: str, factor: str) -> Iterator[tuple[str, str, Any]]:
    """Line, label and printed value of every value of a factor."""
    found = configuration(f"reconn/{study}.yaml")["factors"][factor]
    for line, own in found.get("series", {"": {}}).items():
        own = {**found, **(own or {})}
        labels = list(own["cases"]) if "cases" in own else [*map(label, own["values"])]
        printed = own.get("paper") or [None] * len(labels)
        yield from ((line, name, value) for name, value in zip(labels, printed, strict=True))


FACTORS = [item for item in ALL if isinstance(item.ours, Factor)]


@pytest.mark.parametrize("item", FACTORS, ids=lambda item: f"{item.where}: {item.quantity}")
def test_a_place_in_a_study_of_factors_exists_and_has_the_printed_value(item: Item) -> None:
    ours = item.ours
    assert isinstance(ours, Factor)
    found = [
        value
        for line, name, value in cases(ours.study, ours.factor)
        if ours.value in (None, name) and ours.line in (None, line)
    ]
    assert found
    if ours.value is not None:
        [value] = found
        assert value is None or f"{value:.4f}" in item.paper


@pytest.mark.parametrize("attack", liu2025.TABLE_4)
def test_printed_errors_agree_with_the_ranges_of_the_grid(attack: str) -> None:
    grid = configuration(f"evaluate/{liu2025.GRID}.yaml")
    for column, (defense, strength, _) in enumerate(liu2025.COLUMNS):
        place = grid["defenses"][defense]["values"].index(strength)
        values = sorted(liu2025.printed(liu2025.TABLE_4[attack], column).split(", "))
        least, _, most = str(grid["paper"]["values"][attack][defense][place]).partition(" to ")
        assert (values[0], values[-1]) == (f"{float(least):.2f}", f"{float(most or least):.2f}")


def test_printed_losses_and_feature_errors_agree_with_the_grids() -> None:
    losses = configuration(f"evaluate/{liu2025.GRID}.yaml")
    for column, (defense, strength, _) in enumerate(liu2025.COLUMNS):
        place = losses["defenses"][defense]["values"].index(strength)
        values = sorted(liu2025.printed(liu2025.TABLE_5, column).split(", "))
        assert f"{values[0]} to {values[-1]}" == losses["paper"]["losses"][defense][place]
    features = configuration("evaluate/liu2025_table2.yaml")["paper"]["values"]["moments"]
    ours = [values.split(", ") for values, *_ in liu2025.TABLE_2.values()]
    for place, batch in enumerate((1, 2, 4, 8)):
        known = [value for own in features.values() for value in own[batch]]
        assert [float(str(value).partition(" ")[0]) for value in known] == [float(own[place]) for own in ours]


def grid_part(strength: float, values: dict[str, list[float]], losses: list[float]) -> list[dict[str, Any]]:
    level = {"defense": "prune", "strength": strength}
    batches = [
        {**level, "attack": attack, "batch_size": 1, "batch": n, "value": value}
        for attack, own in values.items()
        for n, value in enumerate(own)
    ]
    trainings = [{**level, "repetition": n, "accuracy": 0.4, "final_train_loss": loss} for n, loss in enumerate(losses)]
    return of_tables(batches=batches, utility=trainings)


def test_a_strength_of_the_grid_is_measured_by_its_own_part(tmp_path: Path) -> None:
    keep(tmp_path, f"{liu2025.GRID}_prune_strong", grid_part(0.9, {"geiping2020": [0.1, 0.3]}, [1.5, 2.5]))
    keep(tmp_path, f"{liu2025.GRID}_prune_weak", grid_part(0.5, {"geiping2020": [0.9]}, [9.0]))
    figures = Figures(tmp_path)
    found = {
        (item.where, item.quantity): find(figures, item)
        for item in liu2025.ITEMS
        if item.where in ("table 4", "table 5") and item.find(figures)
    }
    assert len(found) == 4
    errors = found["table 4", "RMSE behind prune 0.9, three batch sizes (lost)"]
    assert errors.text == "gradient inversion 0.200; accuracy 40.0 % ± 0.0 %"
    assert [record["name"] for record in errors.records] == [f"{liu2025.GRID}_prune_strong"]
    assert found["table 5", "final training loss behind prune 0.9"].text == "2.00 ± 0.71"


def test_single_images_are_those_of_the_newest_measurement(tmp_path: Path) -> None:
    cell = {"defense": "prune 0.9", "batch": 1, "images": 4}
    keep(tmp_path, "defended_prune", [{**cell, "batch_norm": "eval", "rmse": [0.5]}])
    keep(tmp_path, "defended_prune", [{**cell, "batch_norm": "eval", "rmse": [0.1, 0.1, 0.4]}], again=2)
    keep(tmp_path, "defended_prune", [{**cell, "batch": n, "batch_norm": "train", "rmse": []} for n in (1, 4)], again=3)
    [item] = [item for item in liu2025.ITEMS if "our own" in item.where and item.quantity == "RMSE behind prune 0.9"]
    text, records = find(Figures(tmp_path), item)
    assert (text, len(records)) == ("batch 1, eval: median 0.100, mean 0.200, 3 of 4 images", 2)
    assert not any(one.find(Figures(tmp_path)) for one in liu2025.ITEMS if "our own" in one.where and one != item)


def test_a_defense_is_best_only_among_all_of_the_paper() -> None:
    text = (
        "| points at most | clipping | gradient dropout | Gaussian noise | pruning |\n| --- | --- | --- | --- | --- |\n"
        "| 1 | 0.1 (at none) | 0.1 (at none) | 0.1 (at none) | 0.1 (at none) |\n"
        "| 2 | 0.1 (at 8) | 0.2 (at 0.3) | 0.2 (at 0.01) | **> 0.3** (at 0.99, 0.2 to 0.4, best in 98 %) |"
    )
    assert liu2025.best_defenses(text) == "none at 1; pruning at 2 (best in 98 %)"
    assert liu2025.best_defenses(text.replace("clipping", "local steps")) == ""


def test_bounds_are_those_of_the_base_network(tmp_path: Path) -> None:
    base = configuration("bounds/two_layer_small.yaml")["base"]
    plain = {"defense": "none", **base, "bound_unit_norm": 0.1, "error_tensor": 0.6}
    noise = {"defense": "ogn", "strength": 0.03, **base, "bound_unit_norm": 0.2, "error_tensor": 0.8}
    rows = [plain, {**plain, "bound_unit_norm": 0.3}, {**plain, "d": 99, "bound_unit_norm": 7.0}, noise]
    keep(tmp_path, "two_layer_small", of_tables(bounds=rows))
    figures = Figures(tmp_path)
    first = find(figures, liu2025.ITEMS[0])
    assert first.text == "bound 0.2, tensor method 0.6"
    later = [{**plain, **configuration("bounds/liu2025_table1.yaml")["base"]}]
    keep(tmp_path, "liu2025_table1", of_tables(bounds=later))  # without the defense
    figures = Figures(tmp_path)
    assert find(figures, liu2025.ITEMS[0]).text == "bound 0.1, tensor method 0.6"
    assert [find(figures, item).text for item in chen2024.ITEMS if item.find(figures)] == [
        "at 0.03: bound 0.2, tensor method 0.8"
    ]


def test_the_setting_of_the_code_is_told_by_strength_from_parts(tmp_path: Path) -> None:
    noise, pruning, training = (item for item in chen2024.ITEMS if item.where == "code, MNIST" and item.ours)
    assert "an hour and a half" in noise.needs
    rows = [
        {"defense": "noise", "strength": 0.02, "attack": "geiping2020", "mse": 0.2, "psnr": 7.0},
        {"defense": "noise", "strength": 0.005, "attack": "geiping2020", "mse": 0.1, "psnr": 10.0},
        {"defense": "optimal_noise", "strength": 0.005, "attack": "geiping2020", "mse": None, "reason": "not run yet"},
    ]
    trainings = [{"defense": "noise", "strength": 0.02, "accuracy": 0.91, "final_train_loss": 0.3}]
    keep(tmp_path, "chen2024_mnist_noise", of_tables(evaluation=rows, utility=trainings))
    assert noise.find(Figures(tmp_path)) is None  # nothing to compare with
    other = [{**rows[0], "defense": name, "mse": 0.3} for name in ("optimal_noise", "optimal_noise_energy")]
    keep(tmp_path, "chen2024_mnist_optimal", of_tables(evaluation=other))
    figures = Figures(tmp_path)
    assert find(figures, noise).text == (
        "Gaussian noise: 0.005: MSE 0.1000, 10.0 dB; 0.02: MSE 0.2000, 7.0 dB. "
        "optimal gradient noise: 0.02: MSE 0.3000, 7.0 dB. "
        "optimal gradient noise of equal energy: 0.02: MSE 0.3000, 7.0 dB"
    )
    assert pruning.find(figures) is None
    assert training.find(figures) is None
    names = ("noise", "optimal_noise", "optimal_noise_energy", "prune", "optimal_pruning")
    again = [
        {**trainings[0], "defense": name, "repetition": n, "accuracy": 0.9 + n / 50} for name in names for n in (0, 1)
    ]
    keep(tmp_path, "chen2024_mnist_trainings", of_tables(utility=again))
    assert find(Figures(tmp_path), training).text.endswith(
        "optimal gradient pruning: 0.02: 91.0 % ± 1.4 %, loss 0.30 ± 0.00"
    )


def test_the_kept_study_of_bounds_fills_table_1() -> None:
    first = [item for item in liu2025.ITEMS if item.where == "table 1"]
    assert len(first) == 7
    assert [item.quantity for item in first if not item.find(Figures())] == []


def test_a_factor_is_averaged_over_seeds_and_named_by_its_line(tmp_path: Path) -> None:
    keep(
        tmp_path,
        "factors_mnist",
        of_tables(
            factors=[
                {"factor": "base", "mse": 0.5},
                {"factor": "rate", "line": "no momentum", "value": 0.2, "mse": 0.1, "kl": 2.0},
                {"factor": "rate", "line": "no momentum", "value": 0.2, "mse": 0.3, "kl": 4.0},
                {"factor": "rate", "line": "momentum", "value": 0.2, "mse": 0.9},
                {"factor": "fixed", "value": "1,000", "mse": 0.4},
                {"factor": "first_layer", "value": "1,000 images", "mse": 0.2},
                {"factor": "failed", "value": 1, "reason": "it has not been run yet"},
            ]
        ),
        command=f"{COMMAND.format('factors_mnist')} --only '[rate,layers]'",  # the last of several
    )
    figures = Figures(tmp_path)

    def text(*place: Any) -> str | None:
        found = Factor("factors_mnist", *place)(figures)
        return None if found is None else found.text

    assert text("rate", "0.2", "no momentum") == "0.2000"
    assert text("rate", "0.2", "no momentum", ("mse", "lpips", "kl")) == "MSE 0.2000, KL 3.0000"
    assert text("rate", None, None) == "no momentum, 0.2: 0.2000; momentum, 0.2: 0.9000"
    assert text("fixed", "1,000") == "0.4000"
    assert text("fixed", "1,000", "", ("mse",), "1,000 images") == "0.4000; on the first layer 0.2000"
    fixed = Factor("factors_mnist", "fixed", "1,000", "", ("mse",), "1,000 images")
    assert commands(fixed(figures)) == ["--only '[fixed,first_layer]'"]
    assert text("fixed", "1,000", "", ("mse",), "another") == "0.4000"
    assert [text("failed", "1"), text("rate", "0.2"), text("nothing")] == [None] * 3
    assert Factor("factors_cifar10", "fixed")(figures) is None
    # a later record has another value of one factor, was not run with others, and no longer has the last one
    rows = [
        {"factor": "rate", "line": "no momentum", "value": 0.2},
        {"factor": "rate", "line": "no momentum", "value": 0.2},
        {"factor": "fixed", "value": "1,000", "mse": 0.3},
        {"factor": "first_layer", "value": "1,000 images"},
    ]
    keep(tmp_path, "factors_mnist_fixed", of_tables(factors=rows))
    figures = Figures(tmp_path)
    assert text("fixed", "1,000") == "0.3000"
    assert text("rate", None, None) == "no momentum, 0.2: 0.2000"
    found = fixed(figures)
    assert found is not None
    assert commands(found) == ["--trainer.threads 1", "--only '[first_layer]'"]
    assert sorted(record["name"] for record in found.records) == ["factors_mnist", "factors_mnist_fixed"]


def test_a_curve_ends_with_all_shadow_models(tmp_path: Path) -> None:
    assert curve(Figures(tmp_path)) is None
    metrics = {"mse_at_500_shadows": 0.02, "mse": 0.01, "n_shadow": 8000}
    keep(tmp_path, "mnist_small", [{"metrics": metrics, "tables": {}}])
    found = curve(Figures(tmp_path))
    assert found is not None
    assert found.text == "500: 0.0200, 8,000: 0.0100"
