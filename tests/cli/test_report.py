"""`attack.py report` finds the page of whichever command made a run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

from lit_recon.cli import attack
from lit_recon.errors import MissingDataError
from lit_recon.experiments.pages import PAGES
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder, marked


def run_of(path: Path, command: str, finished: bool = True, **settings: object) -> RunFolder:
    folder = RunFolder.open(path, marked(yaml.safe_dump({"seed": 0, **settings}), command))
    if finished:
        folder.metrics.write_text("{}")
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES.values() if page])
def test_every_page_can_be_imported(page: str) -> None:
    module, _, function = page.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    ("command", "settings", "words"),
    [
        # settings that another command has too do not mislead it
        ("reconn.py rero", {"reconstructor": {}, "recipe": {}}, "rero.json"),
        ("attack.py evaluate", {"attack": {}}, "holds no evaluation"),
        ("lit-recon attack evaluate", {}, "holds no evaluation"),
        ("attack.py bounds", {"factors": {}}, "study.json is missing"),
        ("reconn.py factors", {"sweeps": {}}, "factors.json is missing"),
        ("", {}, "finished run without"),  # scored from Python
    ],
)
def test_the_recorded_command_decides(
    command: str, settings: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, command, **settings)
    assert attack(["report", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_a_training_is_not_called_corrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, "train.py backbone", trunk=None, epochs=3)
    assert attack(["report", str(tmp_path)]) == 2
    assert (
        f"holds a run of train backbone, which has no page: see {tmp_path / 'metrics.json'}" in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["attack.py audit", "reconn.py rero"])
def test_an_interrupted_run_of_another_kind_is_finished_by_its_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, command, finished=False)
    assert attack(["report", str(tmp_path)]) == 2
    assert (
        f"holds an unfinished run (metrics.json is missing): finish it with `python {command}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["attack.py audit", "attack.py evaluate", "reconn.py factors", "train.py backbone"])
def test_runs_without_reconstructions_of_targets_are_not_compared(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path / "one", "attack.py run")
    run_of(tmp_path / "two", command)
    assert attack(["report", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    told = capsys.readouterr().err
    assert f"two is of {command.replace('.py', '')}: leave it out" in told
    assert (f"`python attack.py report {tmp_path / 'two'}` writes its own page" in told) == ("train" not in command)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("reconn.py glm", "python reconn.py glm --config"),
        ("attack.py run", "python attack.py run --config"),
        ("lit-recon reconn glm", "`lit-recon reconn glm --config"),
    ],
)
def test_an_unfinished_run_is_finished_by_its_own_command(command: str, told: str, tmp_path: Path) -> None:
    run_of(tmp_path, command, finished=False)
    with pytest.raises(MissingDataError, match=f"finish it with `?{told}"):
        RunRecord.read(tmp_path)
