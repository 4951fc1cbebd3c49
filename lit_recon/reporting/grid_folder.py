"""The folder of an evaluation: the cells' run folders, why cells failed, and the grid's own files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lit_recon.reporting.folder import IGNORED_SETTINGS, RunFolder

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
