"""The cells of a two-layer study, read from its folder: ratios of error and bound, and whether the bounds hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance
from typing import Any

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.metrics.aggregate import error_of_mean
from lit_recon.reporting.provenance import read_settings
from lit_recon.reporting.record import read_json
from lit_recon.reporting.wording import short, strength_in_words
from lit_recon.reporting.writing import Scalar, csv_text

#: The quantities that are varied, with the symbols of the theory.
SYMBOLS = {"d": "d", "m": "m", "batch": "B", "noise": "s"}
#: Larger bounds are comparable to the inputs' norm, 1, and do not bind an attack that knows this norm.
LOCAL = 0.3
#: Confidence (one-sided) at which an attack counts as below a bound.
_LEVEL = 0.999


@dataclass(frozen=True)
class TwoLayerCellScores:
    """Errors and bounds of one cell: roots of the squared error of one input, one per draw."""

    defense: str
    strength: float | None
    sizes: Mapping[str, float]
    bounds: Mapping[str, list[float]]  # `exact`, `relaxed`, `unit_norm`; infinite where no bound holds
    van_trees: float  # over all draws
    errors: Mapping[str, list[float | None]]  # by attack, and of maximum likelihood; None where there is none
    kept_share: list[float]  # of the Jacobian's squared norm under the defense
    clip: list[float]  # share of the update's norm that the defense keeps
    seconds: Mapping[str, float]
    notes: list[str]

    def bound(self, name: str) -> float:
        """Root of the mean square over draws."""
        return _root(self.bounds[name])

    def error(self, attack: str) -> float | None:
        """Root of the mean square of an attack's error; None where a draw has none."""
        known = [value for value in self.errors.get(attack, []) if value is not None]
        return _root(known) if known and len(known) == len(self.errors[attack]) else None

    def below(self, attack: str) -> bool:
        """Whether the attack's squared error lies below that of the bound with known norms, beyond chance."""
        from scipy.stats import t

        pairs = zip(self.errors.get(attack, []), self.bounds["unit_norm"], strict=False)
        known = [error**2 - limit**2 for error, limit in pairs if error is not None]
        n = len(known)
        if n < 2 or not all(map(math.isfinite, known)):
            return False
        error = error_of_mean(n, n, (n - 1) * variance(known)) or 0.0
        return mean(known) + error * float(t.ppf(_LEVEL, n - 1)) < 0

    @property
    def is_local(self) -> bool:
        """Whether the bound is small enough to bind attacks that know the inputs' norm."""
        return self.bound("unit_norm") < LOCAL


@dataclass(frozen=True)
class Study:
    """All cells of a study, the base first, and what its settings say about them."""

    folder: Path
    settings: Mapping[str, Any]
    cells: list[TwoLayerCellScores]
    attacks: Mapping[str, str]  # titles by name
    moments: list[str]  # names of the attacks to which the theory's orders apply
    defenses: Mapping[str, Mapping[str, Any]]  # `title`, `rate` and `at` by name
    privacy: list[Mapping[str, float]]  # rows about differential privacy with this `delta`
    delta: float

    @classmethod
    def read(cls, folder: Path) -> Study:
        """Read a study; MissingDataError if there is none, CorruptFileError if one of its files is malformed."""
        path, config = folder / "study.json", folder / "config.yaml"
        if not path.is_file():
            raise MissingDataError(f"{folder} holds no study ({path.name} is missing): check the path, or finish it")
        remedy = "delete it and run the study again, which keeps its other cells"
        content = read_json(path, remedy)
        try:
            cells = []
            for name in content["cells"]:
                path = folder / "cells" / name
                cells.append(_cell(read_json(path, remedy)))
            settings = read_settings(config)
            path = folder / "study.json"
            names = ("attacks", "moments", "defenses", "privacy", "delta")
            return cls(folder, settings, cells, *(content[name] for name in names))
        except (KeyError, TypeError, OSError) as error:
            raise CorruptFileError(f"{path} is malformed ({type(error).__name__}: {error}): {remedy}") from error

    @property
    def base(self) -> TwoLayerCellScores:
        """The cell from which one quantity at a time is varied."""
        return self.cells[0]

    def sweep(self, axis: str, defense: str = "none", strength: float | None = None) -> list[TwoLayerCellScores]:
        """The cells that differ from the base in one quantity alone, in its order."""
        cells = [
            cell
            for cell in self.cells
            if (cell.defense, cell.strength) == (defense, strength)
            and all(cell.sizes[other] == self.base.sizes[other] for other in SYMBOLS if other != axis)
        ]
        return sorted(cells, key=lambda cell: cell.sizes[axis])

    def strengths(self, defense: str) -> list[TwoLayerCellScores]:
        """A defense at all its strengths, everything else as in the base."""
        cells = [cell for cell in self.cells if cell.defense == defense and cell.sizes == self.base.sizes]
        return sorted(cells, key=lambda cell: cell.strength or 0.0)

    def points(self, cells: Sequence[TwoLayerCellScores], axis: str, series: str) -> tuple[list[float], list[float]]:
        """Every draw of a bound or an attack as a point; empty where one is missing or infinite."""
        xs, ys = [], []
        for cell in cells:
            for value in cell.bounds.get(series, cell.errors.get(series, [])):
                if value is None or not 0 < value < math.inf:
                    return [], []
                xs.append(cell.sizes[axis])
                ys.append(value)
        return xs, ys

    def below(self) -> list[tuple[TwoLayerCellScores, str]]:
        """Attacks below a bound that holds for them, beyond chance; expected to be empty."""
        return [(cell, name) for cell in self.cells if cell.is_local for name in self.attacks if cell.below(name)]

    def ratio(self, attack: str, cells: Sequence[TwoLayerCellScores]) -> float | None:
        """Root of the mean of squared error over squared bound, over local cells; at least 1 up to chance."""
        ratios = [
            error / bound
            for cell in cells
            if cell.is_local
            for error, bound in zip(cell.errors.get(attack, []), cell.bounds["unit_norm"], strict=False)
            if error is not None
        ]
        return _root(ratios) if ratios else None

    def compared(self) -> int:
        """Number of pairs of a cell and an attack whose bound is binding."""
        return sum(cell.error(name) is not None for cell in self.cells if cell.is_local for name in self.attacks)

    def summary(self) -> list[str]:
        """A sentence per attack, and one that says whether the bounds hold."""
        lines, plain = [], [cell for cell in self.cells if cell.strength is None]
        for name, title in self.attacks.items():
            ratio, own = self.ratio(name, plain), self.base.error(name)
            if ratio is not None and own is not None:
                lines.append(
                    f"{title}: error {short(own, 2)} in the base cell, where the bound is "
                    f"{short(self.base.bound('unit_norm'), 2)}; {short(ratio)} times the bound over all cells without "
                    "a defense."
                )
        compared, below = self.compared(), len(self.below())
        verdict = f"No attack lies below its bound beyond chance, in {compared} comparisons."
        if below:
            verdict = f"{below} of {compared} comparisons lie below the bound beyond chance: see the table of cells."
        return [*lines, verdict]

    def record(self) -> dict[str, Scalar]:
        """Metrics under flat keys."""
        record: dict[str, Scalar] = {"n_cells": len(self.cells), "n_compared": self.compared()}
        record["n_below_bound"] = len(self.below())
        for cell in self.cells:
            defense = cell.defense if cell.strength is None else f"{cell.defense}_{strength_in_words(cell.strength)}"
            key = ".".join([defense, *(f"{symbol}{cell.sizes[axis]:g}" for axis, symbol in SYMBOLS.items())])
            bounds = {name: cell.bound(name) for name in cell.bounds}
            record |= {f"bound_{n}.{key}": bound if math.isfinite(bound) else None for n, bound in bounds.items()}
            record[f"bound_van_trees.{key}"] = cell.van_trees
            record |= {f"error_{name}.{key}": cell.error(name) for name in cell.errors}
        return record

    def csv_text(self) -> str:
        """One row per cell and draw."""
        names, bounds = [*self.attacks, "likelihood"], ("exact", "relaxed", "unit_norm")
        header = ["defense", "strength", *SYMBOLS, "draw", *(f"bound_{name}" for name in bounds), "bound_van_trees"]
        rows = (
            [
                *(cell.defense, cell.strength, *(cell.sizes[axis] for axis in SYMBOLS), draw),
                *(cell.bounds[name][draw] for name in bounds),
                cell.van_trees,
                *(cell.errors[name][draw] if name in cell.errors else None for name in names),
                *(cell.kept_share[draw], cell.clip[draw]),
            ]
            for cell in self.cells
            for draw in range(len(cell.kept_share))
        )
        return csv_text([*header, *(f"error_{name}" for name in names), "kept_share", "clip"], rows)


def _cell(content: Mapping[str, Any]) -> TwoLayerCellScores:
    own = {name: value for name, value in content.items() if name not in SYMBOLS}
    return TwoLayerCellScores(sizes={axis: content[axis] for axis in SYMBOLS}, **own)


def _root(values: Sequence[float]) -> float:
    return math.sqrt(mean(value**2 for value in values))
