"""Running the cells of a study: each in a folder of its own, by one process at a time, whatever happens to others."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.released.diagnostics import FEWEST
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import instantiated, readable, settings_of
from lit_recon.experiments.engine.pieces import alone, attempted
from lit_recon.experiments.factors.grid import FactorCell
from lit_recon.experiments.factors.measures import Measures, missing
from lit_recon.experiments.factors.settings import FactorsSettings, TransferSettings
from lit_recon.experiments.factors.transfer import Transfer
from lit_recon.experiments.released_attack import run as reconn_run
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.io.files import write_text
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import GridFolder, RunFolder
from lit_recon.reporting.wording import duration, format_score
from lit_recon.training.trainer import check_trainer, configure_process


class RunParser:
    """Reads the settings of `reconn.py run`."""

    def __init__(self) -> None:
        self._parser: ArgumentParser = reconn_run.parser("reconn.py run")

    def canonical(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with everything that they leave out, so that equal runs have equal settings.

        Raises:
            ConfigError: the command knows no such setting, or no such value.
        """
        found: dict[str, Any] = yaml.safe_load(self._parser.dump(self.values(settings), skip_unset=False))
        return {key: value for key, value in found.items() if key != "config"}

    def values(self, settings: Mapping[str, Any]) -> Namespace:
        """The settings as the command reads them; errors as for `canonical`."""
        try:
            values: Namespace = self._parser.parse_object(dict(settings))
        except LitReconError:
            raise
        except Exception as error:  # the parser's own, of several kinds
            raise ConfigError(readable(str(error))) from error
        return values

    def built(self, settings: Mapping[str, Any]) -> tuple[ReconnSettings, ShadowSettings]:
        """The objects that the settings describe; errors as for `canonical`, and what constructors refuse."""
        built = instantiated(self._parser, self.values(settings))
        return settings_of(ReconnSettings, built), settings_of(ShadowSettings, built)

    def run(self, settings: Mapping[str, Any], folder: RunFolder) -> None:
        """Run the command in a folder, or go on with it."""
        values = self.values(settings)
        values.out, values.name = folder.path, folder.path.name
        reconn_run.execute(self._parser, values)


class FactorCells:
    """The cells of a study in its folder.

    Args:
        study: its settings.
        cells: all of them.
        folder: of the study.
        parser: of a cell's settings.
    """

    def __init__(self, study: FactorsSettings, cells: list[FactorCell], folder: GridFolder, parser: RunParser) -> None:
        self.study, self.cells, self.folder, self.parser = study, cells, folder, parser
        self._splits: dict[str, InformedSplit] = {}
        self._given_up: set[str] = set()

    def check(self) -> None:
        """Set up every cell that is not done, and train nothing.

        Raises:
            ConfigError: about the first one that cannot work.
        """
        for cell in self.cells:
            if self.is_done(cell):
                continue
            try:
                base, shadows = self.parser.built(cell.settings)
                split, public = self._split(cell, base, shadows), self._drawn(cell, shadows).shadow
                plan = shadows.plan(split)
                base.access.describe(plan.network, public)
                plan.known.on("cpu")
                shadows.shadow_models(plan, split)
                if cell.transfer is None:
                    base.bind(plan)
                else:
                    self._transfer(cell, base, shadows).attack(plan)
                if "embedding" in cell.measures and len(split.targets) < FEWEST:
                    raise ConfigError(f"embedding needs split.targets of at least {FEWEST}; got {len(split.targets)}")
            except LitReconError as error:
                raise ConfigError(f"{cell.title}: {error}") from error

    def is_done(self, cell: FactorCell) -> bool:
        """Whether the cell has its figures."""
        folder = self._run_folder(cell)
        return folder.is_complete and not missing(folder, cell.measures)

    def run(self, wait: bool) -> None:
        """Run every cell that has no figures, once.

        Args:
            wait: for cells that another process is running, and take them over where it dies; else pass them by.

        Raises:
            Interrupted: after a signal; models that are trained are kept.
        """
        for number, cell in enumerate(self.cells, start=1):
            if self.is_done(cell) or cell.folder in self._given_up:
                continue

            def work(cell: FactorCell = cell, title: str = f"[{number}/{len(self.cells)}] {cell.title}") -> None:
                failed_elsewhere = wait and self.folder.failure(cell.folder).is_file()
                if not self.is_done(cell) and not failed_elsewhere:
                    self._attempt(cell, title)

            alone(self.folder.lock(cell.folder), wait, work)

    def _attempt(self, cell: FactorCell, title: str) -> None:
        noted, started = self.folder.failure(cell.folder), time.perf_counter()
        noted.unlink(missing_ok=True)
        failure = attempted(self.folder.log(cell.folder), lambda: self._work(cell))
        if failure is not None:
            self._given_up.add(cell.folder)
            write_text(noted, json.dumps({"reason": failure.reason, "traceback": failure.traceback}, indent=2))
            print(f"{title}: FAILED, {failure.reason}", flush=True)
            return
        metrics = read_metrics(self._run_folder(cell).metrics)
        ours, oracle = (format_score("mse", float(str(metrics[key]))) for key in ("mse", "oracle_mse"))
        told = f"MSE {ours} (nearest other image {oracle})"
        print(f"{title}: {told} ({duration(time.perf_counter() - started)})", flush=True)

    def _work(self, cell: FactorCell) -> None:
        """The run of a cell, then what is measured on it."""
        folder = self._run_folder(cell)
        base, shadows = self.parser.built(cell.settings)
        configure_process(shadows.trainer)
        if not folder.is_complete:
            if cell.transfer is None:
                self.parser.run(cell.settings, folder)
            else:
                whole = {**cell.settings, "name": folder.path.name, "transfer": cell.transfer}
                RunFolder.open(folder.path, yaml.safe_dump(whole, sort_keys=False))
                self._transfer(cell, base, shadows).run(folder)
        split, public = self._split(cell, base, shadows), self._drawn(cell, shadows).shadow
        plan = shadows.plan(split, check_trainer(shadows.trainer).device)
        Measures(self.study, base.access, plan, split, public, folder).take(cell.measures)

    def _split(self, cell: FactorCell, base: ReconnSettings, shadows: ShadowSettings) -> InformedSplit:
        """The images of a cell, of which those of one source and size are drawn once."""
        if cell.transfer is not None:
            return self._transfer(cell, base, shadows).split
        return self._drawn(cell, shadows)

    def _transfer(self, cell: FactorCell, base: ReconnSettings, shadows: ShadowSettings) -> Transfer:
        return Transfer(TransferSettings(**(cell.transfer or {})), base, shadows, self._drawn(cell, shadows))

    def _drawn(self, cell: FactorCell, shadows: ShadowSettings) -> InformedSplit:
        start = cell.settings["initialization"]
        own = [*(cell.settings[name] for name in ("data", "shadow_data", "split")), isinstance(start, dict) and start]
        key = json.dumps(own, sort_keys=True)
        if key not in self._splits:
            self._splits[key] = shadows.drawn()
        return self._splits[key]

    def _run_folder(self, cell: FactorCell) -> RunFolder:
        return RunFolder(self.folder.path / Path(cell.folder))
