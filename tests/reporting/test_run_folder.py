from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, RunExistsError
from lit_recon.io.files import holding
from lit_recon.reporting.run_folder import IGNORED_SETTINGS, RunFolder, marked
from lit_recon.reporting.writing import write_metrics
from lit_recon.training.trainer import TrainerSettings

CONFIG = "attack:\n  steps: 100\nout: here\n"

KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from lit_recon.io.files import holding
from lit_recon.reporting.run_folder import IGNORED_SETTINGS, RunFolder, RunFolder, marked
from lit_recon.training.trainer import TrainerSettings
folder = RunFolder.open(sys.argv[1], sys.argv[2])
(folder.checkpoints / "victims_0000.safetensors").write_bytes(b"the first victim")
(folder.path / ".victims.csv.0123.unfinished").write_bytes(b"half a ta")
(folder.checkpoints / ".victims_0001.safetensors.0123.unfinished").write_bytes(b"half a victim")
os.kill(os.getpid(), signal.SIGKILL)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def finished(path: Path) -> RunFolder:
    folder = RunFolder.open(path, CONFIG)
    (folder.checkpoints / "state").write_text("old")
    folder.losses.write_text("old")
    folder.report.write_text("old")
    write_metrics(folder, {"rmse": 0.1})
    return folder


def test_a_new_folder_holds_the_config_and_room_for_the_rest(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "runs" / "new", CONFIG)
    assert folder.config.read_text().endswith(CONFIG)
    assert folder.checkpoints.is_dir()
    assert folder.logs.is_dir()
    assert folder.is_run
    assert not folder.is_complete


def test_the_files_have_the_names_that_the_design_gives() -> None:
    folder = RunFolder(Path("x"))
    paths = (folder.config, folder.metrics, folder.victims, folder.reconstructions, folder.report, folder.losses)
    assert [str(path) for path in paths] == [
        "x/config.yaml",
        "x/metrics.json",
        "x/victims.csv",
        "x/reconstructions.safetensors",
        "x/report.html",
        "x/logs/losses.csv",
    ]


def test_a_config_read_back_opens_the_same_run(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", CONFIG)
    text = folder.config.read_text()
    assert RunFolder.open(tmp_path / "run", text).config.read_text() == text


@pytest.mark.slow
def test_a_killed_run_is_resumed_with_all_that_it_had_finished(tmp_path: Path) -> None:
    path = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    died = subprocess.run([sys.executable, "-c", KILLED_RUN, str(path), CONFIG], env=environment, check=False)
    assert died.returncode == -9
    folder = RunFolder.open(path, CONFIG.replace("here", "there"))
    assert (folder.checkpoints / "victims_0000.safetensors").read_bytes() == b"the first victim"
    assert not list(path.rglob(".*"))
    assert not folder.is_complete


def test_a_kill_before_the_config_leaves_a_folder_that_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / ".config.yaml.0123.unfinished").write_text("attack:\n  st")
    assert RunFolder.open(tmp_path, CONFIG).is_run
    assert not list(tmp_path.glob(".*"))


def test_an_unfinished_run_with_other_settings_is_left_alone(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, CONFIG)
    before = content(folder.path)
    with pytest.raises(RunExistsError, match=r"attack\.steps: 100 there, 200 now") as caught:
        RunFolder.open(tmp_path, CONFIG.replace("100", "200"))
    assert all(remedy in str(caught.value) for remedy in ("--config", "--out", "--overwrite true"))
    assert content(folder.path) == before


def test_many_differences_are_counted_rather_than_listed(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG)
    with pytest.raises(RunExistsError, match=r"and 3 more\)"):
        RunFolder.open(tmp_path, CONFIG + "".join(f"key_{i:02}: 1\n" for i in range(11)))


def test_the_caller_says_which_settings_do_not_matter(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG)
    other = CONFIG.replace("100", "200")
    assert RunFolder.open(tmp_path, other, ignored=["attack", "out"]).is_run
    with pytest.raises(RunExistsError, match="out: 'here' there"):
        RunFolder.open(tmp_path, other.replace("here", "there"), ignored=[])


def test_a_finished_run_is_never_replaced_in_silence(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    before = content(folder.path)
    with pytest.raises(RunExistsError, match=r"finished run.*--out.*--overwrite true"):
        RunFolder.open(folder.path, CONFIG)
    assert content(folder.path) == before


def test_a_finished_run_that_was_killed_before_its_page_says_how_to_get_it(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    folder.report.unlink(missing_ok=True)
    with pytest.raises(RunExistsError, match=rf"`python attack\.py report {folder.path}` writes its page"):
        RunFolder.open(folder.path, CONFIG)
    folder.report.write_text("page")
    with pytest.raises(RunExistsError, match="left as it is: choose another folder"):
        RunFolder.open(folder.path, CONFIG)


def test_a_folder_is_of_one_process_at_a_time(tmp_path: Path) -> None:
    """Two locks of one process exclude each other like those of two processes."""
    other = FileLock(tmp_path / "run" / ".lock")
    with holding():
        RunFolder.open(tmp_path / "run", CONFIG)
        RunFolder.open(tmp_path / "run", CONFIG)  # of the same process
        with pytest.raises(Timeout):
            other.acquire(timeout=0)
    before = content(tmp_path / "run")
    with other, holding(), pytest.raises(RunExistsError, match=f"another process works in {tmp_path / 'run'}: wait"):
        RunFolder.open(tmp_path / "run", CONFIG, overwrite=True)
    assert content(tmp_path / "run") == before
    with holding():
        assert RunFolder.open(tmp_path / "run", CONFIG).is_run


def test_a_process_that_was_killed_before_its_first_file_leaves_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert RunFolder.open(tmp_path, CONFIG).is_run


def test_overwrite_begins_anew_and_keeps_foreign_files(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    (folder.path / "my notes.txt").write_text("mine")
    (folder.path / "report.pdf").write_text("of the run before")
    new = RunFolder.open(folder.path, "attack:\n  steps: 7\n", overwrite=True)
    assert not new.is_complete
    assert sorted(content(new.path)) == ["config.yaml", "my notes.txt"]
    assert "steps: 7" in new.config.read_text()


def test_overwrite_changes_nothing_when_the_new_config_is_no_config(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    before = content(folder.path)
    with pytest.raises(ConfigError, match="YAML mapping"):
        RunFolder.open(folder.path, "attack: [", overwrite=True)
    assert content(folder.path) == before


def test_a_kill_while_the_old_run_is_removed_leaves_no_run_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished(tmp_path / "run")
    removed = []

    def dies(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        if len(removed) > 1:
            raise KeyboardInterrupt
        os.unlink(path)

    monkeypatch.setattr(Path, "unlink", dies)
    with pytest.raises(KeyboardInterrupt):
        RunFolder.open(folder.path, "attack:\n  steps: 7\n", overwrite=True)
    monkeypatch.undo()
    assert removed[0] == "metrics.json"
    assert not folder.is_complete
    assert RunFolder.open(folder.path, CONFIG).is_run


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "config.yaml", "metrics.json", ".git"])
def test_a_folder_that_is_no_run_is_never_touched(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / name).write_text("attack:\n  steps: 100\n")
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="holds no run of lit_recon"):
        RunFolder.open(tmp_path, CONFIG, overwrite=overwrite)
    assert content(tmp_path) == before


def test_overwrite_does_not_follow_links_out_of_the_folder(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    folder.checkpoints.rename(elsewhere)
    folder.checkpoints.symlink_to(elsewhere)
    RunFolder.open(folder.path, CONFIG, overwrite=True)
    assert (elsewhere / "state").read_text() == "old"
    assert not folder.checkpoints.is_symlink()


def test_a_damaged_config_is_reported_as_such(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, CONFIG)
    folder.config.write_text(folder.config.read_text() + "\n}")
    with pytest.raises(CorruptFileError, match=r"config\.yaml must hold a YAML mapping"):
        RunFolder.open(tmp_path, CONFIG)


def test_a_path_that_cannot_be_a_folder_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .*file as a run folder: File exists; choose another one"):
        RunFolder.open(tmp_path / "file", CONFIG)


def test_the_command_is_recorded_and_survives_a_second_opening(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, marked(CONFIG, "reconn.py glm"))
    assert (folder.command, folder.kind) == ("reconn.py glm", "reconn glm")
    assert RunFolder.open(tmp_path, folder.config.read_text()).command == "reconn.py glm"
    assert folder.how_to_finish == f"python reconn.py glm --config {folder.config} --out {tmp_path}"
    assert RunFolder.open(tmp_path / "installed", marked(CONFIG, "lit-recon reconn glm")).kind == "reconn glm"
    assert RunFolder.open(tmp_path / "without", CONFIG).kind == ""
    named = RunFolder.open(tmp_path / "named", marked(CONFIG, "python reconn.py glm"))
    assert named.how_to_finish == f"python reconn.py glm --config {named.config} --out {named.path}"
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.yaml").write_text("# `rm -rf`\n")
    assert RunFolder(tmp_path / "foreign").command == ""


def test_a_cell_that_its_study_alone_repeats_is_finished_by_the_study(tmp_path: Path) -> None:
    study = RunFolder.open(tmp_path, marked(CONFIG, "reconn.py factors"))
    cell = RunFolder.open(tmp_path / "cells" / "a", marked(CONFIG, "reconn.py run", "reconn.py factors"))
    assert cell.command == "reconn.py run"  # its page is that of any run
    first = cell.config.read_text().splitlines()[0]
    assert "pass this file" not in first
    assert "a cell of the study in ../..; to repeat it, delete this folder and resume that study by reconn.py" in first
    assert cell.how_to_finish == study.how_to_finish
    with pytest.raises(MissingDataError, match=rf"an unfinished run .*reconn.py factors --config {study.config} --out"):
        cell.require_finished()


def test_only_settings_that_exist_are_ignored() -> None:
    trainer = [key.removeprefix("trainer.") for key in IGNORED_SETTINGS if key.startswith("trainer.")]
    assert set(trainer) <= set(TrainerSettings.__dataclass_fields__)


def test_overwriting_a_study_removes_its_cells(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, CONFIG)
    (tmp_path / "cells" / "a").mkdir(parents=True)
    folder.table.write_text("old")
    (tmp_path / "hypotheses.csv").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.open(tmp_path, CONFIG, overwrite=True)
    assert sorted(content(tmp_path)) == ["config.yaml", "notes.txt"]
