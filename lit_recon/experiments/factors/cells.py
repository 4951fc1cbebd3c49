"""One cell of a study of factors: a run of `reconn.py run`, and what is measured on its models afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from lit_recon.attacks.released.diagnostics import FEWEST
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import settings_of
from lit_recon.experiments.engine.pieces import Piece, Subcommand, metrics_in_words
from lit_recon.experiments.engine.settings import settings_hash
from lit_recon.experiments.factors.grid import FactorCell
from lit_recon.experiments.factors.measures import Measures, file_of, kinds_of
from lit_recon.experiments.factors.settings import FactorsSettings, TransferSettings
from lit_recon.experiments.factors.transfer import Transfer
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.reporting.run_folder import RunFolder, marked
from lit_recon.training.trainer import check_trainer, configure_process

RECONN = Subcommand("reconn.py run", "lit_recon.experiments.released_attack.run")
#: Names and keys of the metrics that are printed of a finished cell.
_SHOWN = (("MSE", "mse"), ("nearest other image", "oracle_mse"))

#: Splits by the settings that they are drawn from.
Splits = dict[str, InformedSplit]


@dataclass(frozen=True)
class FactorCellRun:
    """The work of a cell.

    Attributes:
        study: settings of the study.
        cell: to be run.
    """

    study: FactorsSettings
    cell: FactorCell

    @property
    def piece(self) -> Piece:
        """The piece of the study."""
        return Piece(
            folder=self.cell.folder,
            title=self.cell.title,
            work=self,
            shares=self._store_key(),
            results=("metrics.json", *map(file_of, kinds_of(self.cell.measures))),
        )

    def check(self, splits: Splits) -> None:
        """Set the cell up, without training anything.

        Args:
            splits: that were drawn for other cells; what is drawn for this one is added.

        Raises:
            ConfigError: the cell cannot work.
        """
        cell = self.cell
        try:
            base, shadows = self._built()
            drawn = self._drawn(shadows, splits)
            split = self._split(base, shadows, drawn)
            plan = shadows.plan(split)
            base.access.describe(plan.network, drawn.shadow)
            plan.known.on("cpu")
            shadows.shadow_models(plan, split)
            if cell.transfer is None:
                base.bind(plan)
            else:
                self._transfer(base, shadows, drawn).attack(plan)
            if "embedding" in cell.measures and len(split.targets) < FEWEST:
                raise ConfigError(f"embedding needs split.targets of at least {FEWEST}; got {len(split.targets)}")
        except LitReconError as error:
            raise ConfigError(f"{cell.title}: {error}") from error

    def __call__(self, path: Path) -> str:
        """Run the cell in its folder, or resume it, and measure what is missing; its metrics in words."""
        folder, cell = RunFolder(path), self.cell
        base, shadows = self._built()
        configure_process(shadows.trainer)
        drawn = self._drawn(shadows, {})
        if not folder.is_complete:
            if cell.transfer is None:
                RECONN.run(cell.settings, path)
            else:
                whole = {**cell.settings, "name": path.name, "transfer": cell.transfer}
                RunFolder.open(path, marked(yaml.safe_dump(whole, sort_keys=False), RECONN.name))
                self._transfer(base, shadows, drawn).run(folder)
        split = self._split(base, shadows, drawn)
        plan = shadows.plan(split, check_trainer(shadows.trainer).device)
        Measures(self.study, base.access, plan, split, drawn.shadow, folder).take(cell.measures)
        return metrics_in_words(path, _SHOWN)

    def _built(self) -> tuple[ReconnSettings, ShadowSettings]:
        built = RECONN.built(self.cell.settings)
        return settings_of(ReconnSettings, built), settings_of(ShadowSettings, built)

    def _split(self, base: ReconnSettings, shadows: ShadowSettings, drawn: InformedSplit) -> InformedSplit:
        return drawn if self.cell.transfer is None else self._transfer(base, shadows, drawn).split

    def _transfer(self, base: ReconnSettings, shadows: ShadowSettings, drawn: InformedSplit) -> Transfer:
        return Transfer(TransferSettings(**(self.cell.transfer or {})), base, shadows, drawn)

    def _drawn(self, shadows: ShadowSettings, splits: Splits) -> InformedSplit:
        start = self.cell.settings["initialization"]
        own = [self.cell.settings[name] for name in ("data", "shadow_data", "split")]
        key = json.dumps([*own, isinstance(start, dict) and start], sort_keys=True)
        if key not in splits:
            splits[key] = shadows.drawn()
        return splits[key]

    def _store_key(self) -> str:
        """Cells with the same key train the same shadow models, or more of them."""
        own = {name: self.cell.settings.get(name) for name in ShadowSettings.__dataclass_fields__}
        return settings_hash({**own, "split": {**(own["split"] or {}), "shadow": 0}})
