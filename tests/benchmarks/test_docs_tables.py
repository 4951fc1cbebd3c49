"""Tables of the pages: what they compute from records, and that each of them has its place."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.docs import PAGES, released, tables, updates

NAME = re.compile(r"<!-- table: ([\w-]+) -->")


def lines(table: str) -> list[list[str]]:
    """Cells of the rows of the tables in a text, headers included."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|") and "---" not in line
    ]


def run(name: str, **content: Any) -> dict[str, Any]:
    """A record of `benchmarks.command`."""
    return {"name": name, "rows": [{"seconds": 10.0, "cpu_seconds": 9.0, **content}]}


def test_every_table_has_its_place() -> None:
    placed = {name for page in PAGES for name in NAME.findall(page.read_text())}
    assert placed == set(tables._TABLES)


def test_draws_are_pooled_by_their_images() -> None:
    baselines = {"oracle_mse": 0.02, "baseline_nearest_public_mse": 0.03, "baseline_mean_image_mse": 0.07}
    first = {"n": 300, "certified_rate": 1.0, "certified_mse": 2e-6, "certified_mse_max": 1e-5, "mse": 2e-6}
    second = {"n": 100, "certified_rate": 0.5, "certified_mse": 9e-6, "certified_mse_max": 4e-5, "mse": 0.02}
    found = lines(
        released._retraining([run(f"draw_{n}", metrics=m | baselines) for n, m in enumerate((first, second))])
    )
    # Means over images, not over draws: certified ones 1050e-6 / 350, all 2.0006 / 400.
    assert found[-1] == ["all", "350 of 400", "3e-6", "4e-5", "0.0050", "0.0200", "0.0300", "0.0700", ""]
    assert found[-2][:5] == ["1", "50 of 100", "9e-6", "4e-5", "0.0200"]
    assert len(lines(released._retraining([run("draw_0", metrics=first | baselines)]))) == 2


@pytest.fixture
def grid() -> dict[str, Any]:
    """Two attacks on single images, two defenses; Robbing the Fed does not apply to pruning of 0.99."""
    cells = []
    for defense, strength, accuracy, errors in [
        ("none", None, 0.98, (0.08, 1e-8)),
        ("prune", 0.9, 0.96, (0.10, 0.17)),
        ("prune", 0.99, 0.94, (0.18, None)),
        ("noise", 0.01, 0.975, (0.22, 0.02)),
    ]:
        least = min(error for error in errors if error is not None)
        for attack, error in zip(("geiping2020", "fowl2021"), errors, strict=True):
            cell: dict[str, Any] = {
                "defense": defense,
                "attack": attack,
                "batch_size": 1,
                "n": 8.0,
                "accuracy": accuracy,
            }
            cell |= {} if strength is None else {"strength": strength}
            cell |= {"strongest": str(error == least).lower(), "strongest_honest": str(attack == "geiping2020").lower()}
            cell |= {} if error is None else {"rmse": error, "nearest_public_rmse": 0.14, "mean_image_rmse": 0.28}
            cells.append(cell)
    return run("digits_small", metrics={}, tables={"evaluation": cells})


def test_a_grid_names_the_strongest_attack_and_the_price(grid: dict[str, Any]) -> None:
    text = updates._grid(grid)
    assert text.startswith("Batch 1. RMSE over 8 images; the nearest public image has 0.140, the mean image 0.280:")
    assert lines(text) == [
        ["defense", "inverting gradients", "Robbing the Fed", "accuracy", "price in points"],
        ["no defense", "*0.080*", "**1e-8**", "98.0 %", ""],
        ["pruning 0.9", "**0.100**", "0.170", "96.0 %", "+2.0"],
        ["pruning 0.99", "**0.180**", "–", "94.0 %", "+4.0"],
        ["Gaussian noise 0.01", "*0.220*", "**0.020**", "97.5 %", "+0.5"],
    ]


def test_equal_price_compares_what_costs_no_more(grid: dict[str, Any]) -> None:
    header, *rows = lines(updates.equal_price(grid))
    by_limit = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert [by_limit[limit]["pruning"] for limit in ("1", "5", "15")] == ["", "0.180 (0.99)", "0.180 (0.99)"]
    assert by_limit["1"]["Gaussian noise"] == "0.020 (0.01)"  # by the strongest attack, not the weaker one
    assert by_limit["15"]["clipping"] == ""


def test_certified_images_are_counted_with_the_wrong_ones() -> None:
    cell = {"network": "untrained", "batch_norm": "eval", "labels": "distinct"}
    rows = [
        {**cell, "batch": 2, "images": 4, "certified": 4, "certified_and_wrong": 1, "rmse_of_certified": [1e-3, 0.07]},
        {**cell, "batch": 8, "images": 8, "certified": 5, "certified_and_wrong": 0, "rmse_of_certified": [2e-3]},
    ]
    reasons = [{}, {"its maps differ": 2, "no maps recovered": 1}]
    text = updates.certificates(
        [{"rows": [{**row, "not_certified": why}]} for row, why in zip(rows, reasons, strict=True)]
    )
    assert lines(text)[1] == ["untrained", "eval", "distinct", "4 of 4", "5 of 8"]
    assert "9 of 12 images are certified, 1 of them wrong; the largest RMSE of a certified image is 0.070" in text
    assert text.endswith("- 2 images: its maps differ\n- 1 images: no maps recovered")
