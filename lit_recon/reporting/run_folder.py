"""The folder that a run leaves behind: where its files are, whether it is finished, and who may write there."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lit_recon.errors import ConfigError, RunExistsError
from lit_recon.io.files import is_leftover, write_text
from lit_recon.reporting.settings import differences, parse_settings

#: Settings that change neither the result nor its meaning: a run that differs only there is the same run.
IGNORED_SETTINGS = (
    "config",
    "out",
    "overwrite",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.logger",
)

_MARK = "# lit_recon run: pass this file to --config to repeat it.\n"
_SHOWN_DIFFERENCES = 8


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, at the names that every command uses. Making one touches nothing; `open` does."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, which repeats the run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Every figure under flat keys; written last, so that its presence means that the run is complete."""
        return self.path / "metrics.json"

    @property
    def victims(self) -> Path:
        """One row of figures per image."""
        return self.path / "victims.csv"

    @property
    def reconstructions(self) -> Path:
        """The images: reconstructed, true, and nearest public."""
        return self.path / "reconstructions.safetensors"

    @property
    def report(self) -> Path:
        """The page to look at, built from the files above."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """Folder of what an interrupted run needs to go on."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of loggers' files."""
        return self.path / "logs"

    @property
    def losses(self) -> Path:
        """The attack's loss by batch, restart and step."""
        return self.logs / "losses.csv"

    @property
    def is_complete(self) -> bool:
        """Whether the run in this folder has ended."""
        return self.metrics.is_file()

    @property
    def is_run(self) -> bool:
        """Whether a run of ours began in this folder."""
        try:
            with self.config.open(encoding="utf-8", errors="replace") as file:
                return file.readline() == _MARK
        except OSError:
            return False

    @classmethod
    def open(
        cls,
        path: Path | str,
        config_text: str,
        overwrite: bool = False,
        ignored: Iterable[str] = IGNORED_SETTINGS,
        reopen: bool = False,
        more: Iterable[str] = (),
    ) -> RunFolder:
        """Take a folder for a run: a new one, or that of the same run if it was interrupted.

        With several processes, call it in one of them and let the others make `RunFolder(path)` after a barrier.

        Args:
            path: the folder; created with its parents when missing.
            config_text: the resolved configuration as YAML.
            overwrite: begin anew when a run is already there, finished or not. Only files that a run writes are
                removed, and only from a folder in which a run of ours began.
            ignored: dotted settings, with all below them, in which the two runs may differ.
            reopen: go on with a finished run too, which then counts as unfinished.
            more: names of further files and folders that a run of this kind writes, to be removed by `overwrite`.

        Raises:
            ConfigError: `config_text` is no YAML mapping, or the folder cannot be a run's.
            RunExistsError: a finished run, or an unfinished one with other settings, is there.
        """
        folder, settings = cls(Path(path)), parse_settings(config_text)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            if any(not is_leftover(entry) for entry in folder.path.iterdir()):
                if not folder.is_run:
                    raise ConfigError(
                        f"{folder.path} is not empty and holds no run of lit_recon; nothing was changed there: "
                        "choose a new folder with --out"
                    )
                if overwrite:
                    folder._clear(more)
                else:
                    folder._check_resumable(settings, ignored, reopen)
            folder._sweep()
            write_text(folder.config, _MARK + config_text.removeprefix(_MARK))
            folder.checkpoints.mkdir(exist_ok=True)
            folder.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot use {folder.path} as a run folder: {error.strerror or error}; choose another one with --out"
            ) from error
        return folder

    def _check_resumable(self, settings: dict[str, object], ignored: Iterable[str], reopen: bool) -> None:
        if self.is_complete and not reopen:
            raise RunExistsError(
                f"{self.path} holds a finished run, which is left as it is: choose another folder with --out, "
                "or replace the run with --overwrite true"
            )
        there = parse_settings(self.config.read_text(encoding="utf-8"), self.config)
        found = differences(there, settings, ignored)
        if found:
            shown = "; ".join(str(difference) for difference in found[:_SHOWN_DIFFERENCES])
            more = f"; and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
            raise RunExistsError(
                f"{self.path} holds a run with other settings ({shown}{more}): resume it with its own "
                f"settings (--config {self.config}), choose another folder with --out, "
                "or begin anew with --overwrite true"
            )
        self.metrics.unlink(missing_ok=True)

    def _clear(self, more: Iterable[str]) -> None:
        # The metrics go first: killed in between, the folder then counts as unfinished, never as complete.
        own = (self.metrics, self.report, self.victims, self.reconstructions, self.checkpoints, self.logs)
        for path in (*own, *(self.path / name for name in more)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        for path in self.path.iterdir():
            if is_leftover(path):
                path.unlink(missing_ok=True)


#: What a grid or a study leaves besides the files of a run.
_OWN = (
    "cells",
    "utility",
    "generators",
    "failed",
    "figures",
    "grid.json",
    "bounds.json",
    "evaluation.csv",
    "study.json",
    "bounds.csv",
    "factors.json",
    "factors.csv",
)


@dataclass(frozen=True)
class GridFolder:
    """The files of one evaluation. Making one touches nothing; `open` does."""

    path: Path

    @property
    def run(self) -> RunFolder:
        """Configuration, record, page and logs, at the names that every command uses."""
        return RunFolder(self.path)

    @property
    def grid(self) -> Path:
        """What the cells are, for the page."""
        return self.path / "grid.json"

    @property
    def factors(self) -> Path:
        """Which cells make up which value of which factor, for the page of a study of factors."""
        return self.path / "factors.json"

    @property
    def bounds(self) -> Path:
        """How close any attack could have come, by the cells' folders."""
        return self.path / "bounds.json"

    @property
    def table(self) -> Path:
        """One row per cell: figures, price, baselines, or why there are none."""
        return self.path / "evaluation.csv"

    @property
    def figures(self) -> Path:
        """Folder of the scatter and the galleries, as images to be used elsewhere."""
        return self.path / "figures"

    def failure(self, cell: str) -> Path:
        """Why a cell, named by its folder, has no figures."""
        return self.path / "failed" / f"{Path(cell).name}.json"

    def log(self, cell: str) -> Path:
        """What a cell printed."""
        return self.run.logs / f"{Path(cell).name}.log"

    def lock(self, cell: str) -> Path:
        """Held by the process that runs a cell."""
        return self.run.checkpoints / f"{Path(cell).name}.lock"

    @classmethod
    def open(
        cls,
        path: Path | str,
        config_text: str,
        overwrite: bool = False,
        ignored: Iterable[str] = IGNORED_SETTINGS,
        reopen: bool = False,
    ) -> GridFolder:
        """Take a folder for an evaluation, as `RunFolder.open` does for a run.

        Raises:
            ConfigError, RunExistsError: see there.
        """
        return cls(RunFolder.open(path, config_text, overwrite, ignored, reopen, _OWN).path)
