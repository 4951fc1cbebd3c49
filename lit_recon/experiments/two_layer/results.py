"""The cells of a two-layer study, read from its folder, and what they say: slopes, ratios, whether the bounds hold."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.reporting.settings import parse_settings
from lit_recon.reporting.writing import Scalar

#: The quantities that are varied, with the symbols of the theory.
SYMBOLS = {"d": "d", "m": "m", "batch": "B", "noise": "s"}
#: A bound above this is of the size of the inputs themselves, and says nothing of an attack that knows their norm.
LOCAL = 0.3
#: One-sided level at which an attack counts as below a bound.
_LEVEL = 0.999


@dataclass(frozen=True)
class TwoLayerCellScores:
    """Figures of one cell: roots of the squared error of one input, one per draw.

    Attributes:
        defense, strength: no strength without a defense.
        sizes: by axis.
        bounds: `exact`, `relaxed`, `unit_norm`; infinite where nothing holds.
        van_trees: over all draws.
        errors: by attack, and of maximum likelihood started at the truth; None where there is none.
        kept_share, clip: of the Jacobian's squared norm, and of the update's norm.
        seconds: by part.
        notes: what happened.
    """

    defense: str
    strength: float | None
    sizes: Mapping[str, float]
    bounds: Mapping[str, list[float]]
    van_trees: float
    errors: Mapping[str, list[float | None]]
    kept_share: list[float]
    clip: list[float]
    seconds: Mapping[str, float]
    notes: list[str]

    def bound(self, name: str) -> float:
        """Root of the mean square over draws."""
        return _root(self.bounds[name])

    def error(self, attack: str) -> float | None:
        """The same of an attack's error; None where a draw has none."""
        known = [value for value in self.errors.get(attack, []) if value is not None]
        return _root(known) if known and len(known) == len(self.errors[attack]) else None

    def below(self, attack: str, bound: str = "unit_norm") -> bool:
        """Whether the attack's squared error lies below the bound's, beyond chance."""
        from scipy.stats import t

        known = [
            e**2 - b**2 for e, b in zip(self.errors.get(attack, []), self.bounds[bound], strict=False) if e is not None
        ]
        if len(known) < 2 or not all(map(math.isfinite, known)):
            return False
        middle = mean(known)
        spread = math.sqrt(sum((value - middle) ** 2 for value in known) / (len(known) - 1) / len(known))
        return middle + spread * float(t.ppf(_LEVEL, len(known) - 1)) < 0

    @property
    def is_local(self) -> bool:
        """Whether the bound is so small that it binds attacks that know the inputs' norm."""
        return self.bound("unit_norm") < LOCAL


@dataclass(frozen=True)
class Study:
    """All cells of a study.

    Attributes:
        folder: where it is.
        settings: its configuration, nested.
        cells: in order; the first one is the base.
        attacks: titles by name.
        moments: names of the attacks that the orders are about.
        defenses: `title`, `rate` and `at` by name.
        privacy: rows about differential privacy.
        delta: of that privacy.
    """

    folder: Path
    settings: Mapping[str, Any]
    cells: list[TwoLayerCellScores]
    attacks: Mapping[str, str]
    moments: list[str]
    defenses: Mapping[str, Mapping[str, Any]]
    privacy: list[Mapping[str, float]]
    delta: float

    @classmethod
    def read(cls, folder: Path) -> Study:
        """Read a study.

        Raises:
            MissingDataError: the folder holds none.
            CorruptFileError: one of its files is malformed.
        """
        path = folder / "study.json"
        if not path.is_file():
            raise MissingDataError(f"{folder} holds no study ({path.name} is missing): check the path, or finish it")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            cells = []
            for name in content["cells"]:
                path = folder / "cells" / name
                cells.append(_cell(json.loads(path.read_text(encoding="utf-8"))))
            path = folder / "config.yaml"
            settings = parse_settings(path.read_text(encoding="utf-8"), path)
            path = folder / "study.json"
            names = ("attacks", "moments", "defenses", "privacy", "delta")
            return cls(folder, settings, cells, *(content[name] for name in names))
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise CorruptFileError(
                f"{path} is malformed or missing ({type(error).__name__}: {error}); delete it and run the study again, "
                "which keeps its other cells"
            ) from error

    @property
    def base(self) -> TwoLayerCellScores:
        """The cell from which one thing at a time is varied."""
        return self.cells[0]

    def sweep(self, axis: str, defense: str = "none", strength: float | None = None) -> list[TwoLayerCellScores]:
        """The cells that differ from the base in one quantity alone, in its order."""
        return sorted(
            (
                cell
                for cell in self.cells
                if (cell.defense, cell.strength) == (defense, strength)
                and all(cell.sizes[other] == self.base.sizes[other] for other in SYMBOLS if other != axis)
            ),
            key=lambda cell: cell.sizes[axis],
        )

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
        """Attacks that lie below a bound that holds for them, beyond chance: there should be none."""
        return [(cell, name) for cell in self.cells if cell.is_local for name in self.attacks if cell.below(name)]

    def ratio(self, attack: str, cells: Sequence[TwoLayerCellScores] | None = None) -> float | None:
        """Root of the mean of squared error over squared bound, over local cells; 1 is the best there is."""
        pairs = [
            (error, bound)
            for cell in (self.cells if cells is None else cells)
            if cell.is_local
            for error, bound in zip(cell.errors.get(attack, []), cell.bounds["unit_norm"], strict=False)
            if error is not None
        ]
        return math.sqrt(mean((error / bound) ** 2 for error, bound in pairs)) if pairs else None

    def compared(self) -> int:
        """Pairs of a cell and an attack on it for which the bound is binding."""
        return sum(1 for cell in self.cells if cell.is_local for name in self.attacks if cell.error(name) is not None)

    def summary(self) -> list[str]:
        """The findings in words, for a terminal and the top of the page."""
        lines = []
        plain = [cell for cell in self.cells if cell.strength is None]
        for name, title in self.attacks.items():
            ratio, own = self.ratio(name, plain), self.base.error(name)
            if ratio is not None and own is not None:
                lines.append(
                    f"{title}: error {own:.2g} in the base cell, where the bound is "
                    f"{self.base.bound('unit_norm'):.2g}; "
                    f"{ratio:.3g} times the bound over all cells without a defense."
                )
        found = self.below()
        lines.append(
            f"No attack lies below its bound beyond chance, in {self.compared()} comparisons."
            if not found
            else f"{len(found)} of {self.compared()} comparisons lie below the bound beyond chance: see the table of "
            "cells."
        )
        return lines

    def record(self) -> dict[str, Scalar]:
        """The figures under flat keys."""
        record: dict[str, Scalar] = {"n_cells": len(self.cells), "n_compared": self.compared()}
        record["n_below_bound"] = len(self.below())
        for cell in self.cells:
            key = ".".join(
                [cell.defense if cell.strength is None else f"{cell.defense}_{cell.strength:g}"]
                + [f"{symbol}{cell.sizes[axis]:g}" for axis, symbol in SYMBOLS.items()]
            )
            record |= {f"bound_{name}.{key}": _finite(cell.bound(name)) for name in cell.bounds}
            record[f"bound_van_trees.{key}"] = cell.van_trees
            record |= {f"error_{name}.{key}": cell.error(name) for name in cell.errors}
        return record

    def csv_text(self) -> str:
        """One row per cell and draw."""
        names = [*self.attacks, "likelihood"]
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        header = ["defense", "strength", *SYMBOLS, "draw", "bound_exact", "bound_relaxed", "bound_unit_norm"]
        writer.writerow([*header, "bound_van_trees", *(f"error_{name}" for name in names), "kept_share", "clip"])
        for cell in self.cells:
            for draw in range(len(cell.kept_share)):
                figures = [cell.bounds[name][draw] for name in ("exact", "relaxed", "unit_norm")]
                found = [cell.errors[name][draw] if name in cell.errors else None for name in names]
                identity = [cell.defense, cell.strength, *(cell.sizes[axis] for axis in SYMBOLS), draw]
                writer.writerow([*identity, *figures, cell.van_trees, *found, cell.kept_share[draw], cell.clip[draw]])
        return buffer.getvalue()


def _cell(content: Mapping[str, Any]) -> TwoLayerCellScores:
    sizes = {axis: content[axis] for axis in SYMBOLS}
    names = ("bounds", "van_trees", "errors", "kept_share", "clip", "seconds", "notes")
    return TwoLayerCellScores(content["defense"], content["strength"], sizes, *(content[name] for name in names))


def _root(values: Sequence[float]) -> float:
    return math.sqrt(mean(value**2 for value in values))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
