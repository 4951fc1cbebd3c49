"""The cells of a study of factors, one run of `reconn.py run` each.

Values with the same settings share a cell: a factor's value that is the base's needs no run of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.engine.pieces import NOT_HASHED, merged, nested, settings_hash
from lit_recon.experiments.factors.settings import Case, Factor, FactorsSettings, Measure, TransferSettings, shown
from lit_recon.experiments.released_attack.settings import RECONN, ReconnSettings, ShadowSettings
from lit_recon.reporting.provenance import differences

#: Settings of a run that no factor may vary.
_NO_FACTOR = ("name", "out", "overwrite", "released", "store", "curve", "wandb", "paper", "cache", "trainer")
#: Letters of a folder's name before the hash.
_NAME = 96


@dataclass(eq=False)
class FactorCell:
    """One run of `reconn.py run` with its complete settings, after a transfer to another fixed set where there is one.

    Its `folder`, below that of the study, names a hash of the settings.
    """

    folder: str
    title: str
    settings: dict[str, Any]
    transfer: dict[str, Any] | None
    measures: set[Measure] = field(default_factory=set)


class FactorGrid:
    """The cells of a study, and as its `description`, JSON content, those of each value of each factor.

    Args:
        study: its settings.
        own: all its settings, as in its configuration file.

    Raises:
        ConfigError: a factor names an unknown setting, or an invalid value.
    """

    def __init__(self, study: FactorsSettings, own: Mapping[str, Any]) -> None:
        names = [item.name for schema in (ReconnSettings, ShadowSettings) for item in fields(schema)]
        self._study = study
        self._base = {**{name: own[name] for name in names}, "wandb": {"mode": "disabled"}, "paper": None}
        self._varied = {name for name in names if name not in _NO_FACTOR} | {"transfer"}
        self._paper, self._transfer = own.get("paper"), own.get("transfer")
        self._cells: dict[str, FactorCell] = {}
        self._plain = self._complete({})
        base = [cell.folder for cell in self._cells_of("base", Case("", {}), study.seeds)]
        factors = {name: self._factor(name, factor) for name, factor in study.factors.items()}
        self.description = {"base": base, "factors": factors, "kappas": study.kappas}

    @property
    def cells(self) -> list[FactorCell]:
        """All of them, each once, those of the base first."""
        return list(self._cells.values())

    def _factor(self, name: str, factor: Factor) -> dict[str, Any]:
        return {
            "title": factor.title or name.replace("_", " ").capitalize(),
            "axis": factor.axis or factor.setting.rpartition(".")[2].replace("_", " "),
            "setting": factor.setting,
            "source": factor.source,
            "note": factor.note,
            "scale": factor.scale,
            "measures": list(factor.measures),
            "lines": [
                {"name": line, "points": [self._point(name, factor, line, case) for case in factor.of(series)]}
                for line, series in factor.lines.items()
            ],
        }

    def _point(self, name: str, factor: Factor, line: str, case: Case) -> dict[str, Any]:
        title = ", ".join(part for part in (f"{factor.title or name}: {case.label}", line) if part)
        cells = self._cells_of(title, case, self._study.seeds if factor.seeds is None else factor.seeds)
        for cell in cells:
            cell.measures.update(factor.measures)
        place, folders = _place(case.overrides.get(factor.setting)), [cell.folder for cell in cells]
        return {"label": case.label, "place": place, "paper": case.paper, "cells": folders}

    def _cells_of(self, title: str, case: Case, seeds: list[int]) -> list[FactorCell]:
        """The cells of one value, one per seed; fewer where the value sets the seed itself."""
        try:
            drawn: list[int | None] = [*seeds] or [None]
            return list(dict.fromkeys(self._cell(title, case, seed) for seed in drawn))
        except LitReconError as error:
            raise ConfigError(f"{title}: {error}") from error

    def _cell(self, title: str, case: Case, seed: int | None) -> FactorCell:
        drawn = {} if seed is None else dict.fromkeys(self._study.seeded, seed)
        whole = self._complete({**drawn, **case.overrides})
        digest = settings_hash(whole)
        if digest not in self._cells:
            named = title if seed is None else f"{title}, seed {seed}"
            transfer = whole.pop("transfer")
            if self._paper is not None:
                values = {} if case.paper is None else {"mse": case.paper}
                whole["paper"] = {**self._paper, **({"values": values} if case.overrides else {})}
            folder = f"cells/{self._name({**whole, 'transfer': transfer})}-{digest}"
            self._cells[digest] = FactorCell(folder, named, whole, transfer)
        return self._cells[digest]

    def _complete(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {**self._base, "transfer": self._transfer}
        for key, value in overrides.items():
            if key.partition(".")[0] not in self._varied:
                raise ConfigError(f"{key!r} is no setting that a factor may vary; choose from {sorted(self._varied)}")
            settings = merged(settings, nested(key, value))
        transfer = _transfer(settings.pop("transfer"))
        return {**RECONN.canonical(settings), "transfer": transfer}

    def _name(self, settings: Mapping[str, Any]) -> str:
        """The difference of the cell from the base, shortened for a folder's name."""
        # a key below a mapping that was null before appears with None on both sides
        both = differences(self._plain, settings, NOT_HASHED)
        found = [item for item in both if item.before is not None or item.after is not None]
        parts = [f"{item.key.rpartition('.')[2]}_{shown(item.after)}" for item in found if item.after is not None]
        parts += [f"no_{item.key.rpartition('.')[2]}" for item in found if item.after is None]
        return re.sub(r"[^\w.-]+", "_", "-".join(parts).replace(",", ""))[:_NAME].strip("-_.") or "base"


def _transfer(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    odd = sorted(given.keys() - {item.name for item in fields(TransferSettings)})
    if odd:
        raise ConfigError(f"transfer has no setting {', '.join(odd)}; it has shadows and way")
    return asdict(TransferSettings(**given))


def _place(value: object) -> float | None:
    """Position of a value on a numeric axis: numbers, and lists of one; None for all others."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
