"""The cells of a study of reconstruction robustness: one attack on released models per privacy budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lit_recon.experiments.configuration import settings_of
from lit_recon.experiments.engine.pieces import CommandRun, Piece, Subcommand
from lit_recon.experiments.engine.settings import settings_hash
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.rero.settings import BudgetSettings

_RECONN = Subcommand("reconn.py run", "lit_recon.experiments.released_attack.run")
#: Settings of a cell beside those of its shadow models.
_ATTACK = ("reconstructor",)
#: Names and keys of the metrics that are printed of a finished cell.
_SHOWN = (("MSE", "mse"), ("mean image", "baseline_mean_image_mse"))


@dataclass(frozen=True)
class ReroCell:
    """One run.

    Attributes:
        name: unique, fit for a file name.
        title: for the screen.
        epsilon: budget; None without noise.
        settings: of the run, nested.
    """

    name: str
    title: str
    epsilon: float | None
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """Of the run, below that of the study; it names a hash of the settings."""
        return f"cells/{self.name}_{settings_hash(self.settings)}"

    @property
    def piece(self) -> Piece:
        """The piece of the study."""
        return Piece(self.folder, self.title, CommandRun(_RECONN, self.settings, _SHOWN))

    def shadows(self) -> ShadowSettings:
        """The settings of its shadow models, as an object."""
        return settings_of(ShadowSettings, _RECONN.built(self.settings))


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
