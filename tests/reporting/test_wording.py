from __future__ import annotations

from collections.abc import Callable

import pytest

from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import closer_than_public, knowledge, notes, verdict

MakeRun = Callable[..., RunFolder]


@pytest.mark.parametrize(
    ("n", "won", "start"),
    [
        (4, 4, "All 4 reconstructions are closer to the truth than the nearest public image; the mean RMSE is"),
        (4, 3, "3 of 4 reconstructions are closer to the truth than the nearest public image; the mean RMSE is"),
        (4, 0, "None of the 4 reconstructions are closer to the truth than the nearest public image; the mean"),
        (1, 1, "The reconstruction is closer to the truth than the nearest public image; the RMSE is 0.010"),
        (1, 0, "The reconstruction is no closer to the truth than the nearest public image; the RMSE is 0.302"),
    ],
)
def test_the_verdict_counts_who_beats_public_images(make_run: MakeRun, n: int, won: int, start: str) -> None:
    assert verdict(RunRecord.read(make_run(n=n, won=won))).startswith(start)


@pytest.mark.parametrize(
    ("rmse", "end"),
    [
        (0.0628, "the mean RMSE is 0.063, 4.0 times lower than guessing the mean public image (0.251)."),
        (0.2450, "the mean RMSE is 0.245, about the same as guessing the mean public image (0.251)."),
        (0.2600, "the mean RMSE is 0.260, about the same as guessing the mean public image (0.251)."),
        (0.4000, "the mean RMSE is 0.400, worse than guessing the mean public image (0.251)."),
        (0.0, "the mean RMSE is 0.000, a perfect copy."),
        (None, "closer to the truth than the nearest public image."),
    ],
)
def test_the_verdict_compares_with_the_mean_image(make_run: MakeRun, rmse: float | None, end: str) -> None:
    assert verdict(RunRecord.read(make_run(metrics={"rmse": rmse}))).endswith(end)


def test_the_verdict_says_no_more_than_the_figures(make_run: MakeRun) -> None:
    folder = make_run(metrics={"rmse": None})
    folder.victims.write_text(folder.victims.read_text().replace(",0.2,", ",,"))
    record = RunRecord.read(folder)
    assert closer_than_public(record) == [None] * 4
    assert verdict(record) == "This run has no metrics that could be summarized."
    without_baseline = RunRecord.read(make_run("b", metrics={"baseline_mean_image_rmse": None, "rmse": 0.1}))
    assert verdict(without_baseline).endswith("the mean RMSE is 0.100.")


def told(folder: RunFolder) -> tuple[str, str]:
    grants = knowledge(RunRecord.read(folder))
    known, unknown = (" ".join(grant.text for grant in grants if grant.known == side) for side in (True, False))
    return known, unknown


def test_an_attacker_without_labels_on_the_running_statistics(make_run: MakeRun) -> None:
    known, unknown = told(make_run())
    assert "it came from 2 images" in known
    assert "BatchNorm layers, if any, used the running statistics of the public model (evaluation mode)" in known
    assert "The running statistics of the BatchNorm layers" in known
    assert (
        "The labels. The attack recovered them from the update and got 75\N{NO-BREAK SPACE}% of them right." in unknown
    )
    assert "The images." in unknown


def test_an_attacker_with_labels_and_the_batch_s_statistics(make_run: MakeRun) -> None:
    settings = {
        "run": {
            "knowledge": {"labels": True, "batch_norm": "batch"},
            "client": {"class_path": "Client", "init_args": {"batch_norm": "train"}},
        }
    }
    known, unknown = told(make_run(settings=settings, n=3, batch_size=2))
    assert "it came from 1 or 2 images" in known
    assert "The true label of every image." in known
    assert "statistics of its own batch (training mode)" in known
    assert "a strong assumption" in known
    assert "labels" not in unknown


def test_an_attacker_without_any_statistics(make_run: MakeRun) -> None:
    settings = {"knowledge": {"labels": True, "batch_norm": "none"}}
    known, unknown = told(make_run(settings=settings, n=1))
    assert "it came from 1 image." in known
    assert "Any BatchNorm statistics: the attack used those of its own candidates." in unknown


def test_what_the_settings_do_not_say_is_not_made_up(make_run: MakeRun) -> None:
    known, unknown = told(make_run(settings={"seed": 0}))
    assert "BatchNorm" not in known
    assert "Whether the labels were given is not stated" in unknown
    assert "What BatchNorm statistics were known is not stated" in unknown


@pytest.mark.parametrize(
    ("written", "read"),
    [(["a", "b", "a", ""], ["a", "b"]), ("one", ["one"]), (None, []), ([], [])],
)
def test_notes_are_told_once(make_run: MakeRun, written: object, read: list[str]) -> None:
    assert notes(RunRecord.read(make_run(metrics={"notes": written}))) == read


CHAIN = {
    "class_path": "lit_recon.defenses.Chain",
    "init_args": {
        "defenses": [
            {"class_path": "lit_recon.defenses.PerExampleClipping", "init_args": {"bound": 1.0}},
            {"class_path": "lit_recon.defenses.GaussianNoise", "init_args": {"std": 0.1}},
        ]
    },
}


@pytest.mark.parametrize("aware", [True, False])
def test_a_defense_is_named_and_whether_the_attacker_knew_it(make_run: MakeRun, aware: bool) -> None:
    settings = {"defense": CHAIN, "knowledge": {"defense": aware}}
    sides = told(make_run(settings=settings))
    assert "PerExampleClipping(bound=1.0) then GaussianNoise(std=0.1)" in sides[0 if aware else 1]


def test_local_steps_and_secure_aggregation_are_said(make_run: MakeRun) -> None:
    settings = {"client": {"batch_norm": "eval", "local_steps": {"steps": 5}, "n_clients": 4}}
    known, unknown = told(make_run(settings=settings))
    assert "5 local steps" in known
    assert "the mean over 4 of them" in unknown


def test_a_malicious_server_is_named(make_run: MakeRun) -> None:
    known, _ = told(make_run(settings={"server": {"n_bins": 128}}))
    assert "a malicious server modified" in known
    assert "The public model" not in known
