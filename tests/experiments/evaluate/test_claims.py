"""No conclusion of a grid says more than its cells: what is missing, diverged, or measured once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lit_recon.experiments.evaluate.equal_utility import Strength, compare
from lit_recon.experiments.evaluate.judgement import levels, pareto_front, verdicts
from lit_recon.experiments.evaluate.results import CellResult, Evaluation, LeakageMetric
from lit_recon.experiments.evaluate.tables import attack_tables, comparisons, conclusions, csv_table, equal_utility
from lit_recon.measures import MEASURES, Measure
from lit_recon.reporting.pages import TableCell
from lit_recon.reporting.run_folder import RunFolder

Scores = Mapping[float | None, Mapping[str, float | str]]
NEAREST = 0.25


def evaluation(
    scores: Scores, accuracies: Mapping[float | None, list[float | None]], metric: LeakageMetric | None = None
) -> Evaluation:
    """A grid of one defense: by strength a metric, or the reason why there is none, of every attack, and trainings."""
    metric, cells = metric or LeakageMetric(), list[CellResult]()
    rest = {"aware": None, "paper": None, "measures": {}, "applicable": True, "bound": {}}

    def add(kind: str, strength: float | None, number: int, found: Mapping[str, float | None], **own: object) -> None:
        name = "none" if strength is None else "noise"
        given = {"attack": "", "batch_size": 1, "reason": "", **rest, **own}
        folder = Path("grid") / f"{kind}-{strength}-{number}"
        cells.append(CellResult(kind=kind, folder=folder, defense=name, strength=strength, metrics=found, **given))  # type: ignore[arg-type]  # of several types

    for strength, own in scores.items():
        for number, (attack, value) in enumerate(own.items()):
            if isinstance(value, str):
                add("attack", strength, number, {}, attack=attack, reason=value)
            else:
                found = {metric.key: value, f"baseline_nearest_public_{metric.key}": NEAREST}
                add("attack", strength, number, found, attack=attack)
    for strength, values in accuracies.items():
        for number, accuracy in enumerate(values):
            found = {} if accuracy is None else {"accuracy": accuracy, "final_train_loss": 0.5}
            add("utility", strength, number, found, repetition=number)
    titles = {attack: attack.title() for own in scores.values() for attack in own}
    measures = {**MEASURES, metric.key: metric.measure}
    return Evaluation(RunFolder(Path("grid")), {}, cells, titles, {"noise": "noise"}, [0.03], [], {}, metric, measures)


def said(found: Evaluation) -> str:
    return " ".join(sentence for _, sentences in conclusions(found, comparisons(found)) for sentence in sentences)


def test_without_results_of_no_defense_nothing_is_compared() -> None:
    found = evaluation(
        {None: {"near": "out of memory"}, 0.1: {"near": 0.1}, 1.0: {"near": 0.3}},
        {None: [0.9], 0.1: [0.89], 1.0: [0.88]},
    )
    assert comparisons(found) == []
    assert said(found) == "Not measured yet: no defense."


def test_a_loss_within_rounding_of_the_limit_is_that_of_its_strength() -> None:
    """0.90 - 0.89 is a little above 0.01, and the line comes back from a larger loss."""
    points = [
        Strength(None if n == 0 else float(n), [0.90 - accuracy], {"one": [0.1 * (n + 1)] * 2})
        for n, accuracy in enumerate((0.90, 0.87, 0.89))
    ]
    own = compare({"d": points}, 0.01)["d"]
    assert own.strengths == (2.0,)
    assert own.value == pytest.approx(0.3)
    more = compare({"d": [*points, Strength(3.0, [0.1], {"one": [0.5, 0.5]})]}, 0.01)["d"]
    assert more.strengths == (2.0,)


@pytest.mark.parametrize(
    ("metric", "plain", "behind", "shown"),
    [
        (LeakageMetric(MEASURES["ssim"]), 0.6, -0.045, "-0.045"),
        (LeakageMetric(Measure("log_mse", "log10 MSE", higher_is_better=False)), -4.1, -2.1, "-2.100"),
    ],
    ids=["ssim", "log_mse"],
)
def test_metrics_below_zero_keep_their_sign(metric: LeakageMetric, plain: float, behind: float, shown: str) -> None:
    found = evaluation({None: {"near": plain}, 1.0: {"near": behind}}, {None: [0.9], 1.0: [0.9]}, metric)
    if metric.key == "log_mse":  # nothing to be closer than
        found = replace(found, cells=[replace(one, metrics=_without_baseline(one)) for one in found.cells])
    [table] = equal_utility(found, comparisons(found))
    cell = table.rows[0][1]
    assert isinstance(cell, TableCell)
    assert cell.text.replace("\N{MINUS SIGN}", "-") == f"> {shown}"
    text = said(found).replace("\N{MINUS SIGN}", "-")
    assert f"({metric.measure.name} {shown})" in text
    assert f"without a defense {metric.measure.name} is {plain:.3f}" in text


@pytest.mark.parametrize(
    ("key", "value", "interval", "shown"),
    [
        ("feature_error", 0.83, (0.524, 1.165), "0.524 to 1.000"),
        ("label_accuracy", -0.4, (-1.1, 0.2), "0 to 100"),  # a metric that is better if higher has the other sign
        ("psnr", -4.67, (-11.3, 2.388), "-2.4 to 11.3"),
        ("rmse", 0.1, (-0.1, 0.3), "0.000 to 0.300"),
        ("log_mse", -0.5, (-1.5, 0.5), "-1.500 to 0.500"),
    ],
)
def test_intervals_at_equal_utility_end_where_the_metric_does(
    key: str, value: float, interval: tuple[float, float], shown: str
) -> None:
    metric = LeakageMetric(MEASURES.get(key, Measure(key, key, higher_is_better=False)))
    found = evaluation({None: {"near": 0.6}, 1.0: {"near": 0.5}}, {None: [0.9], 1.0: [0.9]}, metric)
    (compared,) = comparisons(found)
    own = replace(compared.found[0.03]["noise"], value=value, interval=interval)
    [table] = equal_utility(found, [compared._replace(found={0.03: {"noise": own}})])
    cell = table.rows[0][1]
    assert isinstance(cell, TableCell)
    assert cell.small[0].replace("\N{MINUS SIGN}", "-") == shown


def _without_baseline(cell: CellResult) -> dict[str, object]:
    return {name: value for name, value in cell.metrics.items() if not name.startswith("baseline")}


def test_the_front_is_that_of_costs_of_the_same_seeds() -> None:
    """The one seed of strength 0.5 is better than the other two, with every defense and without."""
    found = evaluation(
        {None: {"near": 0.05}, 0.1: {"near": 0.1}, 0.5: {"near": 0.2}, 0.9: {"near": 0.24}},
        {None: [0.9, 0.86, 0.85], 0.1: [0.89, 0.86, 0.85], 0.5: [0.88], 0.9: [0.895, 0.855, 0.845]},
    )
    front = pareto_front(levels(found, 1))
    assert [level.title for level in front] == ["no defense", "noise 0.1", "noise 0.9"]
    costs = [level.cost or 0.0 for level in front]
    assert costs == sorted(costs)


def test_a_single_batch_of_the_strongest_attack_decides_without_an_interval() -> None:
    none = Strength(None, [0.0], {"one": [0.1, 0.12], "few": [0.2]})
    sure = Strength(1.0, [0.01], {"one": [0.2, 0.22], "few": [0.4]})
    once = Strength(1.0, [0.01], {"one": [0.4, 0.42], "few": [0.3]})
    found = compare({"sure": [none, sure], "once": [none, once]}, 0.02)
    assert {name: own.interval for name, own in found.items()} == {"sure": None, "once": None}
    assert compare({"sure": [none, sure]}, 0.02)["sure"].interval is not None


def test_trainings_that_diverged_are_named() -> None:
    found = evaluation(
        {None: {"near": 0.1}, 1.0: {"near": 0.3}, 2.0: {"near": 0.4}},
        {None: [0.9, 0.9, 0.9], 1.0: [0.895, None, None], 2.0: [0.85]},
    )
    assert "Trainings without an accuracy: noise 1 (2 of 3)." in said(found)
    [table] = equal_utility(found, comparisons(found))
    assert "trained once" in table.lead  # those of no defense are no spread


@pytest.mark.parametrize("trained", [True, False])
def test_an_attack_without_a_result_stops_nothing(trained: bool) -> None:
    accuracies: dict[float | None, list[float | None]] = {None: [0.9], 1.0: [0.9]} if trained else {}
    scores: Scores = {None: {"weak": 0.2, "strong": 0.01}, 1.0: {"weak": 0.3, "strong": "out of memory"}}
    found = evaluation(scores, accuracies)
    assert [level.stops for level in levels(found, 1)] == [False, None]
    ((_, (verdict,)),) = verdicts(found)
    assert verdict == "Batch size 1: not known, as attacks that are applicable have no results."
    assert "Incomplete: noise (Strong missing)." in said(found)
    stronger = evaluation({**scores, 1.0: {"weak": 0.2, "strong": "out of memory"}}, accuracies)
    assert [level.stops for level in levels(stronger, 1)] == [False, False]
    assert "no strength of the grid stops" in verdicts(stronger)[0][1][0]


def test_a_run_without_the_metric_has_no_result() -> None:
    found = evaluation({None: {"near": 0.1, "far": 0.1}, 1.0: {"near": 0.3, "far": 0.3}}, {None: [0.9], 1.0: [0.9]})
    last = max(n for n, one in enumerate(found.cells) if one.attack == "far")
    why = "known for 3 of 4 images only"
    found.cells[last] = replace(found.cells[last], metrics={"rmse": None, "rmse_reason": why})
    assert "Incomplete: noise (Far missing)." in said(found)
    header, rows = csv_table(found)
    assert [row[header.index("reason")] for row in rows] == ["", "", "", why]
    [table] = attack_tables(found)
    cells = [cell for cell in table.rows[1] if isinstance(cell, TableCell)]
    assert why in [cell.reason for cell in cells]
