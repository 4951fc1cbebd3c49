"""The folder of a run: paths of its files, the command that made it, and whether it is finished."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lit_recon.errors import ConfigError, MissingDataError, RunExistsError
from lit_recon.io.files import LOCK, hold, is_leftover, write_text
from lit_recon.reporting.provenance import differences, parse_settings, read_settings

#: Settings that change neither the result nor its meaning: a run that differs only there is the same run.
IGNORED_SETTINGS = ("config", "out", "overwrite")
#: How the first line of a run's `config.yaml` begins; the command that made the run follows.
_MARK = "# lit_recon run"
#: In that line of a cell that its study alone can repeat.
_CELL = "a cell of the study in ../.."
_SHOWN_DIFFERENCES = 8


def marked(config_text: str, command: str = "", study: str = "") -> str:
    r"""A configuration with a first line that names the command of the run, such as `attack.py run`.

    Where that command cannot repeat the run, the line names the command of its `study`, two folders above.

    >>> marked("seed: 0", "attack.py run")
    '# lit_recon run of `attack.py run`: pass this file to --config, with another --out, to repeat it.\nseed: 0'
    """
    of = f" of `{command}`" if command else ""
    how = "pass this file to --config, with another --out, to repeat it"
    if study:
        how = f"{_CELL}; to repeat it, delete this folder and resume that study by {study}"
    return f"{_MARK}{of}: {how}.\n{config_text}"


#: Files and folders that a study leaves besides those of a run.
_OF_STUDIES = (
    *("cells", "utility", "generators", "failed", "figures", "study.json", "grid.json", "evaluation.csv"),
    *("batches.csv", "utility.csv"),
    *("bounds.json", "bounds.csv", "factors.json", "factors.csv", "rero.json", "rero.csv"),
    *("models", "images.csv", "hypotheses.csv"),
)


class _Entry:
    """A file or folder under a fixed name in the folder of a run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, under the names that all commands use; only `open` touches the disk."""

    path: Path

    config = _Entry("config.yaml")  # the resolved configuration, which repeats the run
    metrics = _Entry("metrics.json")  # all metrics under flat keys; written last: the run is complete if it exists
    victims = _Entry("victims.csv")  # one row of metrics per image
    reconstructions = _Entry("reconstructions.safetensors")  # images: reconstructed, true, and nearest public
    report = _Entry("report.html")  # built from the files above
    checkpoints = _Entry("checkpoints")  # folder of the state from which an interrupted run is resumed
    logs = _Entry("logs")  # folder of loggers' files
    clock = _Entry("checkpoints/seconds")  # seconds so far
    losses = _Entry("logs/losses.csv")  # the attack's loss by batch, restart and step
    grid = _Entry("grid.json")  # cells of an evaluation, for its page
    factors = _Entry("factors.json")  # cells of each value of each factor of a study, for its page
    bounds = _Entry("bounds.json")  # lower bounds on the error of any attack, by the cells' folders
    table = _Entry("evaluation.csv")  # one row per cell: metrics, utility, baselines, or why there are none
    batches = _Entry("batches.csv")  # of an evaluation: one row per attacked batch
    trainings = _Entry("utility.csv")  # of an evaluation: one row per training
    figures = _Entry("figures")  # folder of the plots as image files

    def failure(self, piece: str) -> Path:
        """Why a piece, named by its folder, has no result: reason, whether it was applicable, traceback."""
        return self.path / "failed" / f"{Path(piece).name}.json"

    def log(self, piece: str) -> Path:
        """The output of a piece."""
        return self.logs / f"{Path(piece).name}.log"

    @property
    def is_complete(self) -> bool:
        """Whether the run in this folder has ended."""
        return self.metrics.is_file()

    @property
    def is_run(self) -> bool:
        """Whether a run of lit_recon was started in this folder."""
        return self._first_line.startswith(_MARK)

    @property
    def command(self) -> str:
        """The command that made the run, such as `attack.py run`; empty where none is recorded."""
        parts = self._first_line.split("`")
        return parts[1] if self.is_run and len(parts) == 3 else ""

    @property
    def kind(self) -> str:
        """The command without the name of the program, such as `attack run`; empty where none is recorded."""
        return " ".join(self.command.replace(".py", "").split()[-2:])

    @property
    def how_to_finish(self) -> str:
        """The command line that resumes an interrupted run; for a cell that its study alone can resume, the study's."""
        if _CELL in self._first_line:
            return RunFolder(self.path.absolute().parent.parent).how_to_finish
        where = shlex.join(["--config", str(self.config), "--out", str(self.path)])
        command = (self.command or "attack.py run").removeprefix("python ")
        return f"{'python ' if '.py ' in command else ''}{command} {where}"

    @property
    def _first_line(self) -> str:
        try:
            with self.config.open(encoding="utf-8", errors="replace") as file:
                return file.readline()
        except OSError:
            return ""

    @classmethod
    def open(
        cls,
        path: Path | str,
        config_text: str,
        overwrite: bool = False,
        ignored: Iterable[str] = IGNORED_SETTINGS,
        reopen: bool = False,
        more: Iterable[str] = (),
    ) -> Self:
        """Create the folder of a new run, or reopen that of the same run if it was interrupted; by one process only.

        Args:
            path: created with its parents when missing.
            config_text: the resolved configuration as YAML.
            overwrite: start over where a run is already there; removes only files that a run writes.
            ignored: dotted settings, with all below them, in which the two runs may differ.
            reopen: also continue a finished run, which then counts as unfinished.
            more: names of further files and folders that a run of this kind writes, for `overwrite`.

        Raises:
            ConfigError: `config_text` is no YAML mapping, or the folder cannot be a run's.
            RunExistsError: a finished run, or an unfinished one with other settings, is there, or another process.
        """
        folder, settings = cls(Path(path)), parse_settings(config_text)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            if folder._is_used and not folder.is_run:
                raise ConfigError(
                    f"{folder.path} is not empty and holds no run of lit_recon; nothing was changed there: "
                    "choose a new folder with --out"
                )
            if not hold(folder.path):
                raise RunExistsError(
                    f"another process works in {folder.path}: wait until it has ended, or choose another folder with "
                    "--out"
                )
            if folder._is_used:
                if overwrite:
                    folder._clear(more)
                else:
                    folder._check_resumable(settings, ignored, reopen)
            for place in (folder.path, folder.checkpoints, folder.logs, folder.figures):
                for entry in filter(is_leftover, place.iterdir() if place.is_dir() else ()):
                    entry.unlink(missing_ok=True)
            write_text(folder.config, config_text if config_text.startswith(_MARK) else marked(config_text))
            folder.checkpoints.mkdir(exist_ok=True)
            folder.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot use {folder.path} as a run folder: {error.strerror or error}; choose another one with --out"
            ) from error
        return folder

    @property
    def _is_used(self) -> bool:
        return any(not is_leftover(entry) and entry.name != LOCK for entry in self.path.iterdir())

    def require_finished(self) -> None:
        """A MissingDataError unless a finished run is here; it names the command that finishes an interrupted one."""
        if not self.is_complete:
            kind = "an unfinished" if self.is_run else "no"
            remedy = f"finish it with `{self.how_to_finish}`" if self.is_run else "check the path"
            raise MissingDataError(f"{self.path} holds {kind} run ({self.metrics.name} is missing): {remedy}")

    def refuse_finished(self) -> None:
        """A RunExistsError where a finished run is: also for the processes of a group that do not open the folder.

        Such a process would wait for the first one, which the folder has refused.
        """
        if self.is_complete:
            page = (
                ""
                if self.report.is_file()
                else f" `python attack.py report {self.path}` writes its page if it has one;"
            )
            raise RunExistsError(
                f"{self.path} holds a finished run, which is left as it is:{page} choose another folder with --out, "
                "or replace the run with --overwrite true"
            )

    def _check_resumable(self, settings: dict[str, object], ignored: Iterable[str], reopen: bool) -> None:
        if not reopen:
            self.refuse_finished()
        there = read_settings(self.config)
        found = differences(there, settings, ignored)
        if found:
            shown = "; ".join(map(str, found[:_SHOWN_DIFFERENCES]))
            more = f"; and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
            raise RunExistsError(
                f"{self.path} holds a run with other settings ({shown}{more}): resume it with its own "
                f"settings (--config {self.config}), choose another folder with --out, "
                "or start again with --overwrite true"
            )
        self.metrics.unlink(missing_ok=True)

    def _clear(self, more: Iterable[str]) -> None:
        # The metrics are removed first: if the process is killed meanwhile, the run counts as unfinished.
        report = self.report, self.report.with_suffix(".pdf")
        own = (self.metrics, *report, self.victims, self.reconstructions, self.checkpoints, self.logs)
        for path in (*own, *(self.path / name for name in (*_OF_STUDIES, *more))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
