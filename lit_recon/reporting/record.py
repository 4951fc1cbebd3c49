"""A finished run as its folder tells it; and, from here too, the writers of what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.reporting.folder import RunFolder
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.reading import read_images, read_losses, read_metrics, read_victims
from lit_recon.reporting.rows import LossCurve, Metric, VictimRow
from lit_recon.reporting.settings import parse_settings
from lit_recon.reporting.writing import write_losses, write_metrics, write_tensors, write_victims

__all__ = [
    "LossCurve",
    "Metric",
    "RunRecord",
    "VictimRow",
    "environment",
    "write_losses",
    "write_metrics",
    "write_tensors",
    "write_victims",
]


@dataclass(frozen=True)
class RunRecord:
    """A finished run.

    Attributes:
        folder: where it is.
        settings: the configuration, nested.
        metrics: flat figures and facts.
        victims: one row per image, in the order of the images.
        reconstructions, targets, nearest_public: float32 `(n, c, h, w)` in [0, 1].
        class_names: name of every class; empty when the run did not tell.
        losses: one curve per batch and restart; empty when the run kept none.
    """

    folder: RunFolder
    settings: Mapping[str, object]
    metrics: Mapping[str, Metric]
    victims: list[VictimRow]
    reconstructions: NDArray[np.float32]
    targets: NDArray[np.float32]
    nearest_public: NDArray[np.float32]
    class_names: list[str] = field(default_factory=list)
    losses: list[LossCurve] = field(default_factory=list)

    @classmethod
    def read(cls, folder: RunFolder | Path | str) -> RunRecord:
        """Read a finished run.

        Raises:
            MissingDataError: the folder holds no finished run.
            CorruptFileError: one of its files is malformed, or two of them contradict each other.
        """
        run = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
        if not run.is_complete:
            if run.is_run:
                raise MissingDataError(
                    f"{run.path} holds an unfinished run ({run.metrics.name} is missing): finish it with "
                    f"`attack.py run --config {run.config} --out {run.path}`"
                )
            raise MissingDataError(f"{run.path} holds no run ({run.metrics.name} is missing): check the path")
        for path in (run.config, run.victims, run.reconstructions):
            if not path.is_file():
                raise CorruptFileError(
                    f"{run.path} holds a finished run without {path.name}: restore the file or repeat the run"
                )
        victims, images = read_victims(run.victims), read_images(run.reconstructions)
        if len(images.targets) != len(victims):
            raise CorruptFileError(
                f"{run.reconstructions} holds {len(images.targets)} images, but {run.victims.name} has {len(victims)} "
                "rows: the files are of two runs; repeat the run"
            )
        return cls(
            run,
            parse_settings(run.config.read_text(encoding="utf-8"), run.config),
            read_metrics(run.metrics),
            victims,
            *images,
            losses=read_losses(run.losses) if run.losses.is_file() else [],
        )

    def number(self, key: str) -> float | None:
        """The figure under `key`; None where it is absent, null, or no number."""
        value = self.metrics.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, key: str) -> str:
        """The fact under `key` as text; empty where it is absent or null."""
        value = self.metrics.get(key)
        return "" if value is None else str(value)
