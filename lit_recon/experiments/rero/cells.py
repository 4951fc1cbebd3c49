"""The cells of a study of reconstruction robustness: one attack on released models per privacy budget."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lit_recon._torchvision

from jsonargparse import ArgumentParser

from lit_recon.experiments.configuration import instantiated
from lit_recon.experiments.engine.pieces import logged
from lit_recon.experiments.released_attack import run as reconn_run
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.rero.settings import BudgetSettings
from lit_recon.reporting.run_folder import RunFolder

#: Settings of a cell beside those of its shadow models.
_ATTACK = ("reconstructor",)


#: Settings that change how a cell is computed, not what: they are no part of its identity.
_HOW = ("trainer", "cache", "shard_size", "wandb")


@dataclass(frozen=True)
class ReroCell:
    """One run.

    Attributes:
        name: unique, fit for a file name.
        title: in words.
        epsilon: budget; None without noise.
        settings: of the run, nested.
    """

    name: str
    title: str
    epsilon: float | None
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """Of the run, below that of the study; it names a hash of the settings: other settings are another cell."""
        kept = {key: value for key, value in self.settings.items() if key not in _HOW}
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]
        return f"cells/{self.name}_{digest}"

    def shadows(self, parser: ArgumentParser) -> ShadowSettings:
        """The settings of its shadow models, built."""
        built = instantiated(parser, parser.parse_object(self.settings))
        names = {field.name for field in fields(ShadowSettings)}
        return ShadowSettings(**{key: value for key, value in built.items() if key in names})


def rero_cells(budget: BudgetSettings, own: Mapping[str, Any]) -> list[ReroCell]:
    """All cells, the ones without noise first, then from the largest budget down.

    Args:
        budget: of the study.
        own: all settings of the study, as the nested mapping that its configuration file would hold.
    """
    names = (*(field.name for field in fields(ShadowSettings)), *_ATTACK)
    common = {**{name: own[name] for name in names}, "wandb": {"mode": "disabled"}}

    def cell(name: str, title: str, epsilon: float | None, dp: dict[str, Any] | None, **more: Any) -> ReroCell:
        descent = {**own["descent"], "dp": dp}
        return ReroCell(name, title, epsilon, {**common, "descent": descent, **more})

    shared = {"bound": budget.bound, "delta": budget.delta, "neighbors": budget.neighbors}
    private = [
        cell(f"epsilon_{epsilon:g}", f"epsilon {epsilon:,g}", epsilon, {**shared, "target_epsilon": epsilon})
        for epsilon in sorted(budget.epsilons, reverse=True)
    ]
    if not budget.without:
        return private
    return [
        cell("plain", "no clipping, no noise", None, None),
        cell("unknown_initialization", "the same, initial weights unknown", None, None, initialization="fresh"),
        cell("clipped", "clipped, no noise", None, {**shared, "noise_multiplier": 0.0}),
        *private,
    ]


def run_cell(cell: ReroCell, parser: ArgumentParser, study: RunFolder) -> RunFolder:
    """Run a cell, or go on with it, if it has no figures yet; what it prints goes to a log of the study."""
    folder = RunFolder(study.path / cell.folder)
    if not folder.is_complete:
        values = parser.parse_object(cell.settings)
        values.out, values.name = folder.path, Path(cell.folder).name
        with logged(study.logs / f"{folder.path.name}.log"):
            reconn_run.execute(parser, values)
    return folder
