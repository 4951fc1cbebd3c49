"""Settings of a factor study, and its cells, which values with the same settings share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.call import check_range
from lit_recon.experiments.engine.pieces import NOT_HASHED, merged, nested, settings_hash
from lit_recon.experiments.released_attack.settings import RECONN, ReconnSettings, ShadowSettings
from lit_recon.reporting.provenance import differences

#: A figure that a paper prints, or words in its place.
Printed = float | str | None
#: What may be measured on a cell besides the attack itself.
Measure = Literal["gradients", "embedding"]
#: Settings of a run that no factor may vary.
_NO_FACTOR = ("name", "out", "overwrite", "released", "store", "curve", "wandb", "paper", "cache", "trainer")
#: Letters of a folder's name before the hash.
_NAME = 96


class Case(NamedTuple):
    """One value of a factor: its name, dotted settings and published value."""

    label: str
    overrides: dict[str, Any]
    paper: Printed = None


@dataclass(frozen=True)
class FactorSeries:
    """One curve of a factor's plot.

    Args:
        settings: dotted keys and values of all its cells.
        values: values of the factor's setting; default: the factor's own.
        paper: printed MSE, one entry per value.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    values: list[Any] | None = None
    paper: list[Printed] = field(default_factory=list)


@dataclass(frozen=True)
class Factor:
    """One factor: the values of one setting, or cases by name, while all other settings stay at the base.

    ConfigError for no values, for values and cases, for equal labels, and for labels or published values that fit no
    value.

    Args:
        setting: dotted key, such as `descent.lr` or `network.init_args.hidden`.
        values: values of that setting, one cell each; the base's own value is not run again.
        cases: instead of `setting` and `values`, dotted keys and values by name of the case; an empty case is the base.
        labels: names of the values; default: the values.
        settings: further dotted keys and values of all cells of the factor.
        series: curves of the plot by name, each with its own settings; default: one.
        paper: printed MSE, one entry per value or case.
        title: for headings; default: the factor's name.
        axis: label of the values in tables and plots; default: the last part of the setting.
        source: place in the paper, such as `table II`.
        note: remark on the page.
        seeds: seeds of this factor; default: the study's.
        measures: optional: `gradients` of the unknown image's loss, `embedding` of the released models.
        scale: scale of the values' axis; `auto` is logarithmic where they span a decade.
    """

    setting: str = ""
    values: list[Any] = field(default_factory=list)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    series: dict[str, FactorSeries] = field(default_factory=dict)
    paper: list[Printed] = field(default_factory=list)
    title: str = ""
    axis: str = ""
    source: str = ""
    note: str = ""
    seeds: list[int] | None = None
    measures: list[Measure] = field(default_factory=list)
    scale: Literal["auto", "linear", "log"] = "auto"

    def __post_init__(self) -> None:
        lines = self.lines.values()
        if self.cases:
            whole = not self.setting and not self.values and all(line.values is None for line in lines)
        else:
            whole = bool(self.setting) and all(self._values(line) for line in lines)
        if not whole:
            raise ConfigError(
                "a factor needs either a setting with its values, or cases; got "
                f"setting {self.setting!r} with {len(self.values)} values and {len(self.cases)} cases"
            )
        if self.labels and (self.cases or len(self.labels) != len(self.values)):
            raise ConfigError(f"labels name the values, one each; got {len(self.labels)} for {len(self.values)} values")
        for line in lines:
            n = len(self.cases or self._values(line))
            if line.paper and len(line.paper) != n:
                raise ConfigError(f"paper must hold one entry per value or case, {n} of them; got {len(line.paper)}")
            names = [case.label for case in self.of(line)]
            if alike := sorted({name for name in names if names.count(name) > 1}):  # labels are keys of metrics
                raise ConfigError(
                    f"two values of a factor cannot have the same label; got {', '.join(alike)} more than once: name "
                    "them by labels, or give them as cases"
                )
        if self.seeds is not None and not self.seeds:
            raise ConfigError("seeds of a factor must be one or more numbers, or left out; got none")

    @property
    def lines(self) -> dict[str, FactorSeries]:
        """The series by name; one without a name where none is given."""
        return self.series or {"": FactorSeries(paper=self.paper)}

    def _values(self, line: FactorSeries) -> list[Any]:
        return self.values if line.values is None else line.values

    def of(self, line: FactorSeries) -> list[Case]:
        """The values or cases of one line, in order."""
        named = list(self.cases.items())
        if not named:
            values = self._values(line)
            labels = self.labels if line.values is None and self.labels else map(shown, values)
            named = [(label, {self.setting: value}) for label, value in zip(labels, values, strict=True)]
        printed = line.paper or [None] * len(named)
        return [
            Case(label, {**self.settings, **line.settings, **overrides}, figure)
            for (label, overrides), figure in zip(named, printed, strict=True)
        ]


@dataclass(frozen=True)
class TransferSettings:
    """Released models with another fixed set than that of the shadow models, as large and without common images.

    Args:
        shadows: number of shadow models trained on the new fixed set: 0, or at least 2.
        way: `adapted`: correct the base's reconstructor on the new shadow models; `scratch`: learn from these only.
    """

    shadows: int = 0
    way: Literal["adapted", "scratch"] = "adapted"

    def __post_init__(self) -> None:
        if self.shadows < 0 or self.shadows == 1 or (self.way == "scratch" and not self.shadows):
            raise ConfigError(
                "transfer.shadows must be at least 2, or 0 to do without a model of the new fixed set, which the way "
                f"`adapted` alone can; got {self.shadows} with the way {self.way!r}"
            )


@dataclass(frozen=True, kw_only=True)
class FactorsSettings:
    """Settings of a factor study, besides those of its base in `reconn.py run`; ConfigError for nothing to vary.

    Args:
        factors: by name.
        only: factors whose cells, with those of the base, this call runs; default: all. The page has the whole study,
            with what is in the folder.
        seeds: every cell is run with each; default: the base's seed alone.
        seeded: dotted settings that take these seeds; `split.seed` besides `seed` draws all images anew.
        transfer: transfer to another fixed set, in the base; varied by factors on transfer.
        test_images: number of test images for the accuracy of released models.
        tried: number of released models whose accuracy is measured.
        gradient_targets: number of target images whose gradients are measured, for factors with that measure.
        gradient_steps: number of training steps at which they are measured, start and end included; 2 or more.
        kappas: baseline success probabilities for which the bound on reconstruction is shown, where models are private.
    """

    factors: dict[str, Factor]
    only: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    seeded: list[str] = field(default_factory=lambda: ["seed"])
    transfer: TransferSettings | None = None
    test_images: int = 5_000
    tried: int = 20
    gradient_targets: int = 100
    gradient_steps: int = 8
    kappas: list[float] = field(default_factory=lambda: [0.1, 1e-3, 1e-10])

    def __post_init__(self) -> None:
        if not self.factors:
            raise ConfigError("a factor study needs at least one factor; got none: name one under `factors`")
        if odd := [name for name in self.factors if name == "base" or not re.fullmatch(r"[\w. -]+", name)]:
            raise ConfigError(
                "factors give files their names, of letters, digits, spaces and _ . -, and none is base, as all are "
                f"compared with that; got {odd[0]!r}: name it by its `title`, and choose another name"
            )
        if unknown := sorted({*self.only} - {*self.factors}):
            raise ConfigError(f"only must name some of {', '.join(self.factors)}; got {', '.join(unknown)}")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeded:
            raise ConfigError(
                f"seeds must differ from each other, and seeded must name a setting; got {self.seeds} and {self.seeded}"
            )
        counts = ("test_images", "tried", "gradient_targets")
        check_range({name: getattr(self, name) for name in counts}, 1)
        check_range({"gradient_steps": self.gradient_steps}, 2)
        check_range({"kappas": self.kappas}, 0, 1, strict=True)


def check_base(base: ReconnSettings, shadows: ShadowSettings) -> None:
    """Refuse, by a ConfigError, settings of the base that no two cells can share, or that are a factor's matter."""
    if base.released is not None:
        raise ConfigError("released is not set for a study: every cell trains the models that it attacks")
    if shadows.store is not None:
        raise ConfigError("store is not set for a study: every training has a store of its own below cache")
    if base.curve:
        raise ConfigError(f"curve is not set for a study; got {base.curve}: make split.shadow a factor")


def shown(value: object) -> str:
    """A value of a setting as a label.

    >>> shown(0.001), shown([10, 10]), shown(1000), shown(None), shown({"class_path": "a.b.ReleasedMLP"})
    ('0.001', '10-10', '1,000', 'none', 'ReleasedMLP')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.10g}"
    if isinstance(value, list):
        return "-".join(shown(item) for item in value) or "none"
    if isinstance(value, dict):
        return str(value.get("class_path", value)).rpartition(".")[2]
    return str(value)


@dataclass(eq=False)
class FactorCell:
    """One run of `reconn.py run` with its complete settings, perhaps after a transfer to another fixed set."""

    folder: str  # below that of the study; it names a hash of the settings
    title: str
    settings: dict[str, Any]
    transfer: dict[str, Any] | None
    measures: set[Measure] = field(default_factory=set)


class FactorGrid:
    """The cells of a study, and as its `description`, JSON content, those of each value of each factor.

    `own` holds all settings of the study, as in its configuration file. A ConfigError says that a factor names an
    unknown setting, or an invalid value.
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
        self.description: dict[str, Any] = {"base": base, "factors": factors, "kappas": study.kappas}

    @property
    def cells(self) -> list[FactorCell]:
        """All of them, each once, those of the base first."""
        return list(self._cells.values())

    def part(self, only: Collection[str]) -> list[FactorCell]:
        """The cells of the base and of the factors of these names; all cells where none is named."""
        factors = [self.description["factors"][name] for name in only]
        points = [point for factor in factors for line in factor["lines"] for point in line["points"]]
        folders = {*self.description["base"], *(folder for point in points for folder in point["cells"])}
        return [cell for cell in self.cells if cell.folder in folders] if only else self.cells

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
