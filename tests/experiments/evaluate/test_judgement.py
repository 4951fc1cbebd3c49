"""Limits of price, and errors of means, in the comparison of defenses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lit_recon.experiments.evaluate.judgement import levels, verdicts
from lit_recon.experiments.evaluate.page import scatter
from lit_recon.experiments.evaluate.results import CellResult, Evaluation, LeakageMetric
from lit_recon.experiments.evaluate.tables import attack_tables, equal_utility
from lit_recon.measures import MEASURES
from lit_recon.reporting.pages import TableCell
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar

#: Of all cells in these tests: nothing that the judgement reads.
REST = {"aware": None, "paper": None, "measures": {}, "reason": "", "applicable": True, "bound": {}}


def judged(prices: dict[float, float], limits: Sequence[float] = (0.02,), **metrics: Scalar) -> Evaluation:
    """A defense that costs `prices` by strength, and protects the better the larger its strength."""
    cells = []
    for strength, price in {None: 0.0, **prices}.items():
        name = "none" if strength is None else "noise"
        scored = {"rmse": 0.1 + 0.1 * (strength or 0), "baseline_nearest_public_rmse": 0.2, **metrics}
        for kind, found in (("utility", {"accuracy": 0.9 - price, "final_train_loss": 0.5}), ("attack", scored)):
            own = {"attack": "near" * (kind == "attack"), "batch_size": 4, "folder": Path(f"{kind}-{strength}")}
            cells.append(CellResult(kind=kind, defense=name, strength=strength, metrics=found, **own, **REST))
    words = {"near": "Near"}, {"noise": "noise"}
    return Evaluation(RunFolder(Path("grid")), {}, cells, *words, [*limits], [], {}, LeakageMetric(), MEASURES)


def test_every_limit_has_its_own_row() -> None:
    (table,) = equal_utility(judged({1.0: 0.01, 2.0: 0.04}, limits=[0.0, 0.01, 0.02, 0.5]))
    cells = [row[1] for row in table.rows if isinstance(row[1], TableCell)]
    assert [cell.text for cell in cells] == ["0.100", "0.200", "0.233", "> 0.300"]
    places = ["at no defense", "at 1", "at 1 to 2", "at 2"]
    assert [cell.small[0] for cell in cells] == places  # of a single batch: no interval
    assert "trained once" in table.lead


def test_images_of_one_batch_are_not_independent() -> None:
    """Two batches of 50 images: the error is that of two numbers, not of a hundred."""
    half = 12.706204736174698 * 0.03  # Student's t with one degree of freedom, times the error
    metrics: dict[str, Scalar] = {"n": 100, "n_batches": 2, "rmse_std": 0.05}
    ends: dict[str, Scalar] = {"rmse_low": 0.225 - half, "rmse_high": 0.225 + half}
    evaluation = judged({1.25: 0.01}, **metrics, **ends)
    assert [level.standard_error for level in levels(evaluation, 4)] == pytest.approx([0.03, 0.03], rel=1e-9)
    ((_, (said,)),) = verdicts(evaluation)
    assert "noise 1.25 stops the strongest attack" in said
    assert "RMSE 0.225 ± 0.030 against 0.200" in said
    assert "a margin within one standard error" in said
    drawn = scatter(evaluation, "svg")
    assert drawn != scatter(judged({1.25: 0.01}, **metrics), "svg")  # with bars, and without


def test_a_single_batch_leaves_the_error_unknown() -> None:
    evaluation = judged({1.25: 0.01}, n=100, n_batches=1, rmse_std=0.05)
    assert [level.standard_error for level in levels(evaluation, 4)] == [None, None]
    ((_, (said,)),) = verdicts(evaluation)
    assert "RMSE 0.225 ± unknown from one batch against 0.200" in said
    assert "standard error" not in said
    for table in (*equal_utility(evaluation), *attack_tables(evaluation)):
        assert "single batch" in table.lead
        assert not any("±" in text for row in table.rows for c in row if isinstance(c, TableCell) for text in c.small)
