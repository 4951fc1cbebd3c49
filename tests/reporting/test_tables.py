from __future__ import annotations

from collections.abc import Callable

from lit_recon.measures import MEASURES, Measure
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.tables import SummaryRow, facts, rmse_bars, summary_table
from lit_recon.reporting.writing import write_metrics

MakeRun = Callable[..., RunFolder]


def table(folder: RunFolder) -> dict[str, SummaryRow]:
    return {row.measure.key: row for row in summary_table(RunRecord.read(folder))}


def test_a_run_stands_beside_its_baselines_and_its_paper(make_run: MakeRun) -> None:
    row = table(make_run(n=4, won=3))["rmse"]
    # RMSE of 0.01, 0.02, 0.03 and 0.332, by hand.
    assert (row.ours, row.spread) == ("0.098", "0.135")
    assert (row.mean_image, row.nearest_public, row.paper) == ("0.251", "0.199", "0.16")
    assert row.reasons == []


def test_a_missing_figure_says_why(make_run: MakeRun) -> None:
    metrics = {"baseline_mean_image_psnr": None, "baseline_mean_image_psnr_reason": "infinite for at least one image"}
    rows = table(make_run(metrics=metrics))
    assert rows["lpips"].ours == "n/a"
    assert rows["lpips"].reasons == ["LPIPS is n/a: its weights are not on this machine"]
    assert rows["feature_error"].paper == "0.171"
    assert rows["feature_error"].reasons == ["Feature error is n/a: this run did not measure it"]
    assert rows["psnr"].mean_image == "n/a"
    assert rows["psnr"].reasons == ["PSNR of the mean image is n/a: infinite for at least one image"]
    assert rows["psnr"].nearest_public == "–"


def test_intervals_stand_below_and_those_of_errors_end_at_zero(make_run: MakeRun) -> None:
    ends = {"rmse_low": -0.02, "rmse_high": 0.2168, "psnr_low": 14.25, "psnr_high": 31.04}
    rows = table(make_run(metrics=ends))
    assert rows["rmse"].interval == "0.000 to 0.217"
    assert rows["psnr"].interval == "14.2 to 31.0"
    assert rows["ssim"].interval == ""


def test_intervals_end_where_the_metric_does(make_run: MakeRun) -> None:
    folder = make_run()
    metrics = {"label_accuracy_low": 0.13, "label_accuracy_high": 1.37, "ssim_low": -1.2, "ssim_high": 1.1}
    write_metrics(folder, {**metrics, "share_low": -0.1, "share_high": 1.2, "share": 0.5, "share_std": 0.1})
    assert [table(folder)[key].interval for key in ("label_accuracy", "ssim")] == ["13 to 100", "-1.000 to 1.000"]
    stated = [
        MEASURES["ssim"],
        Measure("share", "Share", True, 2, low=0.0, high=1.0),
        Measure("label_accuracy", "Hits"),
    ]
    write_metrics(folder, {**metrics, "share_low": -0.1, "share_high": 1.2}, stated)
    rows = table(folder)  # as the run says, which has no limits for the last
    assert [rows[own.key].measure for own in stated] == stated
    assert [rows[own.key].interval for own in stated] == ["-1.000 to 1.000", "0.00 to 1.00", "0.130 to 1.370"]


def test_one_image_has_no_spread(make_run: MakeRun) -> None:
    assert table(make_run(n=1))["rmse"].spread == ""


def test_metrics_that_only_the_run_has_are_shown_and_mse_only_for_a_paper(make_run: MakeRun) -> None:
    settings = {"paper": {"values": {"mse": 0.0049}}}
    own = {"feature_error": 0.2, "feature_error_std": 0.1, "mse": 0.1, "mse_std": 0.0}
    baseline = {"baseline_mean_image_rmse": 0.2, "baseline_mean_image_rmse_std": 0.1}  # a column, no row
    keys = table(make_run("a", metrics={**own, **baseline}))
    assert list(keys) == ["rmse", "psnr", "ssim", "lpips", "label_accuracy", "feature_error"]
    assert table(make_run("b", settings=settings, metrics={"mse": 0.01}))["mse"].paper == "0.0049"


def test_metrics_that_a_run_states_are_rows_in_its_own_words_and_digits(make_run: MakeRun) -> None:
    folder = make_run()
    metrics = {"rmse": 0.1, "blur": 0.12345, "blur_std": 0.01, "blur_low": -0.5, "blur_high": 0.2, "mse": 0.01}
    stated = [Measure("mse", "MSE"), Measure("blur", "Blur", False, 2, "px"), Measure("rmse", "Root of MSE", False)]
    write_metrics(folder, metrics, stated)
    rows = table(folder)
    assert list(rows) == ["blur", "rmse", "feature_error"]  # the last is in the paper
    assert (rows["blur"].measure, rows["rmse"].measure) == (stated[1], stated[2])
    assert (rows["blur"].ours, rows["blur"].spread) == ("0.12\N{NO-BREAK SPACE}px", "0.01")
    assert rows["blur"].interval == "0.00 to 0.20"


def test_bars_are_ordered_and_relative_to_the_longest(make_run: MakeRun) -> None:
    bars = rmse_bars(RunRecord.read(make_run(metrics={"rmse": 0.1256})))
    assert [(bar.name, bar.text, bar.ours) for bar in bars] == [
        ("This run", "0.126", True),
        ("Paper", "0.16", False),
        ("Nearest public image", "0.199", False),
        ("Mean public image", "0.251", False),
    ]
    assert bars[0].length == 0.5
    assert bars[-1].length == 1


def test_bars_need_a_figure_of_our_own_and_nothing_else(make_run: MakeRun) -> None:
    assert rmse_bars(RunRecord.read(make_run("a", metrics={"rmse": None}))) == []
    baselines = {"baseline_mean_image_rmse": None, "baseline_nearest_public_rmse": None}
    settings = {"paper": {"citation": "x", "values": {"rmse": "0.16 to 0.25"}}}
    bars = rmse_bars(RunRecord.read(make_run("b", settings=settings, metrics={**baselines, "rmse": 0.0})))
    assert [(bar.name, bar.length) for bar in bars] == [("This run", 0)]


def test_cost_machine_and_versions_are_told_where_they_were_noted(make_run: MakeRun) -> None:
    told = dict(facts(RunRecord.read(make_run(metrics={"backbone_accuracy": 0.451234}))))
    assert told["Time"] == "2 min 5 s"
    assert told["Time per iteration"] == "12.3 ms"
    assert told["Seed"] == "7"
    assert told["Backbone's test accuracy"] == "0.4512"
    assert told["torch"] == "2.13.0"
    assert "CPU cores" not in told
