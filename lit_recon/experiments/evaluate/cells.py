"""Running the cells of a grid: each in a folder of its own, by one process at a time, whatever happens to others."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import ConfigError, LitReconError, ThreatModelError, UnsupportedModelError
from lit_recon.experiments.configuration import instantiated, readable
from lit_recon.experiments.engine.pieces import alone, attempted
from lit_recon.experiments.evaluate.grid import Cell, merged, nested
from lit_recon.io.files import write_text
from lit_recon.modules.generator_training import GENERATOR_FILE
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import GridFolder, RunFolder
from lit_recon.reporting.wording import duration, format_score, measure_of

_COMMANDS = {
    "attack": ("attack.py run", "lit_recon.experiments.update_attack.run"),
    "utility": ("train.py backbone", "lit_recon.experiments.train.backbone"),
    "generator": ("train.py generator", "lit_recon.experiments.train.generator"),
}
#: The figure that a finished training shows.
_SHOWN = {"utility": ("accuracy", "accuracy"), "generator": ("RMSE of a latent search", "search_rmse")}
#: Where an attack's settings name the generator that it draws from.
_CHECKPOINT = "attack.init_args.parametrization.init_args.checkpoint"
#: Errors that say that an attack cannot work on such a model, client or batch; to try again would change nothing.
INAPPLICABLE = (ThreatModelError, UnsupportedModelError)


class Cells:
    """The cells of a grid in its folder.

    Args:
        cells: all of them.
        folder: of the grid.
        metric: key of the figure that a finished attack shows.
    """

    def __init__(self, cells: Sequence[Cell], folder: GridFolder, metric: str = "rmse") -> None:
        self.cells, self.folder = list(cells), folder
        self._shown = {**_SHOWN, "attack": (measure_of(metric).name, metric)}
        self._commands = {kind: importlib.import_module(module) for kind, (_, module) in _COMMANDS.items()}
        self._parsers: dict[str, ArgumentParser] = {
            kind: self._commands[kind].parser(program) for kind, (program, _) in _COMMANDS.items()
        }
        self._given_up: set[str] = set()

    def settings(self, cell: Cell, generator: Path | None = None) -> dict[str, Any]:
        """The cell's settings, built.

        Args:
            cell: one of the grid.
            generator: stands in for the one that the cell's attack draws from, before that is trained.

        Raises:
            ConfigError: the command knows no such setting, or a constructor refuses a value.
        """
        try:
            values = self._values(cell, generator)
            values.pop("config", None)
            return instantiated(self._parsers[cell.kind], values)
        except LitReconError as error:
            raise ConfigError(f"{cell.describe()}: {error}") from error
        except Exception as error:  # the parser's own, of several kinds
            raise ConfigError(f"{cell.describe()}: {readable(str(error))}") from error

    def is_done(self, cell: Cell) -> bool:
        """Whether the cell has its figures."""
        return RunFolder(self.folder.path / cell.folder).is_complete

    def is_settled(self, cell: Cell) -> bool:
        """Whether there is nothing left to do: the cell has its figures, or its attack cannot work there."""
        return self.is_done(cell) or not self._is_applicable(cell)

    def set_aside(self, cell: Cell, reason: str) -> None:
        """Note that a cell's attack cannot work there."""
        self._note_failure(cell, reason, applicable=False)

    def run(self, wait: bool, kinds: Sequence[str] = ("generator", "utility", "attack")) -> None:
        """Run every cell that is not settled, once.

        Args:
            wait: for cells that another process is running, and take them over where it dies; else pass them by.
            kinds: of the cells.

        Raises:
            Interrupted: after a signal; the running cell has saved its state.
        """
        for number, cell in enumerate(self.cells, start=1):
            if cell.kind not in kinds or self.is_settled(cell) or cell.folder in self._given_up:
                continue

            def work(cell: Cell = cell, title: str = f"[{number}/{len(self.cells)}] {cell.describe()}") -> None:
                failed_elsewhere = wait and self.folder.failure(cell.folder).is_file()
                if not self.is_done(cell) and not failed_elsewhere:
                    self._run(cell, title)

            alone(self.folder.lock(cell.folder), wait, work)

    def _values(self, cell: Cell, generator: Path | None = None) -> Namespace:
        """The cell's settings as its command reads them."""
        settings = cell.settings
        if cell.generator:
            checkpoint = generator or self.folder.path / cell.generator / GENERATOR_FILE
            settings = merged(settings, nested(_CHECKPOINT, str(checkpoint)))
        values: Namespace = self._parsers[cell.kind].parse_object(settings)
        values.out, values.name = self.folder.path / cell.folder, Path(cell.folder).name
        return values

    def _run(self, cell: Cell, title: str) -> None:
        started = time.perf_counter()
        self.folder.failure(cell.folder).unlink(missing_ok=True)
        command, parser = self._commands[cell.kind], self._parsers[cell.kind]
        failure = attempted(self.folder.log(cell.folder), lambda: command.execute(parser, self._values(cell)))
        if failure is not None:
            self._given_up.add(cell.folder)
            applicable = not (cell.kind == "attack" and isinstance(failure.error, INAPPLICABLE))
            self._note_failure(cell, failure.reason, applicable, failure.traceback)
            print(f"{title}: {'FAILED' if applicable else 'not applicable'}, {failure.reason}", flush=True)
            return
        name, key = self._shown[cell.kind]
        figure = read_metrics(RunFolder(self.folder.path / cell.folder).metrics).get(key)
        shown = format_score(key, figure) if isinstance(figure, float) else "not measured"
        print(f"{title}: {name} {shown} ({duration(time.perf_counter() - started)})", flush=True)

    def _is_applicable(self, cell: Cell) -> bool:
        failure = self.folder.failure(cell.folder)
        return not failure.is_file() or bool(json.loads(failure.read_text(encoding="utf-8")).get("applicable", True))

    def _note_failure(self, cell: Cell, reason: str, applicable: bool, traceback: str = "") -> None:
        content = {"reason": reason, "applicable": applicable, "traceback": traceback}
        write_text(self.folder.failure(cell.folder), json.dumps(content, indent=2))
