from __future__ import annotations

from collections.abc import Callable

from lit_recon.reporting.comparison import compare
from lit_recon.reporting.images import data_uri
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder

MakeRun = Callable[..., RunFolder]


def records(*folders: RunFolder) -> list[RunRecord]:
    return [RunRecord.read(folder) for folder in folders]


def test_every_run_is_a_line_with_its_figures(make_run: MakeRun) -> None:
    first = make_run("one", won=3)
    second = make_run("two", won=1, settings={"seed": 1}, metrics={"seconds": None, "extra": 0.5, "extra_std": 0.1})
    comparison = compare(records(first, second))
    assert [measure.key for measure in comparison.measures] == [
        "rmse",
        "psnr",
        "ssim",
        "lpips",
        "label_accuracy",
        "feature_error",
        "extra",
    ]
    one, two = comparison.runs
    assert (one.name, one.n, one.closer, one.duration) == ("one", 4, "3 of 4", "2 min 5 s")
    assert (two.name, two.closer, two.duration) == ("two", "1 of 4", "n/a")
    assert one.cells[0] is not None
    assert (one.cells[0].ours, one.cells[0].paper) == ("0.098", "0.16")
    assert [cell is None for cell in one.cells] == [False] * 6 + [True]
    assert [cell is None for cell in two.cells] == [False] * 5 + [True, False]


def test_footnotes_name_all_runs_that_share_them(make_run: MakeRun) -> None:
    footnotes = compare(records(make_run("one"), make_run("two"), make_run("three", settings={}))).footnotes
    assert footnotes == [
        "one, two: after Geiping et al., NeurIPS 2020",
        "one, two, three: LPIPS is n/a: its weights are not on this machine",
        "one, two: Feature error is n/a: this run did not measure it",
    ]


def test_images_that_all_runs_attacked_stand_side_by_side(make_run: MakeRun) -> None:
    one, two = records(make_run("one", n=4), make_run("two", n=4))
    shared = compare([one, two]).shared
    assert [image.title for image in shared] == ["#100 · cat", "#101 · dog", "#102 · cat", "#103 · dog"]
    assert shared[2].target == data_uri(one.targets[2])
    assert shared[2].reconstructions == [
        (data_uri(one.reconstructions[2]), "0.030"),
        (data_uri(two.reconstructions[2]), "0.030"),
    ]


def test_equal_ids_of_other_data_are_not_taken_for_the_same_image(make_run: MakeRun) -> None:
    assert compare(records(make_run("one", seed=0), make_run("two", seed=1))).shared == []
    assert compare(records(make_run("a"), make_run("b", shape=(1, 4, 4)))).shared == []
    assert compare(records(make_run("c"), make_run("d", first_id=500))).shared == []


def test_settings_that_differ_are_listed_without_those_that_do_not_matter(make_run: MakeRun) -> None:
    one = {"attack": {"steps": 10}, "seed": 0, "out": "x", "paper": {"note": "a"}, "name": "one"}
    two = {"attack": {"steps": 20, "tv": 0.1}, "seed": 0, "out": "y", "paper": {"note": "b"}, "name": "two"}
    settings = compare(records(make_run("one", settings=one), make_run("two", settings=two))).settings
    assert settings == [("attack.steps", ["10", "20"]), ("attack.tv", ["–", "0.1"])]


def test_runs_of_the_same_name_are_told_apart_by_their_parents(make_run: MakeRun) -> None:
    runs = compare(records(make_run("a/run"), make_run("b/run"))).runs
    assert [run.name for run in runs] == ["a/run", "b/run"]


def test_a_run_may_be_compared_with_itself(make_run: MakeRun) -> None:
    folder = make_run()
    assert [run.name for run in compare(records(folder, folder)).runs] == ["run", "run"]


def test_runs_of_different_commands_have_no_settings_in_common(make_run: MakeRun) -> None:
    update, released = {"attack": {"steps": 3}, "seed": 0}, {"reconstructor": {"width": 2}, "seed": 1}
    other = make_run("two", seed=1, settings=released, command="reconn.py run")
    both = records(make_run("one", n=12, settings=update), other)
    comparison = compare(both)
    assert not comparison.alike
    assert comparison.settings == []
    assert [(group.runs, len(group.images)) for group in comparison.groups] == [(["one"], 8), (["two"], 4)]
    assert comparison.groups[1].images[2].title == "#102 · cat"
    assert comparison.groups[1].images[2].reconstructions == [(data_uri(both[1].reconstructions[2]), "0.030")]
    assert [run.verdict.partition(" reconstructions")[0] for run in comparison.runs] == ["3 of 12", "3 of 4"]
    alike = compare(both[:1] * 2)
    assert alike.alike
    assert alike.groups == []


def test_the_recorded_command_tells_commands_of_the_same_settings_apart(make_run: MakeRun) -> None:
    commands = ("reconn.py run", "lit-recon reconn run", "reconn.py membership")
    one, same, other = (make_run(command, settings={"reconstructor": {}}, command=command) for command in commands)
    assert compare(records(one, same)).alike
    assert not compare(records(one, other)).alike


def test_runs_of_the_same_images_stand_together(make_run: MakeRun) -> None:
    found = compare(records(make_run("one"), make_run("other", seed=1), make_run("two"))).groups
    assert [group.runs for group in found] == [["one", "two"], ["other"]]
    assert [len(image.reconstructions) for image in found[0].images] == [2] * 4


def test_the_conclusion_names_the_run_that_comes_closest(make_run: MakeRun) -> None:
    far = make_run("far", won=1, metrics={"rmse": 0.21, "baseline_nearest_public_rmse": 0.3})
    near = make_run("near", won=4, metrics={"rmse": 0.004, "baseline_nearest_public_rmse": 0.3})
    other = make_run("other", seed=1, won=0, metrics={"rmse": 0.4, "baseline_nearest_public_rmse": None})
    assert compare(records(far, near, other)).conclusion == (
        "With near, 4 of 4 reconstructions are closer to the truth than the nearest public image (mean RMSE 0.004, "
        "nearest public image 0.300); on the same images, far reaches 0.210. "
        "With other, none of 4 reconstructions are closer to the truth than the nearest public image (mean RMSE 0.400)."
    )


def test_there_is_no_conclusion_without_an_error(make_run: MakeRun) -> None:
    assert compare(records(make_run(metrics={"rmse": None}))).conclusion == ""
