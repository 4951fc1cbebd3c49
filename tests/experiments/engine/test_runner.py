"""Pieces run once, each after those that it needs; failed ones are tried again, others are kept."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_recon.errors import (
    ConfigError,
    CorruptFileError,
    RunExistsError,
    ShapeError,
    ThreatModelError,
    UnsupportedModelError,
)
from lit_recon.experiments.engine.pieces import Piece, attempt, settings_hash
from lit_recon.experiments.engine.runner import StudyRunner, ThisProcess, refuse_other_lpips, refuse_several_processes
from lit_recon.io.files import write_text
from lit_recon.reporting.run_folder import RunFolder, marked
from lit_recon.reporting.writing import write_metrics
from lit_recon.training.progress import Interrupted
from lit_recon.training.trainer import TrainerSettings

CONFIG = "seed: 0\n"
Work = Callable[[Path], str]


def writes(summary: str = "well done") -> Work:
    def work(folder: Path) -> str:
        print(f"working in {folder.name}")
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text("{}")
        return summary

    return work


def fails(error: BaseException) -> Work:
    def work(folder: Path) -> str:
        raise error

    return work


def run(path: Path, *pieces: Piece) -> list[str]:
    """One call of a command: folders of the pieces without a result."""
    study = StudyRunner(pieces, path)
    study.open(CONFIG, overwrite=False, grows=())
    return [piece.folder for piece in study.run(ThisProcess(study.folder))]


def test_a_finished_piece_is_not_run_again_and_a_study_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Piece("cells/a", "first", writes("RMSE 0.1"))
    assert run(tmp_path, first) == []
    assert capsys.readouterr().out.startswith("[1/1] first: RMSE 0.1 (")
    again = Piece("cells/a", "first", fails(AssertionError("it ran again")))
    assert run(tmp_path, again, Piece("cells/b", "second", writes())) == []
    assert capsys.readouterr().out.startswith("[2/2] second: well done (")
    log = (tmp_path / "logs" / "a.log").read_text()
    assert log.startswith("first: started on ")
    assert log.endswith("working in a\n")


@pytest.mark.parametrize(
    ("error", "applicable"),
    [
        (ThreatModelError("a batch of one"), False),
        (UnsupportedModelError("no such layer"), False),
        (ShapeError("diverged"), True),
        (RuntimeError("out of memory"), True),
    ],
)
def test_a_failed_piece_is_tried_again_unless_it_is_not_applicable(
    error: Exception, applicable: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = (ThreatModelError, UnsupportedModelError)
    other = Piece("cells/b", "other", writes())
    assert run(tmp_path, Piece("cells/a", "piece", fails(error), not_applicable=refused), other) == ["cells/a"]
    out = capsys.readouterr().out
    assert f"[1/2] piece: {'FAILED' if applicable else 'not applicable'}, {error}" in out
    assert "[2/2] other: well done" in out
    failure = tmp_path / "failed" / "a.json"
    content = json.loads(failure.read_text())
    assert (content["reason"], content["applicable"]) == (str(error), applicable)
    assert ("in fails" in content["traceback"] or "raise error" in content["traceback"]) == (
        type(error) is RuntimeError
    )
    assert (f"traceback in {failure}" in out) == (type(error) is RuntimeError)
    assert run(tmp_path, Piece("cells/a", "piece", writes(), not_applicable=refused), other) == []
    assert (tmp_path / "cells" / "a").exists() == applicable
    assert failure.exists() != applicable


def test_a_piece_that_was_killed_before_its_page_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(folder: Path) -> str:
        RunFolder.open(folder, marked(CONFIG, "reconn.py run")).metrics.write_text("{}")
        return "done"

    def page(run: Path) -> None:
        if run.name == "b":
            raise CorruptFileError("its images are damaged")
        (run / "report.html").write_text("page")

    monkeypatch.setattr("lit_recon.experiments.released_attack.page.write_page", page)
    pieces = [Piece(f"cells/{name}", name, work) for name in "ab"]
    for piece in pieces:
        work(tmp_path / piece.folder)  # and killed
    write_text(tmp_path / "config.yaml", marked(CONFIG))
    assert run(tmp_path, *pieces) == []
    assert [path.parent.name for path in tmp_path.glob("cells/*/report.html")] == ["a"]
    assert capsys.readouterr().out == f"note        no page in {tmp_path / 'cells/b'}: its images are damaged\n"
    (tmp_path / "cells/a/report.html").write_text("kept")
    assert run(tmp_path, *pieces) == []
    assert (tmp_path / "cells/a/report.html").read_text() == "kept"


@pytest.mark.parametrize("moment", ["the page is written", "more is measured"])
def test_so_does_one_that_still_had_to_measure_something(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(folder: Path) -> str:
        if not (folder / "metrics.json").is_file():
            RunFolder.open(folder, marked(CONFIG, "reconn.py run")).metrics.write_text("{}")
            if moment == "the page is written":
                raise Interrupted
            (folder / "report.html").write_text("page")
        (folder / "more.json").write_text("{}")
        return "done"

    monkeypatch.setattr(
        "lit_recon.experiments.released_attack.page.write_page", lambda run: (run / "report.html").write_text("page")
    )
    piece = Piece("cells/a", "a", work, results=("metrics.json", "more.json"))
    if moment == "the page is written":
        with pytest.raises(Interrupted):
            run(tmp_path, piece)
    assert run(tmp_path, piece) == []
    assert (tmp_path / "cells/a/report.html").is_file()


def test_an_error_of_the_disk_names_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "logs" / "a.log"

    class Full(io.TextIOWrapper):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Full(io.BytesIO()))
    with pytest.raises(OSError, match="No space") as caught:
        attempt(Piece("cells/a", "a", writes()), tmp_path, log)
    assert caught.value.filename == str(log)


def test_what_is_set_aside_is_not_run_and_settles_the_study(tmp_path: Path) -> None:
    piece = Piece("cells/a", "piece", fails(AssertionError("it ran")))
    study = StudyRunner([piece], tmp_path)
    study.open(CONFIG, overwrite=False, grows=(), set_aside={"cells/a": "it needs two images"})
    assert study.progress() == "1 runs, 0 of them done, 1 not applicable"
    assert study.run(ThisProcess(study.folder)) == []
    assert study.is_settled(piece)
    assert not study.is_done(piece)


def test_a_piece_runs_after_what_it_needs_and_not_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def noting(folder: Path) -> str:
        order.append(folder.name)
        return writes()(folder)

    second = Piece("cells/b", "second", noting, needs=("cells/a",))
    third = Piece("cells/c", "third", noting, needs=("cells/b",))
    broken = Piece("cells/a", "first", fails(RuntimeError("broken")))
    assert run(tmp_path, third, second, broken) == ["cells/a", "cells/b", "cells/c"]
    out = capsys.readouterr().out
    assert "second: FAILED, it needs first, which has no result" in out
    assert "third: FAILED, it needs second, which has no result" in out
    assert order == []
    assert run(tmp_path, third, second, Piece("cells/a", "first", noting)) == []
    assert order == ["a", "b", "c"]


def submissions(path: Path, *pieces: Piece) -> list[list[str]]:
    """Titles of the pieces that are started together, the first ones and those after each that ends."""
    submitted: list[list[str]] = [[]]

    class Noting(ThisProcess):
        def submit(self, piece: Piece) -> None:
            super().submit(piece)
            submitted[-1].append(piece.title)

        def next(self):  # type: ignore[no-untyped-def]
            submitted.append([])
            return super().next()

    study = StudyRunner(pieces, path)
    study.open(CONFIG, overwrite=False, grows=())
    study.run(Noting(study.folder))
    return submitted


def sharing(name: str, **shares: int) -> Piece:
    return Piece(f"cells/{name}", name, writes(), shares=shares)


def test_of_pieces_that_share_something_the_first_runs_alone(tmp_path: Path) -> None:
    pieces = [sharing(name, **({"model": 1} if name < "d" else {})) for name in "abcd"]
    assert submissions(tmp_path, *pieces)[:2] == [["a", "d"], ["b", "c"]]


def test_of_pieces_that_need_more_of_something_one_at_a_time_makes_it(tmp_path: Path) -> None:
    sizes = {"few": 8, "many": 16, "same": 8, "most": 59}
    other = sharing("other", store=8, another=2)
    found = submissions(tmp_path, *(sharing(name, store=n) for name, n in sizes.items()), other)
    assert found == [["few"], ["many", "same", "other"], ["most"], [], [], []]


def test_an_interruption_ends_the_study_and_the_next_call_resumes(tmp_path: Path) -> None:
    first, second = Piece("cells/a", "first", writes()), Piece("cells/b", "second", fails(Interrupted()))
    with pytest.raises(Interrupted):
        run(tmp_path, first, second)
    assert not (tmp_path / "failed").exists()
    assert run(tmp_path, Piece("cells/a", "first", fails(AssertionError())), Piece("cells/b", "b", writes())) == []


def test_a_page_that_needs_all_pieces_says_which_is_missing(tmp_path: Path) -> None:
    study = StudyRunner([Piece("cells/a", "first", writes())], tmp_path)
    study.require([])
    with pytest.raises(ConfigError, match=r"1 of 1 runs have no result, such as first .*failed/a\.json.*repeat"):
        study.require(study.pieces)


def test_only_what_is_computed_is_hashed() -> None:
    settings = {"seed": 0, "attack": {"steps": 3}}
    how = {"trainer": {"threads": 2}, "cache": "there", "wandb": None, "paper": {"values": {}}, "out": "here"}
    assert settings_hash({**settings, **how}) == settings_hash(settings)
    assert settings_hash({**settings, "seed": 1}) != settings_hash(settings)


def test_a_piece_keeps_its_folder_with_another_cache_of_backbones() -> None:
    first, moved, longer = (
        settings_hash({"backbone": {"cache": cache, "epochs": epochs}})
        for cache, epochs in (("runs/backbones", 1), ("elsewhere", 1), ("elsewhere", 2))
    )
    assert first == moved != longer
    # where the cache is the default, folders are those of earlier versions
    assert first == "3890ab7d"


def test_several_processes_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_several_processes("attack.py evaluate", TrainerSettings())
    with pytest.raises(ConfigError, match=r"trainer.devices=2 .*--cluster local"):
        refuse_several_processes("attack.py evaluate", TrainerSettings(devices=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"attack.py evaluate runs in one process.*--cluster local"):
        refuse_several_processes("attack.py evaluate")


@pytest.mark.parametrize("changed", [{"network": "vgg"}, {"weights": "other.pth"}])
def test_a_study_keeps_the_network_and_weights_of_lpips(changed: dict[str, str], tmp_path: Path) -> None:
    folder, lpips = RunFolder(tmp_path), {"network": "alex", "weights": None, "download": True}
    refuse_other_lpips(folder, {"cells/a": {"lpips": lpips}})
    cell = RunFolder.open(tmp_path / "cells" / "a", json.dumps({"seed": 0, "lpips": lpips}))
    other = {"seed": 1, "lpips": {**lpips, **changed}}
    refuse_other_lpips(folder, {"cells/a": other})  # not finished
    write_metrics(cell, {"lpips": None, "lpips_reason": "no weights"})
    refuse_other_lpips(folder, {"cells/a": other})
    write_metrics(cell, {"lpips": 0.1})
    for there in ({"lpips": {**lpips, "download": False}}, {"lpips": {**lpips, "network": "none"}}, {}):
        refuse_other_lpips(folder, {"cells/a": there})
    refuse_other_lpips(folder, {"cells/b": other})
    with pytest.raises(RunExistsError, match=rf"lpips\.{next(iter(changed))}: .* go on with the former one"):
        refuse_other_lpips(folder, {"cells/a": other})
