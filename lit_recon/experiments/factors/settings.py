"""Settings of a factor study: a base setting of `reconn.py run` and the factors that are varied one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lit_recon.errors import ConfigError
from lit_recon.experiments.call import check_range
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings

#: A figure that a paper prints, or words in its place.
Printed = float | str | None
#: What may be measured on a cell besides the attack itself.
Measure = Literal["gradients", "embedding"]


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
        measures: optional measurements: `gradients` of the unknown image's loss along training, and a two-dimensional
            `embedding` of the released models as the attacker sees them.
        scale: scale of the values' axis; `auto` is logarithmic where they span a decade.

    Raises:
        ConfigError: no values, or both values and cases, or labels or published values that fit no value.
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
    """Released models with another fixed set than that of the shadow models.

    The new fixed set is as large as the old one and shares no image with it; shadow and test targets stay.

    Args:
        shadows: number of shadow models trained on the new fixed set: 0, or at least 2.
        way: `adapted`: a reconstructor is fitted to the base's shadow models, and a second one to its errors on the new
            ones; `scratch`: fitted to the new ones only.
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
    """Settings of a factor study, besides those of its base in `reconn.py run`.

    Args:
        factors: by name.
        seeds: every cell is run with each; default: the base's seed alone.
        seeded: dotted settings that take these seeds; `split.seed` besides `seed` draws all images anew.
        transfer: transfer to another fixed set, in the base; varied by factors on transfer.
        test_images: number of test images for the accuracy of released models.
        tried: number of released models whose accuracy is measured.
        gradient_targets: number of target images whose gradients are measured, for factors with that measure.
        gradient_steps: number of training steps at which they are measured.
        kappas: baseline success probabilities for which the bound on reconstruction is shown, where models are private.

    Raises:
        ConfigError: nothing to vary, or a number out of its range.
    """

    factors: dict[str, Factor]
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
        if len(set(self.seeds)) < len(self.seeds) or not self.seeded:
            raise ConfigError(
                f"seeds must differ from each other, and seeded must name a setting; got {self.seeds} and {self.seeded}"
            )
        counts = ("test_images", "tried", "gradient_targets", "gradient_steps")
        check_range({name: getattr(self, name) for name in counts}, 1)
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
