"""The cells of a study of factors, read from its folder, and its findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.metrics.aggregate import error_of_mean, recorded_error
from lit_recon.reporting.provenance import read_settings
from lit_recon.reporting.record import read_json, read_metrics, read_victims
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import format_score
from lit_recon.reporting.writing import Scalar

_REMEDY = "delete it and run the study again"


@dataclass(frozen=True, eq=False)
class FactorCellScores:
    """One run: metrics of the attack and of the released models, or the reason why there are none."""

    folder: RunFolder
    metrics: Mapping[str, Scalar]
    models: Mapping[str, Any]
    reason: str = ""

    def number(self, key: str) -> float | None:
        """A metric of the attack or of the released models; None where there is none."""
        value = self.metrics.get(key, self.models.get(key))
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @cached_property
    def errors(self) -> list[float]:
        """Mean squared error of every target image."""
        return [row.scores["mse"] or 0.0 for row in read_victims(self.folder.victims)]

    def measure(self, kind: str) -> dict[str, Any] | None:
        """Another measure, such as `gradients`; None where it was not taken."""
        path = self.folder.path / f"{kind}.json"
        return read_json(path, _REMEDY) if path.is_file() else None


@dataclass(frozen=True)
class Point:
    """One value of a factor, with a cell per seed; `place` is on a numeric axis, `paper` the printed MSE."""

    label: str
    place: float | None
    paper: float | str | None
    cells: list[FactorCellScores]

    @property
    def known(self) -> list[FactorCellScores]:
        """The runs that have results."""
        return [cell for cell in self.cells if not cell.reason]

    def mean(self, key: str) -> float | None:
        """A metric, averaged over the seeds; None where a run has none."""
        known = [value for cell in self.known if (value := cell.number(key)) is not None]
        return fmean(known) if known and len(known) == len(self.known) else None

    @property
    def bounds(self) -> list[float]:
        """Upper bounds on the chance of reconstruction, by baseline error; empty where no model is private."""
        every = [cell.models["bounds"] for cell in self.known if "bounds" in cell.models]
        return [max(own) for own in zip(*every, strict=True)]

    @property
    def spread(self) -> float | None:
        """Standard error of the MSE: over the target images of one run, or over several seeds; None: not known."""
        found = [(cell, value) for cell in self.known if (value := cell.number("mse")) is not None]
        if len(found) == 1:
            return recorded_error(found[0][0].metrics, "mse")
        n = len(found)
        return error_of_mean(n, n, (n - 1) * variance([value for _, value in found])) if n else None

    @property
    def ratio(self) -> float | None:
        """MSE over that of the nearest other image; below 1 the attack counts as successful in the paper."""
        mse, oracle = self.mean("mse"), self.mean("oracle_mse")
        return mse / oracle if mse is not None and oracle else None


@dataclass(frozen=True)
class Line:
    """The values of a factor under further settings; `name` is empty where there is only one line."""

    name: str
    points: list[Point]


@dataclass(frozen=True)
class FactorResult:
    """One factor; see `lit_recon.experiments.factors.settings.Factor`."""

    name: str
    title: str
    axis: str
    setting: str
    source: str
    note: str
    scale: str
    measures: list[str]
    lines: list[Line]

    @property
    def points(self) -> list[tuple[str, Point]]:
        """All values in words, with the name of their line where there are several."""
        return [
            (f"{point.label}, {line.name}" if line.name else point.label, point)
            for line in self.lines
            for point in line.points
        ]


@dataclass(frozen=True)
class FactorStudy:
    """A study and its factors."""

    folder: RunFolder
    settings: Mapping[str, object]  # the nested configuration
    base: Point  # that all others are compared with
    factors: list[FactorResult]
    kappas: list[float]  # baseline success probabilities of the bounds on reconstruction

    @classmethod
    def read(cls, folder: Path) -> FactorStudy:
        """Read a study, finished or not; MissingDataError if there is none, CorruptFileError for a malformed file."""
        grid = RunFolder(folder)
        if not grid.factors.is_file():
            raise MissingDataError(f"{grid.path} holds no study ({grid.factors.name} is missing): check the path")
        settings = read_settings(grid.config)
        content, cell = read_json(grid.factors, _REMEDY), cache(partial(_cell, grid))
        try:
            base = Point("base", None, None, [cell(name) for name in content["base"]])
            factors = [_factor(name, found, cell) for name, found in content["factors"].items()]
            return cls(grid, settings, base, factors, [float(kappa) for kappa in content["kappas"]])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{grid.factors} is malformed ({type(error).__name__}: {error}); run the study again, which keeps its "
                "finished cells"
            ) from error

    @property
    def cells(self) -> list[FactorCellScores]:
        """Every run once, those of the base first."""
        named = [cell for factor in self.factors for _, point in factor.points for cell in point.cells]
        return list({cell.folder.path: cell for cell in [*self.base.cells, *named]}.values())

    @property
    def failed(self) -> list[tuple[str, str]]:
        """The cells without results, and why."""
        return [(cell.folder.path.name, cell.reason) for cell in self.cells if cell.reason]

    def is_base(self, point: Point) -> bool:
        """Whether a value is the base's own."""
        return point.cells[: len(self.base.cells)] == self.base.cells

    def findings(self) -> list[str]:
        """The base's error, then a sentence or two per factor."""
        mse = self.base.mean("mse")
        lines = []
        if mse is not None:
            others = [self.base.mean(key) for key in ("oracle_mse", "baseline_mean_image_mse")]
            told = [format_score("mse", value) for value in (mse, *others)]
            lines.append(f"Base: MSE {told[0]} (nearest other image {told[1]}, mean image {told[2]}).")
        for factor in self.factors:
            known = [(found, words) for words, point in factor.points if (found := point.mean("mse")) is not None]
            known.sort(key=lambda pair: pair[0])
            if not known:
                continue
            (low, best), (high, worst) = known[0], known[-1]
            sentence = f"{factor.title}: MSE {format_score('mse', low)} at {best}"
            sentence += f" to {format_score('mse', high)} at {worst}." if len(known) > 1 else "."
            fails = [words for words, point in factor.points if point.ratio is not None and point.ratio >= 1]
            if fails:
                sentence += f" No nearer than the nearest other image: {'; '.join(fails)}."
            lines.append(sentence)
        if self.failed:
            lines.append(f"{len(self.failed)} of {len(self.cells)} cells have no results; see below.")
        return lines

    def record(self) -> dict[str, Scalar]:
        """Metrics under flat keys."""
        record: dict[str, Scalar] = {"n_cells": len(self.cells), "n_failed": len(self.failed)}
        for name in ("mse", "oracle_mse", "baseline_mean_image_mse", "success_rate", "accuracy"):
            record[name] = self.base.mean(name)
        for factor in self.factors:
            for words, point in factor.points:
                key = f"{factor.name}.{words}"
                for name in ("mse", "success_rate", "accuracy"):
                    record[f"{name}.{key}"] = point.mean(name)
                if reasons := [cell.reason for cell in point.cells if cell.reason]:
                    record[f"mse.{key}_reason"] = "; ".join(reasons)
        return record


def _factor(name: str, found: Mapping[str, Any], cell: Callable[[str], FactorCellScores]) -> FactorResult:
    def point(own: Mapping[str, Any]) -> Point:
        return Point(**{**own, "cells": [cell(folder) for folder in own["cells"]]})

    lines = [Line(line["name"], [point(own) for own in line["points"]]) for line in found["lines"]]
    return FactorResult(name, **{**found, "lines": lines})


def _cell(grid: RunFolder, name: str) -> FactorCellScores:
    folder, failure = RunFolder(grid.path / name), grid.failure(name)
    models = folder.path / "models.json"
    if folder.is_complete and models.is_file() and not failure.is_file():
        return FactorCellScores(folder, read_metrics(folder.metrics), read_json(models, _REMEDY))
    reason = str(read_json(failure, _REMEDY).get("reason")) if failure.is_file() else "it has not been run yet"
    return FactorCellScores(folder, {}, {}, reason)
