"""Tables of the study of Liu et al.'s setting, from records of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import pictures, study
from benchmarks.docs.fidelity import liu2025
from benchmarks.docs.figures import Figures
from benchmarks.docs.marks import NOT_MEASURED
from benchmarks.docs.tables import configuration
from tests.benchmarks.test_docs_fidelity import find, keep
from tests.benchmarks.test_docs_tables import lines, run

#: Strengths of clipping in the grid, accuracies by repetition, and RMSE of two batches by attack.
CLIPPING = (8, 4, 2)


def part(defense: str, strength: float | None, accuracies: list[float], errors: dict[str, list[float]]) -> Any:
    """The record of one strength."""
    level = {"defense": defense} | ({} if strength is None else {"strength": strength})
    trainings = [
        {**level, "repetition": number, "accuracy": value, "final_train_loss": 1.5 + number, "seconds": 1800.0}
        for number, value in enumerate(accuracies)
    ]
    batches = [
        {
            **level,
            "attack": attack,
            "batch_size": 1,
            "batch": number,
            "value": value,
            "mean_image": 0.21 + 0.02 * number,
        }
        for attack, values in errors.items()
        for number, value in enumerate(values)
    ]
    name = f"liu2025_table4_small_{defense}_{strength}"
    cells = [
        {**level, "attack": attack, "batch_size": 1, "n": 2, "nearest_public_rmse": 0.17, "mean_image_rmse": 0.22}
        | {"seconds": 600.0}
        for attack in errors
    ]
    tables = {"utility": trainings, "batches": batches, "evaluation": cells}
    return run(name, tables=tables, cpu_seconds=3600.0) | {"created": "2026-01-02"}


@pytest.fixture
def parts() -> list[Any]:
    errors = {"feature_maps": [0.001, 0.003], "geiping2020": [0.1, 0.1], "fowl2021": [1e-6, 1e-6]}
    found = [part("none", None, [0.40, 0.42], errors)]
    for number, strength in enumerate(CLIPPING):
        worse = {name: [value * (number + 2) for value in values] for name, values in errors.items()}
        found.append(part("clip", strength, [0.39 - 0.02 * number, 0.41 - 0.02 * number], worse))
    return [found[0], *reversed(found[1:])]  # parts are measured in any order


def test_attacks_stand_beside_the_papers(parts: list[Any]) -> None:
    # what was measured again counts once
    start, table, spent = study.attacks([*parts, parts[0]]).split("\n\n")
    assert spent.startswith("The attacks took 2 hours of one core and the trainings 4, each counted once")
    assert start == "Of 2 images; the nearest public image has 0.170, the mean image 0.220:"
    header, plain, first, *_ = lines(table)
    assert header[0] == "defense"
    plain_cells, cells = dict(zip(header, plain, strict=True)), dict(zip(header, first, strict=True))
    assert plain_cells["exact maps"] == "*0.002*"  # the strongest of an honest server
    assert plain_cells["Robbing the Fed"] == "**1e-6**"
    assert plain_cells["accuracy"] == "41.0 % ± 1.4 %"
    assert plain_cells["training loss"] == "2.00 ± 0.71"
    assert cells["defense"] == "clipping 8"
    assert cells["gradient inversion"] == "0.200 (0.21 to 0.25)"
    assert cells["deep image prior and features"] == "– (0.16 to 0.19)"
    assert cells["training loss"] == "2.00 ± 0.71 (0.329 to 0.377)"


def test_it_is_told_which_machine_trained_the_generator_of_a_cell(parts: list[Any]) -> None:
    def measured(device: str, defense: str, strength: float | None, rmse: float) -> Any:
        return part(defense, strength, [], {"jeon2021": [rmse, rmse]}) | {"device": device}

    one = [measured("EPYC", "none", None, 0.2), measured("EPYC", "clip", 8, 0.3), measured("EPYC", "clip", 4, 0.3)]
    *_, spent = study.attacks([*parts, *one]).split("\n\n")
    assert "generator" not in spent
    other = [measured("Xeon", "none", None, 0.1), measured("Xeon", "clip", 2, 0.15)]
    *_, told = study.attacks([*parts, *one, *other]).split("\n\n")
    assert told == (
        "Each machine trained a generator of its own: without a defense the generative prior has 0.200 on EPYC, 0.100 "
        "on Xeon. It was measured behind clipping 2 on Xeon; behind the other defenses on EPYC."
    )


def test_bounds_have_a_column_where_there_are_any(parts: list[Any]) -> None:
    assert "lower bound" not in study.attacks(parts)
    errors = {"feature_maps": [0.001, 0.003], "fowl2021": [1e-6, 1e-6]}
    bounded = part("clip", 8, [], errors)
    for row, bound in zip(bounded["rows"][0]["tables"]["evaluation"], (0.0005, 0.5), strict=True):
        row["bound_rmse"] = bound  # that of Robbing the Fed is of a modified network
    header, plain, first, *_ = lines(study.attacks([*parts, bounded]))
    at = header.index("lower bound")
    assert (plain[at], first[0], first[at]) == ("–", "clipping 8", "5e-4")


def test_equal_cost_is_told_with_and_without_the_new_attack(parts: list[Any]) -> None:
    text = study.small_cost(parts)
    honest, without, every = text.split("cost, points at most")[1:]
    assert "| 1 | **0.004** (at 8" in honest  # one point is what the weakest strength costs
    assert "| 2 | **0.005** (at 8 to 4" in honest  # half way to the next
    assert "| 10 | **> 0.008** (at 2" in honest
    assert "| 1 | **0.200** (at 8" in without
    assert "| 1 | **2e-6** (at 8" in every
    assert "best in" not in text  # of one


def test_attacks_that_know_batch_statistics_are_left_out_once_more(parts: list[Any]) -> None:
    """One that is nearer than all other honest ones and knows these statistics."""
    levels: list[tuple[str, float | None]] = [("none", None), *(("clip", strength) for strength in CLIPPING)]
    told = [part(*level, [], {"liu2025": [1e-4 * (number + 1)] * 2}) for number, level in enumerate(levels)]
    honest, uninformed, without, every = study.small_cost([*parts, *told]).split("cost, points at most")[1:]
    assert "| 10 | **> 4e-4** (at 2" in honest
    assert "| 10 | **> 0.008** (at 2" in uninformed
    assert "| 10 | **> 4e-4** (at 2" in without
    assert "| 10 | **> 4e-6** (at 2" in every


def test_attacks_that_the_grid_does_not_have_do_not_count(parts: list[Any]) -> None:
    strange = part("clip", 8, [], {"another": [0.0, 0.0]})
    assert study.small_cost([*parts, strange]) == study.small_cost(parts)
    assert study.attacks([*parts, strange]) == study.attacks(parts)
    drawn = [
        [list(series.y) for plot in study.cost_plots(own) for series in plot.series]
        for own in (parts, [*parts, strange])
    ]
    assert drawn[0] == drawn[1]


def test_of_several_defenses_the_best_is_named_with_how_sure_that_is(parts: list[Any]) -> None:
    """Local steps of the same accuracies as clipping, and worse attacks."""
    errors = {"feature_maps": [0.5, 0.5], "geiping2020": [0.6, 0.6], "fowl2021": [0.5, 0.5]}
    others = [part("local_steps", steps, [0.39, 0.41], errors) for steps in (3, 5)]
    honest = study.small_cost([*parts, *others]).split("cost, points at most")[1]
    clipping, steps = honest.splitlines()[2].split("|")[2:4]
    assert "best in 0 %" in clipping
    assert "**" in steps
    assert "best in 100 %" in steps


def test_defenses_are_ranked_with_and_without_the_new_attack(parts: list[Any]) -> None:
    assert study.ranking(parts[:-1]) == NOT_MEASURED
    errors = {"feature_maps": [5e-4, 5e-4], "geiping2020": [0.6, 0.6], "fowl2021": [0.5, 0.5]}
    others = [part("local_steps", steps, [0.41, 0.41], errors) for steps in (3, 5)]
    header, *rows = lines(study.ranking([*parts, *others]))
    names = ["without exact maps", "with exact maps"]
    assert header == ["cost, points at most", *names, "with exact maps, statistics of the batch not known"]
    assert len(rows) == 4
    for _, without, whole, uninformed in rows:
        assert uninformed == whole  # no attack of these records knows them
        assert without.replace("> ", "").startswith("**local steps 0.600**; clipping 0.")
        assert whole.startswith("**clipping")
        assert whole.replace("> ", "").endswith("; local steps 0.002")  # that of no defense
    knowing = {"liu2025": [1e-5, 1e-5]}  # an attack with the statistics of the batch
    plain = {"feature_maps": [0.001, 0.003], "geiping2020": [0.1, 0.1], "fowl2021": [1e-6, 1e-6]}
    told = [part("local_steps", steps, [0.41, 0.41], errors | knowing) for steps in (3, 5)]
    undefended = part("none", None, [0.40, 0.42], plain | knowing)
    for before, after in zip(rows, lines(study.ranking([undefended, *parts[1:], *told]))[1:], strict=True):
        assert after[3] == before[3]
        assert "local steps 1e-5" in after[2].replace("> ", "")


def test_the_plot_has_the_points_of_the_tables(parts: list[Any]) -> None:
    without, whole = study.cost_plots(parts)
    assert (without.title, whole.title) == ("honest servers, without exact maps", "honest servers, with exact maps")
    assert whole.levels == {"nearest public image": pytest.approx(0.17)}
    for plot, start in ((without, 0.1), (whole, 0.002)):
        clipping, *_, front = plot.series
        assert clipping.name == "clipping"
        assert list(clipping.labels) == ["8", "4", "2"]
        assert list(clipping.x) == pytest.approx([1.0, 3.0, 5.0])
        assert list(clipping.y) == pytest.approx([2 * start, 3 * start, 4 * start])
        assert list(clipping.x_errors) == pytest.approx([0.0] * 3, abs=1e-9)  # the same loss in both trainings
        assert list(front.x) == pytest.approx([1.0, 3.0, 3.0, 5.0, 5.0])
        assert list(front.y) == pytest.approx([2 * start, 2 * start, 3 * start, 3 * start, 4 * start])
    assert list(without.series[0].errors) == pytest.approx([0.0] * 3, abs=1e-9)
    assert list(whole.series[0].errors) == pytest.approx([0.002, 0.003, 0.004])  # of two batches


def test_pictures_of_other_records_are_noticed(parts: list[Any], tmp_path: Path) -> None:
    class Given(Figures):
        def __init__(self, records: list[Any]) -> None:
            self.records = records

        def find(self, name: str) -> list[Any]:
            return self.records

    assert pictures.outdated(Given(parts), tmp_path) == [*pictures.PICTURES]
    pictures.write(Given(parts), tmp_path)
    assert pictures.outdated(Given(parts), tmp_path) == []
    first = (tmp_path / "liu2025_cost.svg").read_bytes()
    assert first.startswith(b"<?xml")
    others = [*parts, part("local_steps", 3, [0.39, 0.41], {"geiping2020": [0.5, 0.5]})]
    assert pictures.outdated(Given(others), tmp_path) == ["liu2025_cost.svg"]
    pictures.write(Given(others), tmp_path)
    assert (tmp_path / "liu2025_cost.svg").read_bytes() != first


def test_the_pictures_of_the_pages_are_of_the_records() -> None:
    assert pictures.outdated(Figures()) == []


def test_what_was_measured_again_counts_once(parts: list[Any]) -> None:
    """A part with one training, and later with two and the same attacks."""
    earlier = part("clip", 8, [0.1], {"feature_maps": [0.5, 0.5]}) | {"created": "2026-01-01"}
    for records in ([earlier, *parts], [*parts, earlier]):
        told, expected = (study.attacks(some).split("\n\n")[:-1] for some in (records, parts))
        assert told == expected


def test_a_defense_is_compared_once_all_its_strengths_are_measured(parts: list[Any]) -> None:
    assert "clipping" in study.small_cost(parts)
    assert study.small_cost(parts[:-1]) == NOT_MEASURED
    assert study.small_cost(parts[1:]) == NOT_MEASURED  # nothing without a defense


def test_a_strength_at_which_no_attack_of_a_side_works_leaves_the_mean_image(parts: list[Any]) -> None:
    tables = parts[-1]["rows"][0]["tables"]
    assert {row["strength"] for row in tables["evaluation"]} == {CLIPPING[0]}
    for row in tables["evaluation"]:
        if row["attack"] != "fowl2021":
            row |= {"applicable": "false", "reason": "the update is zero"}
    tables["batches"] = [row for row in tables["batches"] if row["attack"] == "fowl2021"]
    honest, *_, every = study.small_cost(parts).split("cost, points at most")[1:]
    assert "| 1 | **0.220** (at 8" in honest
    assert "| 1 | **2e-6** (at 8" in every
    plot = study.cost_plots(parts)[1]
    assert plot.series[0].y[0] == pytest.approx(0.22)
    tables["evaluation"][0] |= {"applicable": "true", "reason": "not run yet"}
    assert study.small_cost(parts).count("cost, points at most") == 2  # honest servers are not told


def test_the_verdict_names_what_the_new_attack_changes_and_what_is_missing(parts: list[Any]) -> None:
    ran = parts[-1]["rows"][0]["tables"]["evaluation"]
    for record in parts[:-1]:  # a part lists the cells of the whole grid
        rows = record["rows"][0]["tables"]["evaluation"]
        rows += [{**row, "reason": "not run yet", "applicable": "true"} for row in ran]
    for records in (parts, parts[::-1]):
        verdict = study.small_cost(records).split("\n\n")[0]
        honest, without, every, *rest = verdict.split(". ")
        assert honest == (
            "As far as measured, against honest servers, clipping, the only defense compared, does better than none at "
            "a cost of at most 1 point (RMSE 0.004), 2 points (0.005), 5 points (0.008) and 10 points (0.008); without "
            "a defense RMSE is 0.002"
        )
        assert without.startswith("As far as measured, without exact maps the conclusion for honest servers would be: ")
        assert without.endswith("without a defense RMSE is 0.100")
        assert every.startswith("As far as measured, against any server, clipping, the only defense compared, does ")
        prior = "deep image prior and features"
        others = f"{prior}, tuned {prior}, generative prior and Cocktail Party on features missing"
        unmeasured, incomplete = rest
        assert unmeasured == (
            "Not measured yet: gradient dropout; Gaussian noise; pruning; local steps; DP-SGD (C = 1), noise; optimal "
            "gradient noise; optimal gradient pruning"
        )
        assert incomplete == f"Incomplete: no defense ({others}); clipping ({others})."


def test_two_settings_of_an_attack_stand_side_by_side() -> None:
    shared = {"n": 2.0, "nearest_public_rmse": 0.17, "mean_image_rmse": 0.22, "batch_size": 1}
    first = [
        {**shared, "defense": "none", "attack": "liu2025", "rmse": 0.12, "ssim": 0.5},
        {**shared, "defense": "none", "attack": "liu2025_tuned", "rmse": 0.02, "ssim": 0.9},
        {"defense": "noise", "strength": 0.1, "attack": "liu2025", "batch_size": 1, "reason": "not run yet"},
    ]
    later = [{**shared, "defense": "noise", "strength": 0.1, "attack": "liu2025", "rmse": 0.13, "ssim": 0.4}]
    records = [
        run(f"liu2025_tuned_{number}", tables={"evaluation": cells}) | {"created": f"2026-01-0{number}"}
        for number, cells in ((1, first), (2, later))
    ]
    start, table = study.tuned(records).split("\n\n")
    assert start == "Of 2 images; the nearest public image has RMSE 0.170, the mean image 0.220:"
    assert lines(table) == [
        ["defense", "`liu2025`, RMSE", "`liu2025`, SSIM", "`liu2025_tuned`, RMSE", "`liu2025_tuned`, SSIM"],
        ["no defense", "0.120", "0.500", "0.020", "0.900"],
        ["Gaussian noise 0.1", "0.130", "0.400", "–", "–"],
    ]


def test_settings_were_chosen_on_development_images_with_enough_iterations() -> None:
    tuning = configuration("evaluate/liu2025_tuning.yaml")
    assert tuning["victims"]["pool"] == "development"
    attacks = tuning["attacks"]
    assert len(attacks) == 7
    assert all(one["settings"]["attack"]["init_args"]["steps"] >= 2000 for one in attacks.values())
    published, tuned = (configuration(f"attack/{name}.yaml") for name in ("liu2025", "liu2025_tuned"))
    statistics = tuned["attack"]["init_args"]["priors"][1]["init_args"]
    chosen = attacks["statistics"]["settings"]["attack"]["init_args"]["priors"][1]["init_args"]
    assert statistics == chosen
    # nothing else differs from the paper's letter
    statistics["weight"] = published["attack"]["init_args"]["priors"][1]["init_args"]["weight"]
    assert {**tuned, "name": published["name"]} == published


def test_figure_3_is_told_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(*errors: str) -> str:
        header = "| cost, points at most | clipping | gradient dropout | Gaussian noise | pruning |"
        return f"{header}\n| --- | --- | --- | --- | --- |\n| 1 | {' | '.join(errors)} |"

    honest, old, every = table("0", "0", "**1**", "0"), table("0", "0", "0", "**1**"), table("0", "**1**", "0", "0")
    sides = {"Honest servers": honest, "Honest servers, without exact maps": old, "Any server": every}
    text = "\n\n".join(["verdict", *(f"{side}:\n\n{own}" for side, own in sides.items())])
    monkeypatch.setattr(liu2025.study, "equal_cost", lambda records, name: text)
    keep(tmp_path, "liu2025_table4_small_none", [])
    items = [item for item in liu2025.ITEMS if item.where == "figure 3" and not item.other_data]
    assert [find(Figures(tmp_path), item).text for item in items] == [
        "gradient dropout at 1",
        "Gaussian noise at 1",
        "pruning at 1",
    ]
    monkeypatch.setattr(liu2025.study, "equal_cost", lambda records, name: f"verdict\n\n{every}")
    assert [item.find(Figures(tmp_path)) is None for item in items] == [False, True, True]


def test_the_study_attacks_with_the_settings_of_the_attack() -> None:
    def attacks(settings: Any) -> list[Any]:
        found: list[Any] = settings["attack"]["init_args"]["attacks"]
        return found

    own = attacks(configuration("evaluate/liu2025_table4_small.yaml")["attacks"]["feature_maps"]["settings"])
    alone = attacks(configuration("attack/feature_maps.yaml"))
    # but for the last, which makes way to features as well, for fewer iterations
    assert own[:-1] == alone[:-1]
    assert own[-1]["init_args"]["steps"] < alone[-1]["init_args"]["steps"]


@pytest.mark.parametrize("name", ["geiping2020", "liu2025", "liu2025_train", "liu2025_tuned"])
def test_errors_beside_a_run_are_those_under_the_weakest_pruning_and_dropping(name: str) -> None:
    paper = configuration(f"attack/{name}.yaml")["paper"]
    assert "under the weakest pruning and dropping of gradients" in " ".join(paper["note"].split())
    rows = liu2025.TABLE_4[name if name in liu2025.TABLE_4 else "liu2025"]
    weakest = [n for n, column in enumerate(liu2025.COLUMNS) if column[:2] in (("dropout", 0.3), ("prune", 0.3))]
    values = [value for column in weakest for value in liu2025.printed(rows, column).split(", ")]
    assert paper["values"]["rmse"] == f"{min(values)} to {max(values)}"
