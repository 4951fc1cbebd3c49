"""Settings of `attack.py evaluate`: the grid of defenses and attacks, the target images and the utility measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lit_recon.errors import ConfigError
from lit_recon.experiments.call import check_range
from lit_recon.experiments.configuration import PlainSettings
from lit_recon.experiments.evaluate.results import NO_DEFENSE, LeakageMetric
from lit_recon.experiments.settings import BoundSettings, UpdateSettings
from lit_recon.metrics import metrics_of
from lit_recon.records import Knowledge
from lit_recon.reporting.wording import strength_in_words


@dataclass(frozen=True)
class DefenseFamily:
    """One defense at several strengths.

    Args:
        settings: the settings `defense`, `client` or both of `attack.py run`, which form the defense.
        strength: dotted key of the strength, such as `defense.init_args.fraction`.
        values: values of the strength, from weak to strong.
        title: for tables; default: the name in the grid.
        utility: backbone settings that trainings behind this defense need beside the grid's, such as a norm that
            DP-SGD can be trained with; the cost of the defense then includes what they cost.
    """

    settings: PlainSettings
    strength: str
    values: list[float]
    title: str = ""
    utility: PlainSettings = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError(f"a defense needs at least one value of {self.strength}; got none")
        if any(not math.isfinite(value) for value in self.values) or len(set(self.values)) < len(self.values):
            raise ConfigError(f"values of {self.strength} must be finite and differ from each other; got {self.values}")
        odd = sorted({*self.settings, self.strength.partition(".")[0]} - {"defense", "client"})
        if odd:
            raise ConfigError(f"a defense is made of the settings `defense` and `client`; got {', '.join(odd)}")


@dataclass(frozen=True)
class GridAttack:
    """One attack of the grid.

    Args:
        config: configuration of `attack.py run`, whose data, backbone, victims, client and defense the grid's replace.
        settings: settings that override the file's; with a `backbone`, the attack runs on that network, unranked. On
            the grid's network, `data`, `client`, `victims` and `seed` are the grid's for all attacks.
        title: for tables; default: the name in the grid.
        generator: configuration of `train.py generator` for the attack's generator, such as
            configs/train/generator_digits.yaml, to be trained on the grid's data; default: the attack's own checkpoint.
    """

    config: Path
    settings: PlainSettings = field(default_factory=dict)
    title: str = ""
    generator: Path | None = None


@dataclass(frozen=True)
class GridPaper:
    """The paper that a grid follows.

    Args:
        citation: authors, title, venue.
        values: printed values by attack, then by defense (`none` for no defense): one number or text per value of the
            strength, or such a list for each batch size.
        note: differences between the paper's setting and this one.
        losses: printed training losses at the end of the trainings that measure utility, by defense, one per strength.
    """

    citation: str = ""
    values: dict[str, dict[str, list[float | str] | dict[int, list[float | str]]]] = field(default_factory=dict)
    note: str = ""
    losses: dict[str, list[float | str]] = field(default_factory=dict)

    def printed(self, attack: str, defense: str, position: int, batch_size: int) -> float | str | None:
        """The value at one strength, counted from 0; None where the paper prints none."""
        found = self.values.get(attack, {}).get(defense)
        row = found.get(batch_size) if isinstance(found, dict) else found
        return row[position] if row else None


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(UpdateSettings):
    """One run of `attack.py evaluate`: every defense, at every strength, against every attack, at every batch size.

    Args:
        seed: seed of the backbone's weights and of the trainings that measure utility.
        model: the victim model, if it is a module of another library; needs `utility: null`.
        knowledge: knowledge of all attackers; default: that of each attack's own configuration.
        aware: attackers know the defense: `true`, `false`, or `both`, which runs each attack twice.
        metric: metric that ranks attacks: a name, or the import path of a subclass of `lit_recon.metrics.Metric`.
        victims: attacked images; their `batch_size` is replaced by `batch_sizes`.
        batch_sizes: images per client.
        attacks: by name.
        defenses: by name; no defense is always part of the grid.
        only: defenses of the grid by name (`none` for no defense), or single strengths such as `noise_0.1`, whose cells
            this call runs; default: all. The page has the whole grid, with what is in the folder.
        utility: backbone settings, such as `epochs`, of the trainings that measure utility; null: it is not measured.
        utility_seeds: trainings, with different seeds, of no defense and of the weakest and the strongest strength of
            every defense; the strengths between have one.
        max_accuracy_drops: losses of accuracy, as fractions, at which defenses are compared.
        without: attacks; comparisons are repeated without them, to show what they change.
        bound: lower bounds behind noise for networks whose Jacobian is too large to store; smaller ones have theirs.
        paper: published tables.
    """

    seed: int = 0
    knowledge: Knowledge | None = None
    aware: bool | Literal["both"] = True
    metric: str = "rmse"
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    attacks: dict[str, GridAttack]
    defenses: dict[str, DefenseFamily]
    only: list[str] = field(default_factory=list)
    utility: PlainSettings | None = field(default_factory=dict)
    utility_seeds: int = 1
    max_accuracy_drops: list[float] = field(default_factory=lambda: [0.01, 0.02, 0.05, 0.1])
    without: list[str] = field(default_factory=list)
    bound: BoundSettings = field(default_factory=BoundSettings)
    paper: GridPaper | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attacks:
            raise ConfigError("an evaluation needs at least one attack; got none: name one under `attacks`")
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ConfigError(f"batch_sizes must be different numbers of at least 1; got {self.batch_sizes}")
        check_range({"max_accuracy_drops": self.max_accuracy_drops}, 0, 1)
        check_range({"utility_seeds": self.utility_seeds}, 1)
        strengths = [
            f"{name}_{strength_in_words(value)}" for name, family in self.defenses.items() for value in family.values
        ]
        named = {
            "only": (self.only, [NO_DEFENSE, *self.defenses, *strengths]),
            "without": (self.without, [*self.attacks]),
        }
        for key, (names, choice) in named.items():
            if unknown := sorted({*names} - {*choice}):
                raise ConfigError(f"{key} must name some of {', '.join(choice)}; got {', '.join(unknown)}")
        if self.without and not {*self.attacks} - {*self.without}:
            raise ConfigError(f"without must leave some of the attacks {', '.join(self.attacks)}; got all of them")
        if self.model.class_path is not None and self.utility is not None:
            raise ConfigError(
                f"utility is measured by trainings of the backbone, not of a module such as {self.model.class_path}: "
                "set utility to null"
            )
        if self.ranking.measure.higher_is_better is None:
            raise ConfigError(f"metric must say which values are better, to rank attacks; {self.metric} does not")
        if self.metric == "lpips" and self.lpips.network == "none":
            raise ConfigError("metric is lpips, which lpips.network: none leaves out: name a network")
        paper = self.paper or GridPaper()
        for family, row in paper.losses.items():
            if (values := getattr(self.defenses.get(family), "values", None)) is None or len(row) != len(values):
                raise ConfigError(
                    f"paper.losses.{family} must name a defense of this grid and hold one entry per strength; got {row}"
                )
        for attack, families in paper.values.items():
            for family, found in families.items():
                rows = found if isinstance(found, dict) else dict.fromkeys(self.batch_sizes, found)
                known = [None] if family == NO_DEFENSE else getattr(self.defenses.get(family), "values", None)
                fits = attack in self.attacks and known is not None and set(rows) <= set(self.batch_sizes)
                if not fits or any(len(row) != len(known or ()) for row in rows.values()):
                    raise ConfigError(
                        f"paper.values.{attack}.{family} must name an attack, a defense and batch sizes of this grid, "
                        f"and hold one entry per strength; got {found}"
                    )

    @property
    def ranking(self) -> LeakageMetric:
        """The metric that ranks attacks; a ConfigError where there is none of this name."""
        metric = metrics_of([self.metric])[-1]
        return LeakageMetric(metric.measure, metric.of)
