"""Tables of grids of defenses and attacks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.docs import grids
from tests.benchmarks.test_docs_tables import lines, run


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


def test_a_grid_names_the_strongest_attack_and_the_cost(grid: dict[str, Any]) -> None:
    text = grids._grid(grid)
    assert text.startswith("Batch 1. RMSE over 8 images; the nearest public image has 0.140, the mean image 0.280:")
    assert lines(text) == [
        ["defense", "gradient inversion", "Robbing the Fed", "accuracy", "cost in points"],
        ["no defense", "*0.080*", "**1e-8**", "98.0 %", ""],
        ["pruning 0.9", "**0.100**", "0.170", "96.0 %", "+2.0"],
        ["pruning 0.99", "**0.180**", "–", "94.0 %", "+4.0"],
        ["Gaussian noise 0.01", "*0.220*", "**0.020**", "97.5 %", "+0.5"],
    ]


def test_a_grid_without_trainings_has_no_cost() -> None:
    cells: list[dict[str, Any]] = [
        {"defense": "none", "attack": attack, "batch_size": 4, "n": 8.0, "rmse": error, "strongest": strongest}
        | {"nearest_public_rmse": 0.17, "mean_image_rmse": 0.22}
        for attack, error, strongest in (("feature_maps", 0.01, "true"), ("geiping2020", 0.3, "false"))
    ]
    cells += [{**cell, "defense": "aggregation", "strength": 2.0} for cell in cells]
    text = grids._grid(run("liu2025_aggregation_small", metrics={}, tables={"evaluation": cells}))
    assert text.startswith("Batch 4. RMSE over 8 images; the nearest")  # labels are as drawn there
    assert lines(text) == [
        ["defense", "exact maps", "gradient inversion"],
        ["no defense", "**0.010**", "0.300"],
        ["secure aggregation, clients 2", "**0.010**", "0.300"],
    ]


def test_features_stand_beside_the_images_inverted_from_them() -> None:
    shared = {"defense": "none", "n": 32.0, "n_batches": 8.0, "nearest_public_rmse": 0.17, "mean_image_rmse": 0.22}
    cells = [
        {**shared, "attack": "published", "feature_cosine": 0.5, "rmse": 0.2, "ssim": 0.1, "seconds": 30.0},
        {**shared, "attack": "exact", "feature_cosine": 1.0, "rmse": 0.1, "ssim": 0.4, "seconds": 20.0},
    ]
    text = grids.feature_inversion(run("kariyappa2023_conv", metrics={}, tables={"evaluation": cells}))
    assert lines(text)[1:] == [
        ["Cocktail Party, published weights", "0.500", "0.200", "0.100", "30"],
        ["exact features, published total variation", "1.000", "0.100", "0.400", "20"],
        ["nearest public image", "", "0.170", "", ""],
        ["mean image", "", "0.220", "", ""],
    ]
    assert text.endswith("32 images in 8 batches.")
