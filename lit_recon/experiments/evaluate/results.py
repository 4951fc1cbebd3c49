"""The cells of an evaluation and their results, read from its folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.experiments.evaluate.comparison import Side, sides_of
from lit_recon.measures import MEASURES, Measure
from lit_recon.metrics.aggregate import recorded_error, recorded_mean
from lit_recon.reporting.provenance import read_settings
from lit_recon.reporting.record import read_json, read_measures, read_metrics, read_victims
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import format_score, measure_of, strength_in_words
from lit_recon.reporting.writing import Scalar

#: Name of the cells without a defense.
NO_DEFENSE = "none"


@dataclass(frozen=True)
class LeakageMetric:
    """The metric by which attacks are compared; it is `of` images, labels or features."""

    measure: Measure = MEASURES["rmse"]
    of: str = "images"

    @property
    def key(self) -> str:
        return self.measure.key

    @property
    def of_features(self) -> bool:
        return self.of == "features"

    @property
    def baseline(self) -> str | None:
        """Key of the same metric of the nearest public image; None for labels and features, which have none."""
        return f"baseline_nearest_public_{self.key}" if self.of == "images" else None

    def distance(self, value: float) -> float:
        """The metric, with the sign that makes larger values worse reconstructions."""
        return -value if self.measure.higher_is_better else value

    def format(self, value: float | None) -> str:
        return format_score(self.measure, value)


@dataclass(frozen=True)
class CellResult:
    """One cell, with the entries of `GridCell` and the metrics of its run, or the reason why there are none.

    `applicable` is false where the attack cannot work on such a network, client or batch. `bound` holds lower bounds on
    the error of any attack, `rmse` and `unbiased_rmse` (None: infinite), with `notes` on what they leave out, or a
    `reason` why there is none, or why it is `not_computed`, or nothing.
    """

    kind: str
    folder: Path
    defense: str
    strength: float | None
    attack: str
    aware: bool | None
    batch_size: int
    paper: float | str | None
    metrics: Mapping[str, Scalar]
    measures: Mapping[str, Measure]
    reason: str
    applicable: bool
    bound: Mapping[str, Scalar]
    repetition: int = 0  # of a training: the first has the grid's seed, the others the seeds after it

    @property
    def bound_reason(self) -> Scalar:
        """Why there is no bound, or why it is not computed; None where there is one."""
        missing = self.bound.get("not_computed")
        return self.bound.get("reason") if missing is None else f"not computed: {missing}"

    @property
    def bound_notes(self) -> list[str]:
        """What the bounds leave out."""
        notes = self.bound.get("notes")
        return notes if isinstance(notes, list) else []

    def number(self, key: str) -> float | None:
        """A metric, infinite where it is so for some image, as PSNR of an exact one; None where there is none."""
        return recorded_mean(self.metrics, key)

    def error(self, key: str) -> float | None:
        """Standard error of a mean metric, with batches as clusters; None where it is not known."""
        return recorded_error(self.metrics, key)

    def batches(self, key: str) -> dict[int, float]:
        """The mean of a metric over the images of every batch; empty where the run has no such table."""
        path, scores = RunFolder(self.folder).victims, dict[int, list[float]]()
        for row in read_victims(path) if path.is_file() else ():
            if (value := row.scores.get(key)) is not None:
                scores.setdefault(row.batch, []).append(value)
        return {batch: statistics.mean(values) for batch, values in scores.items()}

    @property
    def has_one_batch(self) -> bool:
        """Whether all images are of a single batch, so that no error is known."""
        return self.number("n_batches") == 1


@dataclass(frozen=True)
class Evaluation:
    """All cells of an evaluation in the order of its grid.

    Attacks and defenses are titles by name, `malicious` the names of attacks whose server modifies the model,
    `batch_statistics` of those that know the BatchNorm statistics of the client's batch, and `networks` descriptions by
    name of attacks that do not use the grid's. `without` are attacks that some comparisons leave out. `measures` are
    the package's own, then others that the cells measured. `own_trainings` are settings by name of defenses behind
    which networks are not trained as the grid's.
    """

    folder: RunFolder
    settings: Mapping[str, object]
    cells: list[CellResult]
    attacks: Mapping[str, str]
    defenses: Mapping[str, str]
    max_accuracy_drops: list[float]
    malicious: list[str]
    networks: Mapping[str, str]
    metric: LeakageMetric
    measures: Mapping[str, Measure]
    without: list[str] = field(default_factory=list)
    own_trainings: Mapping[str, str] = field(default_factory=dict)
    batch_statistics: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: RunFolder | Path | str) -> Evaluation:
        """Read an evaluation, finished or not; a MissingDataError for none, a CorruptFileError for a malformed one."""
        grid = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
        if not grid.grid.is_file():
            raise MissingDataError(f"{grid.path} holds no evaluation ({grid.grid.name} is missing): check the path")
        try:
            content = read_json(grid.grid)
            _check_grid(content)
            bounds = read_metrics(grid.bounds) if grid.bounds.is_file() else {}
            cells = [_result(grid, entry, bounds.get(entry["folder"])) for entry in content["cells"]]
            measures = MEASURES | {key: measure for cell in cells for key, measure in cell.measures.items()}
            # files of earlier releases say nothing about networks, statistics, the metric and what it compares
            key = content.get("metric", "rmse")
            of = content.get("of", "features" if key.startswith("feature_") else "images")
            return cls(
                grid,
                read_settings(grid.config),
                cells,
                content["attacks"],
                content["defenses"],
                content["max_accuracy_drops"],
                content["malicious"],
                content.get("networks", {}),
                LeakageMetric(measures.get(key) or measure_of(key), of),
                measures,
                content.get("without", []),
                content.get("trainings", {}),
                content.get("batch_statistics", []),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{grid.grid} is malformed ({type(error).__name__}: {error}); run the evaluation again, which keeps "
                "its finished cells"
            ) from error

    @property
    def attacked(self) -> list[CellResult]:
        """The cells that are attacks."""
        return [cell for cell in self.cells if cell.kind == "attack"]

    def compared(self, batch_size: int) -> list[CellResult]:
        """The attacks on the grid's own network at a batch size; those on other networks may be on other images."""
        return [cell for cell in self.attacked if cell.batch_size == batch_size and cell.attack not in self.networks]

    @property
    def batch_sizes(self) -> list[int]:
        """Images per client, as the grid lists them."""
        return list(dict.fromkeys(cell.batch_size for cell in self.attacked))

    @property
    def levels(self) -> list[tuple[str, float | None]]:
        """Every defense at every strength; no defense comes first."""
        return list(dict.fromkeys((cell.defense, cell.strength) for cell in self.cells))

    @property
    def strengths(self) -> dict[str, list[float]]:
        """The strengths of every defense, as the grid lists them."""
        levels = self.levels
        return {name: [value for own, value in levels if own == name and value is not None] for name in self.defenses}

    @property
    def has_both_servers(self) -> bool:
        """Whether both honest-but-curious and malicious servers attack the grid's network."""
        rivals = self._rivals
        return bool(rivals & set(self.malicious)) and bool(rivals - set(self.malicious))

    @property
    def _rivals(self) -> set[str]:
        """The attacks that are compared with each other."""
        return {cell.attack for cell in self.attacked if cell.applicable and cell.attack not in self.networks}

    @property
    def sides(self) -> list[Side]:
        """All attacks; of both kinds of servers the honest ones; these without statistics, and those of `without`."""
        informed = self._rivals & {*self.batch_statistics}
        others = self._rivals - informed - {*self.malicious}
        malicious = self.malicious if self.has_both_servers else []
        return sides_of(self.attacks, malicious, self.without, informed if others else ())

    def trainings(self, defense: str, strength: float | None) -> list[CellResult]:
        """The finished trainings under a defense, one for each seed."""
        cells = (cell for cell in self.cells if cell.kind == "utility" and not cell.reason)
        return [cell for cell in cells if (cell.defense, cell.strength) == (defense, strength)]

    def utility(self, defense: str, strength: float | None, key: str) -> float | None:
        """The mean of a metric over the trainings under a defense; None where it was not measured."""
        values = self._measured(defense, strength, key)
        return statistics.mean(values.values()) if values else None

    def losses(self, defense: str, strength: float | None) -> list[float]:
        """Losses of accuracy of the trainings under a defense, against those without one and with the same seed."""
        plain, own = (self._measured(*level, "accuracy") for level in ((NO_DEFENSE, None), (defense, strength)))
        return [plain[number] - value for number, value in own.items() if number in plain]

    def utility_spread(self, defense: str, strength: float | None, key: str) -> float | None:
        """The standard deviation of a metric among the seeds of a training; None for a single seed."""
        values = self._measured(defense, strength, key)
        return statistics.stdev(values.values()) if len(values) > 1 else None

    def _measured(self, defense: str, strength: float | None, key: str) -> dict[int, float]:
        """A metric of the trainings under a defense that have it, by repetition."""
        cells = self.trainings(defense, strength)
        return {cell.repetition: value for cell in cells if (value := cell.number(key)) is not None}

    def title(self, defense: str, strength: float | None) -> str:
        """A defense and its strength in words."""
        if strength is None:
            return "no defense"
        return f"{self.defenses.get(defense, defense)} {strength_in_words(strength)}"

    def attack_title(self, cell: CellResult) -> str:
        """An attack in words, with its server, what it knows of the batch and the defense, and its own network."""
        name = self.attacks.get(cell.attack, cell.attack)
        facts = {
            "malicious server": cell.attack in self.malicious,
            "knows batch statistics": cell.attack in self.batch_statistics,
            f"on {self.networks.get(cell.attack)}": cell.attack in self.networks,
            "defense unknown": cell.aware is False,
        }
        return ", ".join([name, *(fact for fact, holds in facts.items() if holds)])

    def column(self, cell: CellResult) -> tuple[str, bool]:
        """An attack and whether it does not know the defense: the column of a cell in tables and pictures.

        No defense is in the column of attackers who know it, or, if there are none, of those who do not.
        """
        unaware = cell.aware is False
        if cell.aware is None:
            unaware = {one.aware for one in self.attacked if one.attack == cell.attack} == {None, False}
        return cell.attack, unaware

    def cell_title(self, cell: CellResult) -> str:
        """A cell in words."""
        if cell.kind == "generator":
            return f"generator {cell.folder.name.rpartition('-')[0]}"
        defense = self.title(cell.defense, cell.strength)
        if cell.kind == "utility":
            return f"training under {defense}{repetition_in_words(cell.repetition)}"
        return f"{defense}, {self.attack_title(cell)}, batch {cell.batch_size}"


def repetition_in_words(number: int) -> str:
    """The repetition of a training for its title; empty for the first one."""
    return f", repetition {number}" if number else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_entry(entry: Mapping[str, Any]) -> None:
    """A ValueError for an entry of a cell that is of another type."""
    texts = all(isinstance(entry[name], str) for name in ("kind", "folder", "defense", "attack"))
    numbers = _is_number(entry["batch_size"]) and (entry["strength"] is None or _is_number(entry["strength"]))
    others = entry["aware"] in (None, True, False) and isinstance(entry["paper"], str | int | float | None)
    if not (texts and numbers and others and _is_number(entry.get("repetition", 0))):
        raise ValueError(f"the entries of the cell {entry['folder']!r} are of another type")


def _check_grid(content: Mapping[str, Any]) -> None:
    """A ValueError for names and numbers of a grid that are of another type."""
    for name in ("attacks", "defenses", "networks", "trainings"):
        if not all(isinstance(title, str) for title in content.get(name, {}).values()):
            raise ValueError(f"{name} must be texts by name")
    for name in ("malicious", "without", "batch_statistics"):
        listed = content.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ValueError(f"{name} must be a list of names")
    if not all(_is_number(drop) for drop in content["max_accuracy_drops"]):
        raise ValueError("max_accuracy_drops must be numbers")


def _result(grid: RunFolder, entry: Mapping[str, Any], bound: Any) -> CellResult:
    _check_entry(entry)
    run, failure = RunFolder(grid.path / entry["folder"]), grid.failure(entry["folder"])
    done, why = run.is_complete, {"reason": "not run yet"}
    if done:
        why = {"reason": ""}
    elif failure.is_file():
        why = read_json(failure)
    return CellResult(
        **{**entry, "folder": run.path},
        metrics=read_metrics(run.metrics) if done else {},
        measures=read_measures(run.metrics) if done else {},
        reason=why["reason"],
        applicable=bool(why.get("applicable", True)),
        bound=bound or {},
    )
