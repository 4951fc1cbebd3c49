"""The strongest attack on each defense, what a defense costs, and the verdicts on it."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lit_recon.experiments.evaluate.galleries import gallery_panels
from lit_recon.experiments.evaluate.judgement import levels, pareto_front, verdicts
from lit_recon.experiments.evaluate.page import build_evaluation, scatter
from lit_recon.experiments.evaluate.results import CellResult, Evaluation, LeakageMetric
from lit_recon.experiments.evaluate.tables import attack_tables, comparisons, conclusions, equal_utility
from lit_recon.measures import MEASURES
from lit_recon.reporting.pages import TableCell
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar, write_metrics
from tests.experiments.evaluate.conftest import LEAKAGE, NEAREST, change, entry, marks, rescore, texts

#: Of all cells in these tests: nothing that the judgement reads.
REST = {"aware": None, "paper": None, "measures": {}, "reason": "", "applicable": True, "bound": {}}


def judged(costs: dict[float, float], limits: Sequence[float] = (0.02,), **metrics: Scalar) -> Evaluation:
    """A defense that costs `costs` by strength, and protects the better the larger its strength."""
    cells = []
    for strength, cost in {None: 0.0, **costs}.items():
        name = "none" if strength is None else "noise"
        scored = {"rmse": 0.1 + 0.1 * (strength or 0), "baseline_nearest_public_rmse": 0.2, **metrics}
        for kind, found in (("utility", {"accuracy": 0.9 - cost, "final_train_loss": 0.5}), ("attack", scored)):
            own = {"attack": "near" * (kind == "attack"), "batch_size": 4, "folder": Path(f"{kind}-{strength}")}
            cells.append(CellResult(kind=kind, defense=name, strength=strength, metrics=found, **own, **REST))
    words = {"near": "Near"}, {"noise": "noise"}
    return Evaluation(RunFolder(Path("grid")), {}, cells, *words, [*limits], [], {}, LeakageMetric(), MEASURES)


def test_every_limit_has_its_own_row() -> None:
    evaluation = judged({1.0: 0.01, 2.0: 0.04}, limits=[0.0, 0.01, 0.02, 0.5])
    (table,) = equal_utility(evaluation, comparisons(evaluation))
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
    for table in (*equal_utility(evaluation, comparisons(evaluation)), *attack_tables(evaluation)):
        assert "single batch" in table.lead
        assert not any("±" in text for row in table.rows for c in row if isinstance(c, TableCell) for text in c.small)


def test_the_strongest_attack_is_the_one_that_comes_closest(evaluated: RunFolder) -> None:
    found = {level.title: level for level in levels(Evaluation.read(evaluated), 2)}
    winners = {title: level.strongest.attack for title, level in found.items() if level.strongest}
    assert winners == {
        "no defense": "far",
        "pruning 0.5": "near",
        "pruning 0.99": "near",
        "noise 0.1": "near",
        "noise 1": "near",
    }
    assert [level.value for level in found.values()] == [0.04, 0.06, 0.25, 0.15, 0.19]
    assert [level.stops for level in found.values()] == [False, False, True, False, False]
    assert [level.cost for level in found.values()] == pytest.approx([0.0, 0.0, 0.1, 0.02, None])
    assert found["no defense"].standard_error == pytest.approx(0.03)


def test_no_point_of_the_front_is_beaten_and_all_others_are(evaluated: RunFolder) -> None:
    points = levels(Evaluation.read(evaluated), 2)
    front = pareto_front(points)
    assert [level.title for level in front] == ["pruning 0.5", "noise 0.1", "pruning 0.99"]
    for level in points:
        if level.accuracy is None or level in front:
            continue
        assert any(
            (other.accuracy or 0) >= level.accuracy and (other.value or 0) >= (level.value or 0) for other in front
        )


def test_defenses_are_compared_at_equal_cost(evaluated: RunFolder) -> None:
    evaluation = Evaluation.read(evaluated)
    compared = comparisons(evaluation)
    table, honest = equal_utility(evaluation, compared)
    assert table.title.endswith("any server")
    assert honest.title.endswith("honest servers only")
    assert table.header == ["Points", "pruning", "noise"]
    # at two points: a fifth of the way from pruning 0.5 to 0.99, which costs ten; noise 1 has no cost, and so no >
    assert [texts(entries) for entries in honest.rows] == [["≤ 2", "0.098", "0.150"], ["≤ 20", "> 0.250", "0.150"]]
    assert [texts(entries) for entries in table.rows] == [["≤ 2", "0.098", "0.150"], ["≤ 20", "> 0.250", "0.150"]]
    assert table.lead.endswith(
        "> stands where the largest strength of the grid costs less. Each strength was trained once, "
        "so that the chance of training is not in the intervals. Left out, without an accuracy: noise 1. "
        "Without the results of some attacks: noise 0.1."
    )
    assert "some attacks" not in honest.lead
    assert [marks(entries).index("ours") for entries in table.rows] == [2, 1]
    first = table.rows[0][1]
    assert isinstance(first, TableCell)
    assert first.small[1] == "at 0.5 to 0.99"
    ((title, said),) = conclusions(evaluation, compared)
    assert title == "Batch size 2"
    assert len(said) == 3
    assert said[0] == (
        "As far as measured, against any server, noise protects best at a cost of at most 2 points (RMSE 0.150, best "
        "in 100 % of the draws); pruning protects best at a cost of at most 20 points (0.250, best in 100 %); without "
        "a defense RMSE is 0.040."
    ).replace(" %", "\N{NO-BREAK SPACE}%")
    honest_said = "As far as measured, against honest servers, noise protects best at a cost of at most 2 points (RMSE "
    assert said[1].startswith(honest_said)
    assert said[1].endswith("; without a defense RMSE is 0.050.")
    assert said[2] == "Incomplete: noise 0.1 (Far missing); noise 1 (accuracy missing)."


def test_attacks_that_fail_without_a_defense_rank_nothing(evaluated: RunFolder) -> None:
    for path in evaluated.path.glob("cells/none_None-*/metrics.json"):
        write_metrics(RunFolder(path.parent), {**json.loads(path.read_text()), "rmse": NEAREST + 0.01})
    evaluation = Evaluation.read(evaluated)
    ((_, (every, honest, _)),) = conclusions(evaluation, comparisons(evaluation))
    said = "nothing is known: without a defense no attack is better than the nearest public image."
    start = "As far as measured, against"
    assert (every, honest) == (f"{start} any server, {said}", f"{start} honest servers, {said}")


def test_comparisons_are_repeated_without_an_attack(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    evaluated.grid.write_text(json.dumps({**content, "malicious": [], "without": ["far"]}))
    evaluation = Evaluation.read(evaluated)
    assert [side.words for side in evaluation.sides] == ["", ", without Far"]
    weaker = [level.value for level in levels(evaluation, 2, evaluation.sides[1].barred)]
    assert weaker == [0.05, 0.06, 0.25, 0.15, 0.19]
    assert [table.title for table in equal_utility(evaluation, comparisons(evaluation))] == [
        "At equal utility, batch size 2",
        "At equal utility, batch size 2, without Far",
    ]
    ((_, (all_of_them, others, _)),) = conclusions(evaluation, comparisons(evaluation))
    said = "noise protects best at a cost of at most 2 points (RMSE 0.150, best in "
    assert all_of_them.startswith(f"As far as measured, {said}")
    assert all_of_them.endswith("; without a defense RMSE is 0.040.")
    assert others.startswith(f"As far as measured, without Far the conclusion would be: {said}")
    assert others.endswith("; without a defense RMSE is 0.050.")


def test_repeated_trainings_give_a_mean_and_a_spread(evaluated: RunFolder) -> None:
    content = json.loads(evaluated.grid.read_text())
    for level, accuracy in ((("none", None), 0.88), (("noise", 0.1), 0.82)):
        place = f"utility/{level[0]}_{level[1]}-r1-0123abcd"
        write_metrics(
            RunFolder.open(evaluated.path / place, "seed: 1"), {"accuracy": accuracy, "final_train_loss": 0.7}
        )
        content["cells"].append({**entry("utility", place, *level), "repetition": 1, "paper": 0.39})
    evaluated.grid.write_text(json.dumps(content))
    evaluation = Evaluation.read(evaluated)
    assert evaluation.utility("none", None, "accuracy") == pytest.approx(0.89)
    assert evaluation.utility_spread("none", None, "accuracy") == pytest.approx(0.01 * 2**0.5)
    assert evaluation.utility_spread("prune", 0.5, "accuracy") is None
    found = {level.title: level for level in levels(evaluation, 2)}
    assert found["pruning 0.99"].cost == pytest.approx(0.1)  # against the training with its own seed
    assert found["pruning 0.99"].cost_error is None
    assert found["noise 0.1"].cost == pytest.approx((0.02 + 0.06) / 2)
    assert found["noise 0.1"].cost_error == pytest.approx(0.02)
    row = attack_tables(evaluation)[0].rows[0]
    accuracy, loss = row[-4], row[-2]
    assert isinstance(accuracy, TableCell)
    assert isinstance(loss, TableCell)
    assert (accuracy.text, accuracy.small) == ("89.0\u00a0%", ["± 1.4"])
    assert (loss.text, loss.small) == ("0.6", ["paper 0.39"])


def test_verdicts_say_what_stops_the_strongest_attack_and_what_it_costs(evaluated: RunFolder) -> None:
    said = dict(verdicts(Evaluation.read(evaluated)))
    (pruning,), (noise,) = said["pruning"], said["noise"]
    assert "pruning 0.99 stops the strongest attack, Near" in pruning
    assert "RMSE 0.250 ± 0.030 against 0.200" in pruning
    assert "costs 10.0 percentage points of accuracy" in pruning
    assert "no strength of the grid stops" in noise
    assert "noise 1" in noise
    assert "its cost was not measured" in noise


@pytest.mark.parametrize(("margin", "close"), [(0.025, True), (0.035, False)])
def test_a_margin_within_the_error_is_called_so(evaluated: RunFolder, margin: float, close: bool) -> None:
    content = json.loads(evaluated.grid.read_text())
    place = next(c["folder"] for c in content["cells"] if c["attack"] == "near" and c["strength"] == 0.99)
    metrics = json.loads((evaluated.path / place / "metrics.json").read_text())
    write_metrics(RunFolder(evaluated.path / place), {**metrics, "rmse": NEAREST + margin})
    said = dict(verdicts(Evaluation.read(evaluated)))["pruning"][0]
    assert "pruning 0.99 stops" in said
    assert ("within one standard error" in said) == close


@pytest.mark.parametrize("guess", [0.35, None])
def test_where_no_attack_is_applicable_the_mean_public_image_is_left(guess: float | None) -> None:
    known = {} if guess is None else {"baseline_mean_image_rmse": guess}
    evaluation = judged({0.5: 0.01, 1.0: 0.03}, limits=[0.02, 0.1], **known)
    last = evaluation.cells[-1]
    refused = replace(last, applicable=False, metrics={}, reason="there is nothing to match")
    evaluation = replace(evaluation, cells=[*evaluation.cells[:-1], refused])
    level = levels(evaluation, 4)[-1]
    assert (level.value, level.stops, level.attack) == (guess, True, "none")
    ((_, (said,)),) = verdicts(evaluation)
    assert said.endswith("behind noise 1 no attack is applicable, and costs 3.0 percentage points of accuracy.")
    (compared,) = comparisons(evaluation)
    (panel,) = equal_utility(evaluation, [compared])
    half = "0.150" if guess is None else "0.250"  # half way between the strengths
    assert [texts(row)[1] for row in panel.rows] == [
        f"{'> ' * (guess is None)}{half}",
        "> 0.350" if guess else "> 0.150",
    ]
    every = [replace(cell, applicable=cell.kind == "utility", metrics=cell.metrics) for cell in evaluation.cells]
    nowhere = [replace(cell, metrics={}) if cell.kind == "attack" else cell for cell in every]
    levels_of_none = levels(replace(evaluation, cells=nowhere), 4)  # without a defense either
    assert {(level.value, level.stops) for level in levels_of_none} == {(None, None)}
    assert dict(verdicts(replace(evaluation, cells=nowhere)))["noise"][0].endswith("no attack on it has results.")
    counts = "No attack is applicable, so that the mean public image counts"
    assert panel.lead.endswith(f"{counts if guess else 'Left out, as no attack is applicable'}: noise 1.")


def test_images_of_attacks_on_other_networks_say_nothing_about_the_grid_s() -> None:
    """They may have data of their own, whose nearest public and mean image are others."""
    evaluation = judged({0.5: 0.01, 1.0: 0.03}, limits=[0.1], baseline_mean_image_rmse=0.35)
    refused = replace(evaluation.cells[-1], applicable=False, metrics={}, reason="there is nothing to match")
    evaluation = replace(evaluation, cells=[*evaluation.cells[:-1], refused])
    others: dict[str, Scalar] = {"rmse": 0.01, "baseline_nearest_public_rmse": 0.7, "baseline_mean_image_rmse": 0.9}
    apart = [replace(cell, attack="own", metrics=others) for cell in evaluation.attacked if cell.applicable]
    for cells in [*apart, *evaluation.cells], [*evaluation.cells, *apart]:
        both = replace(evaluation, cells=cells, networks={"own": "its own MLP"})
        assert [level.value for level in levels(both, 4)] == [level.value for level in levels(evaluation, 4)]
        assert comparisons(both) == comparisons(evaluation)
        assert "nearest public image 0.200, mean image 0.350" in attack_tables(both)[0].lead


def test_a_mean_public_image_without_values_by_batch_gives_no_interval(evaluated: RunFolder) -> None:
    """Of metrics other than RMSE its mean over all images alone is known."""
    for attack in ("near", "far"):
        place = f"cells/prune_0.99-{attack}-b2-0123abcd"
        shutil.rmtree(evaluated.path / place)
        why = {"reason": "there is nothing to match", "applicable": False}
        evaluated.failure(place).write_text(json.dumps({**why, "traceback": ""}))
    for path in evaluated.path.glob("cells/*/metrics.json"):
        known = {"psnr": 20.0, "baseline_mean_image_psnr": 10.0, "baseline_mean_image_rmse": 0.3}
        write_metrics(RunFolder(path.parent), {**json.loads(path.read_text()), **known})
    for metric, value in ("rmse", 0.25), ("psnr", -10.0):
        change(evaluated, metric=metric)
        any_server, *_ = comparisons(Evaluation.read(evaluated))
        found = any_server.found[0.2]["prune"]
        assert found.strengths == (0.99,)
        assert (found.interval is None) == (metric == "psnr")
        assert found.value == pytest.approx(value)


def test_servers_are_told_apart(evaluated: RunFolder) -> None:
    # the malicious one alone breaks noise 1
    rescore(evaluated, "noise", 1.0, "near", 0.21)
    rescore(evaluated, "noise", 1.0, "far", 0.03)
    said = dict(verdicts(Evaluation.read(evaluated)))
    assert len(said["pruning"]) == 1
    every, honest = said["noise"]
    assert (
        "Batch size 2: no strength of the grid stops the strongest attack. The strongest protection is noise 0.1"
        in every
    )
    assert "Batch size 2, honest servers only: noise 1 stops the strongest attack, Near" in honest
    build_evaluation(evaluated.path)
    figures = json.loads(evaluated.metrics.read_text())
    assert (figures["strongest.noise_1.b2"], figures["strongest_honest.noise_1.b2"]) == ("far", "near")
    assert (figures["stops.noise_1.b2"], figures["stops_honest.noise_1.b2"]) == (False, True)
    rows = list(csv.DictReader(evaluated.table.read_text().splitlines()))
    assert sum(row["strongest_honest"] == "true" for row in rows) == 5
    assert {row["attack"] for row in rows if row["strongest_honest"] == "true"} == {"near"}


def test_attacks_that_know_batch_statistics_are_told_apart(evaluated: RunFolder) -> None:
    # the one that knows them alone breaks pruning 0.99, and noise is broken by both
    rescore(evaluated, "prune", 0.99, "far", 0.03)
    change(evaluated, malicious=[], batch_statistics=["far"])
    evaluation = Evaluation.read(evaluated)
    assert [side.title for side in evaluation.sides] == ["", "servers without batch statistics"]
    (table,) = attack_tables(evaluation)
    assert table.header[1:3] == ["Near", "Far, knows batch statistics"]
    said = dict(verdicts(evaluation))
    every, uninformed = said["pruning"]
    assert "Batch size 2: no strength of the grid stops the strongest attack." in every
    assert "Batch size 2, servers without batch statistics only: pruning 0.99 stops the strongest attack" in uninformed
    assert "Some attackers know the BatchNorm statistics of" in build_evaluation(evaluated.path).read_text()
    figures = json.loads(evaluated.metrics.read_text())
    place = "prune_0.99.b2"
    assert (figures[f"strongest.{place}"], figures[f"strongest_no_statistics.{place}"]) == ("far", "near")


@pytest.mark.parametrize("attacks", [["near", "far"], []])
def test_where_all_or_none_know_batch_statistics_none_are_told_apart(evaluated: RunFolder, attacks: list[str]) -> None:
    change(evaluated, malicious=[], batch_statistics=attacks)
    assert [side.title for side in Evaluation.read(evaluated).sides] == [""]


def test_honest_servers_alone_need_no_second_verdict(evaluated: RunFolder) -> None:
    change(evaluated, malicious=[])
    assert all(len(sentences) == 1 for _, sentences in verdicts(Evaluation.read(evaluated)))
    (table,) = attack_tables(Evaluation.read(evaluated))
    assert table.header[1:3] == ["Near", "Far"]


def test_an_attack_on_a_network_of_its_own_is_out_of_competition(evaluated: RunFolder) -> None:
    change(evaluated, networks={"far": "its own MLP(hidden=[4])"})
    evaluation = Evaluation.read(evaluated)
    (table,) = attack_tables(evaluation)
    assert table.header[2] == "Far, malicious server, on its own MLP(hidden=[4])"
    assert texts(table.rows[0])[2] == "0.040"
    assert {level.strongest.attack for level in levels(evaluation, 2) if level.strongest} == {"near"}
    assert "not compared: Far" in build_evaluation(evaluated.path).read_text()


def test_the_page_says_which_defense_was_trained_on_another_network(evaluated: RunFolder) -> None:
    assert "that alone costs" not in build_evaluation(evaluated.path).read_text()
    change(evaluated, trainings={"noise": "trunk.init_args.norm group"})
    said = "Networks behind noise are trained with trunk.init_args.norm group; the cost includes what that alone costs."
    assert said in build_evaluation(evaluated.path).read_text()


def test_another_figure_has_its_own_direction(evaluated: RunFolder) -> None:
    for attack, psnr, nearest in (("near", 30.0, 15.0), ("far", 10.0, 15.0)):
        rescore(evaluated, "none", None, attack, psnr, "psnr", nearest)
    for attack, psnr in (("near", 12.0), ("far", 14.0)):
        rescore(evaluated, "noise", 1.0, attack, psnr, "psnr", 15.0)
    change(evaluated, metric="psnr")
    evaluation = Evaluation.read(evaluated)
    found = {level.title: level for level in levels(evaluation, 2)}
    assert found["no defense"].strongest is not None
    assert found["no defense"].strongest.attack == "near"
    assert found["noise 1"].value == 14.0
    assert (found["no defense"].stops, found["noise 1"].stops) == (False, True)
    page = build_evaluation(evaluated.path).read_text()
    assert "<h2>PSNR, batch size 2</h2>" in page
    assert "is below that of the nearest public image" in page
    assert json.loads(evaluated.metrics.read_text())["psnr.noise_1.0.far.b2"] == 14.0


def test_features_have_neither_images_nor_a_nearest_public_one(evaluated: RunFolder) -> None:
    for (defense, strength), (near, far) in LEAKAGE.items():
        for attack, error in (("near", near), ("far", far)):
            if error is not None:
                rescore(evaluated, defense, strength, attack, 2 * error, "feature_error")
    change(evaluated, metric="feature_error")
    evaluation = Evaluation.read(evaluated)
    (pruning, *_), (noise, *_) = (dict(verdicts(evaluation))[name] for name in ("pruning", "noise"))
    assert "the strongest protection is pruning 0.99, where Near reaches a feature error of 0.500" in pruning
    assert "against 0.080" in pruning
    assert "noise 1" in noise
    assert {level.stops for level in levels(evaluation, 2)} == {None}
    assert gallery_panels(evaluation) == []
    page = build_evaluation(evaluated.path).read_text()
    assert "nearest public image" not in page
    assert "<h2>Feature error, batch size 2</h2>" in page
