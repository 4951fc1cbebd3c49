"""The cells of a study of training sets, read from its folder, and their means over training seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.experiments.trainset.score import BEST, GOOD, SAME_POOL
from lit_recon.experiments.trainset.settings import PLAIN
from lit_recon.metrics.aggregate import interval_of_mean
from lit_recon.reporting.provenance import find_setting, read_settings
from lit_recon.reporting.record import read_json
from lit_recon.reporting.wording import short
from lit_recon.reporting.writing import Scalar, csv_text

#: Files of a study: what the page needs besides the cells, and one row per cell and training image.
STUDY, TABLE = "study.json", "images.csv"
#: Distances to the released weights, and their names: two that attacks note, and one that is measured for all of them.
DISTANCES = {
    "distance": "parameter distance",
    "residual": "the attack's own residual",
    "stationarity": "stationarity, best multipliers",
}
#: Scores whose means are recorded.
_RECORDED = ("n_good", "n_good_stretched", "best_ssim", "best_ssim_stretched", "ssim", "ncc", "rmse")
_REMEDY = "delete it and run the study again, which keeps its other cells"


@dataclass(frozen=True)
class SeedMean:
    """A mean over training seeds, and the half length of its 95 % interval; None for one seed."""

    value: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedMean:
        """Of one value per seed."""
        n, value = len(values), fmean(values)
        spread = interval_of_mean(n, n, value, (n - 1) * stdev(values) ** 2) if n > 1 else None
        return cls(value, None if spread is None else spread[1] - value)

    def text(self, digits: int = 3) -> str:
        """Such as `0.41 ± 0.02`."""
        return short(self.value, digits) + ("" if self.half is None else f" ± {short(self.half, 2)}")


@dataclass(frozen=True)
class ClaimRate:
    """How often the test for members says yes: number of tests and of trainings, and the mean of the trainings' rates.

    Tests of one training share its released model and the candidates, so that trainings count, not tests.
    """

    n: int
    trainings: int
    mean: SeedMean


@dataclass(frozen=True)
class TrainsetGroup:
    """The cells of one attack, start and defense, one per training seed."""

    attack: str
    start: str
    share: float
    defense: str
    cells: Sequence[Mapping[str, Any]]

    @property
    def key(self) -> str:
        """For metrics, such as `kkt.noise_0.none`."""
        return f"{self.attack}.{self.start}_{self.share:g}.{self.defense}"

    @property
    def title(self) -> str:
        """For tables."""
        defended = "" if self.defense == PLAIN else f", {self.defense}"
        return f"{self.attack} from {self.start}{'' if self.share in (0, 1) else f' {self.share:g}'}{defended}"

    @property
    def n_compared(self) -> int:
        """Public images that the baseline `SAME_POOL` compares: as many as candidates, or all if these are fewer."""
        return min(int(self.cells[0][name]) for name in ("pool", "n_public"))

    def mean(self, *path: str) -> SeedMean:
        """Of an entry of every cell."""
        return SeedMean.of([float(_entry(cell, path)) for cell in self.cells])

    def before_and_after(self, quantity: str) -> tuple[list[float], list[float]]:
        """A distance at the start and at the end, one value per cell; empty where it is not known."""
        found = [[ends(one, quantity) for one in cell["restarts"]] for cell in self.cells]
        known = [[pair for pair in own if pair is not None] for own in found]
        if any(len(pairs) < len(own) for pairs, own in zip(known, found, strict=True)):
            return [], []
        before, after = ([fmean(pair[place] for pair in own) for own in known] for place in (0, 1))
        return before, after

    def selections(self) -> dict[str, SeedMean]:
        """Mean SSIM of the candidates that every selection chooses; empty for one restart."""
        names = self.cells[0]["selections"]
        found = {name: [cell["selections"][name].get("ssim", 0.0) for cell in self.cells] for name in names}
        return {name: SeedMean.of(values) for name, values in found.items()}

    def selection(self) -> tuple[SeedMean, SeedMean] | None:
        """Mean SSIM of the best images of the restart with the least loss, and of the best one; None for one start."""
        if any(len(cell["restarts"]) < 2 for cell in self.cells):
            return None
        losses = [[one["loss"] for one in cell["restarts"]] for cell in self.cells]
        values = [[one["scores"]["best_ssim"] for one in cell["restarts"]] for cell in self.cells]
        seen = [own[loss.index(min(loss))] for own, loss in zip(values, losses, strict=True)]
        return SeedMean.of(seen), SeedMean.of([max(own) for own in values])

    def certified(self) -> dict[str, SeedMean] | None:
        """Numbers of certified candidates, of wrong ones, and of training images they show; None if none can be."""
        found = [counts for cell in self.cells if (counts := cell.get("certified")) is not None]
        return {name: SeedMean.of([own[name] for own in found]) for name in found[0]} if found else None

    def claims(self) -> dict[str, ClaimRate]:
        """Rates of true and false positives of the test for members; without those of which nothing was tested."""
        rates = {}
        for name, kind in (("true_positives", True), ("false_positives", False)):
            found = [[claim["claimed"] for claim in cell["claims"] if claim["member"] is kind] for cell in self.cells]
            tested = [own for own in found if own]
            if tested:
                rates[name] = ClaimRate(sum(map(len, tested)), len(tested), SeedMean.of([fmean(own) for own in tested]))
        return rates


def ends(restart: Mapping[str, Any], quantity: str) -> tuple[float, float] | None:
    """A distance of one restart at the start and at the end; None where it is not known."""
    if quantity == "stationarity":
        before, after = (restart["stationarity"][name] for name in ("before", "after"))
        return None if before is None or after is None else (before, after)
    points = restart["curve"].get(quantity)
    return (points[0], points[-1]) if points else None


def _group(key: tuple[Any, ...], cells: list[Mapping[str, Any]]) -> TrainsetGroup:
    attack, start, share, defense = key
    return TrainsetGroup(attack, start, share, defense, cells)


def _entry(cell: Mapping[str, Any], path: Sequence[str]) -> Any:
    found: Any = cell
    for name in path:
        found = found[name]
    return math.nan if found is None else found


def _certified_text(group: TrainsetGroup, n: int) -> str:
    sure = group.certified()
    if sure is None:
        return ""
    return f"; certified by the attack: {sure['images'].text()} of {n} training images, {sure['wrong'].text()} wrong"


@dataclass(frozen=True)
class TrainsetStudy:
    """All cells of a study and what its settings say about them."""

    folder: Path
    settings: Mapping[str, Any]
    groups: list[TrainsetGroup]
    folders: Mapping[str, list[str]]  # of the cells, by the key of their group
    refused: Mapping[str, str]  # reasons by description of a cell to which an attack does not apply
    known: Mapping[str, Any]  # KnownSettings by name
    elsewhere: bool  # whether the model was trained elsewhere

    @classmethod
    def read(cls, folder: Path) -> TrainsetStudy:
        """Read a study; MissingDataError if there is none, CorruptFileError if one of its files is malformed."""
        path, config = folder / STUDY, folder / "config.yaml"
        if not path.is_file():
            raise MissingDataError(f"{folder} holds no study ({path.name} is missing): check the path, or finish it")
        content = read_json(path, _REMEDY)
        found: dict[tuple[Any, ...], list[tuple[str, Mapping[str, Any]]]] = {}
        try:
            for name in content["cells"]:
                path = folder / name
                cell = read_json(path, _REMEDY)
                own = tuple(cell[entry] for entry in ("attack", "start", "share", "defense"))
                found.setdefault(own, []).append((str(Path(name).parent), cell))
            groups = [_group(key, [cell for _, cell in cells]) for key, cells in found.items()]
            folders = {
                group.key: [name for name, _ in cells] for group, cells in zip(groups, found.values(), strict=True)
            }
            settings = read_settings(config)
            path = folder / STUDY
            return cls(
                folder, settings, groups, folders, *(content[name] for name in ("refused", "known", "elsewhere"))
            )
        except (KeyError, TypeError, OSError) as error:
            raise CorruptFileError(f"{path} is malformed ({type(error).__name__}: {error}): {_REMEDY}") from error

    @property
    def best(self) -> TrainsetGroup:
        """The group with the most good images, then the best SSIM, of those without truth in their start.

        Groups under a defense count only if there is none without one, and starts with truth only if all have some.
        """
        without = self.where(lambda group: group.share == 0)
        return max(
            [group for group in without if group.defense == PLAIN] or without or self.groups,
            key=lambda group: (group.mean("scores", "n_good").value, group.mean("scores", "best_ssim").value),
        )

    def where(self, wanted: Callable[[TrainsetGroup], bool]) -> list[TrainsetGroup]:
        """The groups that fulfil a condition."""
        return [group for group in self.groups if wanted(group)]

    def cost(self, group: TrainsetGroup) -> float | None:
        """Mean loss of accuracy against the trainings without a defense of the same seeds; None where none is known.

        Attacks may apply to the models of some seeds only; all of them share these models.
        """
        plain = {cell["seed"]: cell for own in self.where(lambda own: own.defense == PLAIN) for cell in own.cells}
        pairs = [(plain[cell["seed"]], cell) for cell in group.cells if cell["seed"] in plain]
        losses = [before["model"]["accuracy"] - after["model"]["accuracy"] for before, after in pairs]
        return fmean(losses) if losses else None

    def landscape(self) -> dict[tuple[str, str], list[TrainsetGroup]]:
        """Groups of one attack and start without a defense, by share of the truth, where there are several shares."""
        found: dict[tuple[str, str], list[TrainsetGroup]] = {}
        for group in self.where(lambda group: group.defense == PLAIN):
            found.setdefault((group.attack, group.start), []).append(group)
        return {key: sorted(own, key=lambda group: group.share) for key, own in found.items() if len(own) > 1}

    def summary(self) -> list[str]:
        """Findings, one sentence each; the last one is about `best`."""
        lines = []
        for group in self.groups:
            n, pool = group.cells[0]["scores"]["n"], group.cells[0]["pool"]
            lines.append(
                f"{group.title}: {group.mean('scores', 'n_good').text()} of {n} training images with SSIM above "
                f"{GOOD}, best {min(BEST, n)}: {group.mean('scores', 'best_ssim').text()} (pool {pool})"
                f"{_certified_text(group, n)}."
            )
        best, own = self.best, self.best.cells[0]
        few = best.n_compared < own["pool"]
        compared = f"all {own['n_public']} public images" if few else "as many public images as candidates"
        public = [best.mean("baselines", SAME_POOL, name).text() for name in ("n_good", "best_ssim")]
        closest = (
            f"No result is from a start without the truth. Closest, with a share of {best.share:g} of it in its start"
            if best.share
            else "Closest without the truth in its start"
        )
        lines.append(
            f"{closest}: {best.title}, with {best.mean('scores', 'n_good').text()} of "
            f"{own['scores']['n']} training images above SSIM {GOOD} and a mean of "
            f"{best.mean('scores', 'best_ssim').text()} for the best {min(BEST, own['scores']['n'])}; for the "
            f"nearest of {compared} these are {' and '.join(public)}"
            f"{_certified_text(best, own['scores']['n'])}."
        )
        return lines

    def record(self) -> dict[str, Scalar]:
        """Metrics under flat keys: means over training seeds."""
        record: dict[str, Scalar] = {"n_cells": sum(len(group.cells) for group in self.groups)}
        record["n_refused"] = len(self.refused)
        for group in self.groups:
            key, first = group.key, group.cells[0]
            record |= {f"n_images.{key}": first["scores"]["n"], f"pool.{key}": first["pool"]}
            for name in _RECORDED:
                mean = group.mean("scores", name)
                record[f"{name}.{key}"] = mean.value
                if mean.half is not None:
                    record[f"{name}_low.{key}"], record[f"{name}_high.{key}"] = (
                        mean.value - mean.half,
                        mean.value + mean.half,
                    )
                for base in first["baselines"]:
                    baseline = group.mean("baselines", base, name).value
                    record[f"baseline_{base.replace(' ', '_')}_{name}.{key}"] = baseline
            if (sure := group.certified()) is not None:
                names = {"images": "certified", "candidates": "certified_candidates", "wrong": "certified_wrong"}
                record |= {f"{name}.{key}": sure[own].value for own, name in names.items()}
            for name in ("closer_ncc", "closer_rmse"):
                record[f"{name}.{key}"] = group.mean("neighbours", name, "value").value
            for quantity in DISTANCES:
                for place, values in zip(("before", "after"), group.before_and_after(quantity), strict=True):
                    if values:
                        record[f"{quantity}_{place}.{key}"] = fmean(values)
            for name, rate in group.claims().items():
                record |= {f"{name}.{key}": rate.mean.value, f"{name}_n.{key}": rate.n}
                record[f"{name}_trainings.{key}"] = rate.trainings
                if rate.mean.half is not None:
                    record[f"{name}_low.{key}"] = rate.mean.value - rate.mean.half
                    record[f"{name}_high.{key}"] = rate.mean.value + rate.mean.half
            if (chosen := group.selection()) is not None:
                record[f"restart_by_loss.{key}"], record[f"restart_by_truth.{key}"] = (one.value for one in chosen)
            record |= {f"selected_by_{name}_ssim.{key}": mean.value for name, mean in group.selections().items()}
            record[f"training_loss.{key}"] = group.mean("model", "loss").value
            record[f"accuracy.{key}"] = group.mean("model", "accuracy").value
            record[f"seconds.{key}"] = group.mean("attack_seconds").value
        return record

    def csv_text(self) -> str:
        """One row per cell and training image: the nearest candidate and its scores."""
        identity = ("attack", "start", "share", "defense", "seed")
        cells = [cell for group in self.groups for cell in group.cells]
        names = list(cells[0]["images"][0]) if cells else []
        rows = ([*(cell[key] for key in identity), *row.values()] for cell in cells for row in cell["images"])
        return csv_text([*identity, *names], rows)

    def setting(self, key: str) -> Any:
        """A setting of the study."""
        return find_setting(self.settings, key)
