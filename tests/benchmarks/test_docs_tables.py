"""Tables of the pages: what they compute from records, and that each of them has its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import PAGES, defended, released, reliability, tables, trainset, updates
from benchmarks.docs.figures import Figures
from benchmarks.record import Record

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
    return {"name": name, "created": "2026-01", "rows": [{"seconds": 10.0, "cpu_seconds": 9.0, **content}]}


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


def test_a_run_that_was_lost_has_no_identical_result() -> None:
    def row(fault: str, command: str, injections: int, **wrong: list[str]) -> dict[str, Any]:
        return {
            "fault": fault,
            "command": command,
            "injections": ["x"] * injections,
            "lost": [],
            "different": [],
        } | wrong

    record: Any = {
        "rows": [
            row("killed at random", "audit", 3),
            row("killed at random", "audit", 2, different=["rmse"]),
            row("killed in a file", "rero", 4, lost=["a traceback"]),
            row("disk full", "rero", 0),
        ]
    }
    assert lines(reliability.faults(record))[1:] == [
        ["**all kills**", "2", "9", "2 of 3", "1 of 3"],
        ["killed at random", "1", "5", "2 of 2", "1 of 2"],
        ["killed in a file", "1", "4", "0 of 1", "0 of 1"],
        ["disk full", "1", "0", "1 of 1", "1 of 1"],
    ]
    assert lines(reliability.faults_by_command(record))[1] == ["killed at random", "audit", "5", "2 of 2", "1 of 2"]


def test_a_cell_that_was_measured_again_counts_once() -> None:
    row = {"images": 2, "certified": 1, "certified_and_wrong": 0, "seconds": {"median": 7.2}}
    smooth = {"activation": "gelu", "batch": 1, "rmse_geiping2020": [0.3, 0.2]}
    records: list[Any] = [{"rows": [{**row, **smooth, "rmse": errors}]} for errors in ([0.5, 0.5], [0.001, 0.004])]
    one = ["GELU", "8 steps", "1", "2", "0.003", "0.004", "1, 0", "0.250", "7"]
    assert lines(updates.smooth(records))[1:] == [one]
    records.append({"rows": [{**row, **smooth, "trained": "1 epoch", "rmse": [0.5, 0.5]}]})
    assert lines(updates.smooth(records))[1:] == [["GELU", "1 epoch", "1", "2", "0.500", "0.500", *one[-3:]], one]
    other = {"network": "VGG", "batch": 1}
    found = [{**row, **other, "rmse": [0.01], "nearest_other": [0.2]}, {**row, **other, "batch": 4, "certified": 0}]
    found[1] |= {"rmse": [], "nearest_other": [], "entries": 0.756}
    table = lines(updates.architectures([{"rows": found}]))
    assert [line[1:] for line in table[1:]] == [
        ["1", "1 of 2", "0.010", "0.010", "1, 0", "0.200", "", "7"],
        ["4", "0 of 2", "–", "–", "0, 0", "–", "0.76", "7"],
    ]


def test_separations_stand_beside_random_directions() -> None:
    names = "published_ica", "published_ica_any_sign", "published_ica_tenfold", "random_directions"
    methods = {name: {"cosine": {"median": 0.9 - 0.1 * number}} for number, name in enumerate(names)}
    rows = [{"n_features": size, "batch": 2, "methods": methods} for size in (8192, 512)]
    text = updates.feature_sources([{"created": "2026-01-01", "rows": [row]} for row in rows])
    assert lines(text)[1:] == [[size, "2", "0.900", "0.800", "0.700", "0.600"] for size in ("512", "8192")]
    ends = "_200_steps", "", "_10000_steps", "_random_start", "_centered_whitening"
    ways = {f"published_ica{end}": {"cosine": {"median": 0.9 - 0.1 * number}} for number, end in enumerate(ends)}
    text = updates.feature_searches([{"created": "2026-01-01", "rows": [{**rows[0], "methods": ways}]}])
    assert lines(text)[1:] == [["8192", "2", "0.900", "0.800", "0.700", "0.600", "0.500"]]


def test_the_error_of_every_image_stands_below_the_means() -> None:
    names = {f"baseline_{base}_{m}": 0.2 for base in ("mean_image", "nearest_public") for m in ("rmse", "psnr", "ssim")}
    metrics = {"n": 2, "n_batches": 2, "rmse": 0.1, "rmse_std": 0.1, "psnr": 30.0, "ssim": 0.9, **names}
    text = updates.batch_statistics(run("b", metrics=metrics, tables={"victims": [{"rmse": 0.2}, {"rmse": 0.001}]}))
    assert lines(text)[1][:4] == ["`batch_statistics`", "2 in 2", "0.100 ± 0.100", "30.0"]
    assert text.endswith("RMSE of every image: 0.001, 0.200.")


def test_runs_on_a_gpu_are_told_apart() -> None:
    names = {"oracle_mse": 0.02, "baseline_nearest_public_mse": 0.03, "baseline_mean_image_mse": 0.06}
    metrics = {"n": 8, "mse": 0.005, "mse_std": 0.002, "n_batches": 8, "label_accuracy": 1.0, **names}
    cpu = run("cifar10_newton", metrics={**metrics, "certified_rate": 0.5, "certified_mse_max": 0.001}, cpu_seconds=180)
    gpu = run("cifar10_newton_relu", metrics={**metrics, "device": "H200", "peak_gpu_memory_mib": 9.0}, seconds=360)
    made = lines(released.cifar10_newton([cpu, gpu]))
    assert [(row[0], row[1], row[-1]) for row in made[1:]] == [
        ("the paper's setting", "4 of 8", "3"),
        ("ReLU instead of ELU", "", "6, GPU"),
    ]
    assert [tables.device_of({**record, "device": "Xeon"}) for record in (cpu, gpu)] == ["Xeon", "H200"]
    assert tables.device_of({"device": "Xeon", "rows": [{}, {}]}) == "Xeon"
    study = {**cpu, "device": "Xeon", "command": "attack.py evaluate --trainer.accelerator gpu"}
    assert tables.device_of(study) == "Xeon with a GPU"
    assert tables.device_of({**gpu, "device": "Xeon", "command": study["command"]}) == "H200"
    # shadow models: columns by number of targets
    linear = {"linear_error": 0.3, "linear_error_max": 0.4, "linear_error_n": 6, "shadow_seconds": 7.0}
    few = run("few", metrics={**metrics, **linear, "n_shadow": 4000, "mse_at_1000_shadows": 0.01}, cpu_seconds=100)
    many = {**metrics, **linear, "n": 100, "n_batches": 100, "n_shadow": 16000, "mse_at_4000_shadows": 0.004}
    text = released.cifar10_linear([run("many", metrics={**many, "peak_gpu_memory_mib": 9.0}), few])
    assert lines(text)[0] == ["MSE", "8 targets", "100 targets, on a GPU"]
    assert lines(text)[1:4] == [
        ["1,000 shadow models", "0.0100", "–"],
        ["4,000 shadow models", "0.0050", "0.0040"],
        ["nearest of all other images", "0.0200", "0.0200"],
    ]
    assert (
        "8 targets: 95 % interval of the MSE with 4,000 shadow models 0.0033 to 0.0067." in text
    )  # Student's t, 2.365
    assert "seconds of CPU in all, 0 minutes by the clock." in text
    assert "10 seconds in all, on a GPU." in text
    reused = run("reused", metrics={**many, "shadow_seconds": None}, cpu_seconds=100)
    assert "at most; the attack took 100 seconds of CPU in all" in released.cifar10_linear([reused])
    parts = released.cifar10_linear([run("parts", metrics={**many, "seconds": 7200.0}, cpu_seconds=100)])
    # the last part may have found the shadow models of the first
    assert parts.endswith("at most; the attack took 120 minutes by the clock in all, in parts.")


def test_lines_of_a_factor_stand_apart() -> None:
    rows = [
        {"factor": "default", "mse": 0.01, "oracle_mse": 0.02, "baseline_mean_image_mse": 0.03, "accuracy": 0.9},
        *({"factor": "seed", "value": n, "mse": 0.01 * n, "accuracy": 0.9} for n in (1, 2)),
        {"factor": "rate", "line": "no momentum", "value": 0.1, "mse": 0.05, "accuracy": 0.8},
        {"factor": "rate", "line": "momentum", "value": 0.1, "mse": 0.06, "accuracy": 0.7},
    ]
    made = lines(released.factors_digits([run("factors_digits", tables={"factors": rows})]))
    assert [row[0].rpartition(", ")[2] for row in made[2:]] == ["no momentum", "momentum"]


def test_factors_that_were_not_run_are_left_out() -> None:
    rows = [
        {"factor": "default", "mse": 0.01, "oracle_mse": 0.02, "baseline_mean_image_mse": 0.03, "accuracy": 0.9},
        {"factor": "size", "value": "1", "mse": 0.05, "accuracy": 0.5},
        {"factor": "size", "value": "100", "reason": "it has not been run yet"},
        {"factor": "epochs", "value": 100, "mse": 0.01, "accuracy": 0.9},
        {"factor": "epochs", "value": 250, "reason": "it has not been run yet"},
    ]
    first = run("factors_mnist", tables={"factors": rows})
    text = released.factors_mnist([first])
    assert [row[0] for row in lines(text)[1:]] == ["Size of the released model"]
    assert "Of 4 values of factors 2 have results" in text
    # another record has other factors, and one of them again
    again = [{key: value for key, value in row.items() if key in ("factor", "value")} for row in rows]
    again[0], again[1] = rows[0], {**rows[1], "mse": 0.04}
    again[4] |= {"mse": 0.07, "accuracy": 0.6}
    both = [{**run("factors_mnist_epochs", tables={"factors": again}), "created": "2026-02"}, first]
    text = released.factors_mnist(both)
    assert [row[1] for row in lines(text)[1:]] == ["1: 0.0400 (50 %)", "100: 0.0100 (90 %), 250: 0.0700 (60 %)"]
    assert "Of 4 values of factors 3 have results" in text


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


def study(name: str, groups: dict[str, dict[str, Any]], images: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A record of `attack.py trainset`."""
    metrics = {f"{metric}.{key}": value for key, own in groups.items() for metric, value in own.items()}
    metrics["n_refused"] = len(groups) - 1
    return run(name, metrics=metrics, tables={"images": images or []})


@pytest.fixture
def noise() -> dict[str, Any]:
    """Metrics of one attack and start, a mean over trainings."""
    found = {"n_images": 20, "pool": 1080, "n_good": 4.5, "n_good_low": 3.0, "n_good_high": 6.0, "best_ssim": 0.41}
    found |= {"best_ssim_stretched": 0.46, "rmse": 0.3, "seconds": 61.6, "accuracy": 0.8, "closer_rmse": 0.55}
    return found | {f"baseline_as_many_public_images_{k}": v for k, v in (("n_good", 1.0), ("best_ssim", 0.35))}


def made(name: str, *records: dict[str, Any]) -> list[list[str]]:
    """Rows of a table."""
    [pattern], function = tables._TABLES[name]
    assert pattern in ("trainset_**", "trainset_inactive**")
    return lines(function(records))


def test_attacks_on_training_sets_are_listed_without_the_truth_in_their_start(noise: dict[str, Any]) -> None:
    groups = dict.fromkeys(("kkt.noise_0.none", "kkt.mixture_other_0.25.none", "kkt.noise_0.decay"), noise)
    header, *rows = made("trainset", study("trainset_haim2022_mnist", groups))
    scores = ["4.5 ± 1.5 of 20", "1,080", "0.410", "0.460", "0.300", "", "1; 0.350", "62"]
    assert rows == [["`haim2022_mnist`", "`kkt`", "noise", *scores]]
    assert len(header) == len(rows[0])
    assert trainset.groups([study("trainset_a", groups)])[1].title == ["`a`", "`kkt`", "mixture_other 0.25"]
    _, plain, decay = made("trainset_defenses", study("trainset_a", groups))
    assert (plain[3:5], decay[3:5]) == (["", "80.0 %"], ["decay", "80.0 %"])
    defenses = tables._TABLES["trainset_defenses"][1]
    assert defenses([study("trainset_a", groups)]).endswith("Not applicable, and not listed, are cells: 2 of `a`.")
    assert "Not measured" in defenses([study("trainset_a", {"kkt.noise_0.none": noise})])


def test_starts_show_the_distance_before_and_after(noise: dict[str, Any]) -> None:
    bilevel = noise | {"distance_before": 0.9, "distance_after": 0.012, "ssim": 0.2}
    both = bilevel | {"stationarity_before": 0.8, "stationarity_after": 0.5}
    groups = {"bilevel.mixture_0.5.none": bilevel, "bilevel.noise_0.none": both, "kkt.noise_0.none": noise}
    _, *rows = made("trainset_starts", study("trainset_runkel2024_affine", groups))
    assert rows == [
        ["`runkel2024_affine`", "`bilevel`", "mixture 0.5", "0.9 → 0.012", "", "0.200", "0.300", "55 %"],
        ["`runkel2024_affine`", "`bilevel`", "noise", "0.9 → 0.012", "0.8 → 0.5", "0.200", "0.300", "55 %"],
    ]


def test_selections_and_tests_for_members_are_listed_where_there_are_any(noise: dict[str, Any]) -> None:
    tested = {"true_positives": 0.6, "true_positives_low": 0.15, "true_positives_high": 0.95, "true_positives_n": 5}
    chosen = {f"selected_by_{name}_ssim": 0.1 * n for n, name in enumerate(("residual", "agreement", "truth"))}
    record = study(
        "trainset_a",
        {
            "kkt.noise_0.none": noise | tested,
            "kkt.noise_0.decay": noise | tested | {"true_positives_trainings": 2},
            "kkt.noise_0.early": noise | {"true_positives": 0.6, "true_positives_n": 5, "true_positives_trainings": 1},
            "kkt.other_0.none": noise | chosen | {"restart_by_loss": 0.3},
            "kkt.other_0.decay": noise | chosen | {"restart_by_loss": 0.3},
        },
    )
    # no interval over the tests of a training, as older records have it, nor of a single training
    rates = [row[3:] for row in made("trainset_membership", record)[1:]]
    assert rates == [["60 % of 5", ""], ["60 % ± 35 % of 5", ""], ["60 % of 5", ""]]
    [_, selected] = made("trainset_selection", record)
    assert selected[2:] == ["other", "0.300", "", "0.000", "0.100", "", "0.200"]


def test_older_answers_are_judged_by_what_is_left_of_the_weights(noise: dict[str, Any]) -> None:
    said = "Random starts can give images that explain the weights and are no training images."
    fall = {"hypothesis": said, "compared": trainset._FALL, "difference": 0.09, "half": 0.01, "answer": "agrees"}
    groups = {
        "bilevel.noise_0.none": noise | {"distance_after": 0.5, "residual_after": 0.04},
        "kkt.noise_0.none": noise | {"residual_after": 0.0025},
    }
    record = study("trainset_a", groups)
    other = {**fall, "attack": "kkt", "compared": "SSIM"}
    record["rows"][0]["tables"]["hypotheses"] = [{**fall, "attack": "bilevel"}, {**fall, "attack": "kkt"}, other]
    rows = [row[2:] for row in made("trainset_hypotheses", record)[1:]]
    left = trainset.UNEXPLAINED
    assert rows == [
        ["`bilevel`", left, "-0.4", "undecided"],
        ["`kkt`", left, "0.05", "undecided"],
        ["`kkt`", "SSIM", "0.09 ± 0.01", "agrees"],
    ]


@pytest.mark.parametrize(
    ("at_truth", "said"),
    [(0.001, "agrees"), (0.79, "not judged: the weights are not stationary, 0.79 at the training images")],
)
def test_older_landscapes_are_judged_where_the_weights_are_stationary(
    noise: dict[str, Any], at_truth: float, said: str
) -> None:
    record = study("trainset_a", {"bilevel.mixture_1.none": noise | {"stationarity_before": at_truth}})
    own = {"hypothesis": "The landscape of", "attack": "bilevel", "compared": "75%", "difference": 0.3, "half": 0.1}
    record["rows"][0]["tables"]["hypotheses"] = [{**own, "answer": "agrees"}]
    assert made("trainset_hypotheses", record)[1][5] == said


def test_exact_images_of_inactive_neurons_are_counted_over_trainings(noise: dict[str, Any]) -> None:
    cell = {"attack": "inactive", "start": "noise", "share": 0.0}
    images = [
        {**cell, "defense": defense, "seed": seed, "rmse": rmse}
        for defense, errors in (("none", (2e-9, 3e-8)), ("dp", (0.2, 1e-5)))
        for seed, rmse in enumerate(errors)
    ]
    sure = noise | {"certified": 20.0, "certified_wrong": 0.5}
    groups = {"inactive.noise_0.none": sure, "inactive.noise_0.dp": noise}
    _, plain, defended = made("trainset_inactive", study("trainset_inactive_mnist", groups, images))
    assert plain[3:] == ["", "20", "2", "20, 0.5 wrong", "2 of 2", "3.0e-8", "3e-8", "80.0 %", "62"]
    assert defended[3:] == ["dp", "20", "2", "", "1 of 2", "1.0e-5", "0.2", "80.0 %", "62"]


def test_a_defended_cell_that_was_measured_again_counts_once() -> None:
    def cell(defense: str, rmse: list[float], created: str, network: str = "one") -> dict[str, Any]:
        row = {
            "defense": defense,
            "batch": 1,
            "batch_norm": "eval",
            "draws": 2,
            "images": 2,
            "rmse": rmse,
            "certified": 1,
        }
        found = {**row, "certified_and_wrong": 0, "seconds": {"median": 75.2, "max": 127.4}}
        name = "defended_noise"
        return {"name": name, "created": created, "files": {"checkpoint": network}, "rows": [found]}

    _, function = tables._TABLES["defended"]
    trained = cell("drop 0.9", [0.1], "1")["rows"][0] | {"batch_norm": "train"}
    records = [cell("prune 0.9", [0.01, 0.02], "2"), cell("drop 0.9", [0.003], "1"), cell("prune 0.9", [0.3], "1")]
    informed = [
        {"defenses": ["noise 0.001", "noise 0.01"], "van_trees": [0.1 * image, 0.2 * image]} for image in (2, 1)
    ]
    kept = [{"defenses": ["drop 0.9", "prune 0.9"], "with_prior": left} for left in ([0.0, 0.0], [0.0, 0.1])]
    noise: Any = {"name": "bound_noise", "rows": informed, "files": {"checkpoint": "one"}}
    masks: Any = {"name": "bound_masks", "rows": kept, "files": {"checkpoint": "one"}}
    made = function([*records, cell("noise 0.01", [0.5], "1")], noise, masks)
    assert made.endswith("In all 6 draws of 6 images: 3 images are certified, 0 of them wrong.")
    mixed = function([*records, cell("noise 0.01", [0.5], "1", "two")], noise | {"files": {"checkpoint": "two"}}, masks)
    assert mixed.endswith(
        "Measured on other networks, trained with the same settings: noise 0.01, 1, eval; `bound_noise`."
    )
    _, *rows = lines(made)
    assert [row[:6] for row in rows] == [
        ["drop 0.9", "eval", "1", "1 of 2", "0.003", "0.003"],
        ["noise 0.01", "eval", "1", "1 of 2", "0.500", "0.500"],
        ["prune 0.9", "eval", "1", "2 of 2", "0.015", "0.020"],
    ]
    assert rows[1][6:] == ["1, 0", "0.200 to 0.400", "0.22 to 0.29", "75 (127)"]
    assert rows[2][6:] == ["1, 0", "0 to 0.100", "0.26 to 0.29", "75 (127)"]
    assert rows[0][7] == "0"
    [train] = lines(function([cell("drop 0.9", [0.1], "1") | {"rows": [trained]}], noise, masks))[1:]
    assert train[7] == ""
    # of the images of the bound, on its network
    both = cell("noise 0.01", [0.8, 0.6], "1")
    both["rows"][0]["misfit"] = [3.0, 1.5]
    assert lines(function([both], noise, masks))[1][7] == "0.200 to 0.400 (errors 2.5 times that, median)"
    of_others = {**both, "name": "defended_laplace"}
    assert lines(function([of_others], noise, masks))[1][7] == "0.200 to 0.400"
    assert function([both], noise, masks).endswith("1 at the true images): noise 0.01: 1.500 to 3.000.")
    assert lines(function([both], noise | {"files": {"checkpoint": "two"}}, masks))[1][7] == "0.200 to 0.400"


def test_unknown_directions_are_the_most_of_all_images() -> None:
    row = {"defenses": ["drop 0.9", "prune 0.9"], "unknown": [0, 3], "with_prior": [0.0, 0.01], "seconds": 5.0}
    other = {**row, "unknown": [0, 7], "with_prior": [0.0, 0.02], "every_entry": [False, False]}
    record: Any = {"rows": [{**row, "every_entry": [False, True]}, other]}
    assert lines(defended.bound_masks(record))[1:] == [
        ["drop 0.9", "2", "0", "0", "some"],
        ["prune 0.9", "2", "7", "0.020", "all"],
        ["seconds an image", "", "5", "", ""],
    ]


@pytest.mark.parametrize(("name", "first"), [("smooth", "activation"), ("architectures", "network")])
def test_a_table_of_several_records_of_one_name(
    name: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "link", lambda record, page: record["name"])
    row = {
        "batch": 1,
        "images": 1,
        "rmse": [0.01],
        "certified": 1,
        "certified_and_wrong": 0,
        "seconds": {"median": 5.0},
    }
    extra = {"rmse_geiping2020": [0.3], "nearest_other": [0.2]}
    for kind in ("one", "other"):
        with Record(name, {}, folder=tmp_path) as record:
            record.add({**row, **extra, first: kind}, show=False)
    found = tables.make(name, Figures(tmp_path), tmp_path / "page.md")
    assert [cells[0].lower() for cells in lines(found)[1:]] == ["one", "other"]
