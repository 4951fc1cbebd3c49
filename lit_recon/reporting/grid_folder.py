"""The folder of an evaluation: the cells' run folders, why cells failed, and the grid's own files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from lit_recon.reporting.folder import RunFolder


@dataclass(frozen=True)
class GridFolder(RunFolder):
    """The files of one evaluation; those of a run that a grid does not have are never written."""

    @property
    def grid(self) -> Path:
        """What the cells are, for the page."""
        return self.path / "grid.json"

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
        return self.logs / f"{Path(cell).name}.log"

    def lock(self, cell: str) -> Path:
        """Held by the process that runs a cell."""
        return self.checkpoints / f"{Path(cell).name}.lock"

    def _clear(self) -> None:
        super()._clear()
        for path in (self.path / "cells", self.path / "utility", self.path / "failed", self.figures):
            if path.is_dir():
                shutil.rmtree(path)
        for path in (self.grid, self.table):
            path.unlink(missing_ok=True)
