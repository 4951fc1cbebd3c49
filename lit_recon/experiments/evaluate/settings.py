"""Settings of `attack.py evaluate`: the grid of defenses and attacks, the target images and the utility measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_recon.clients import ClientSettings
from lit_recon.data.sources import Digits, ImageSource
from lit_recon.errors import ConfigError
from lit_recon.experiments.evaluate.judgement import NO_DEFENSE
from lit_recon.experiments.settings import BackboneSettings, LpipsSettings, RunSettings, VictimSettings
from lit_recon.records import Knowledge
from lit_recon.training.trainer import TrainerSettings


@dataclass(frozen=True)
class DefenseFamily:
    """One defense at several strengths.

    Args:
        settings: settings of `attack.py run` and `train.py backbone` that form the defense: `defense`, `client` or
            both.
        strength: dotted key of the strength, such as `defense.init_args.fraction`.
        values: values of the strength, from weak to strong.
        title: for tables; default: the name in the grid.

    Raises:
        ConfigError: no values, a strength that is no number, or settings that are neither a defense nor a client's.
    """

    settings: dict[str, Any]
    strength: str
    values: list[float]
    title: str = ""

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
        config: configuration of `attack.py run`, for example configs/attack/geiping2020.yaml; the grid's data,
            backbone, victims and client replace those of this file.
        settings: settings that override the file's. With a `backbone`, the attack runs on that network: its title names
            the network, and it is not ranked with the others.
        title: for tables; default: the name in the grid.
        generator: configuration of `train.py generator`, for example configs/train/generator_digits.yaml, for the
            attack's generator. It is trained once, on the grid's data, before the attacks; default: the checkpoint in
            the attack's own settings.
    """

    config: Path
    settings: dict[str, Any] = field(default_factory=dict)
    title: str = ""
    generator: Path | None = None


@dataclass(frozen=True)
class GridPaper:
    """The paper that a grid follows.

    Args:
        citation: authors, title, venue.
        values: printed values by attack, then by defense: one entry per value of the strength, numbers or text, or
            such a list for each batch size. `none` is no defense, with a single entry.
        note: differences between the paper's setting and this one.
    """

    citation: str = ""
    values: dict[str, dict[str, list[float | str] | dict[int, list[float | str]]]] = field(default_factory=dict)
    note: str = ""

    def printed(self, attack: str, defense: str, position: int, batch_size: int) -> float | str | None:
        """The value at one strength, counted from 0; None where the paper prints none."""
        found = self.values.get(attack, {}).get(defense)
        row = found.get(batch_size) if isinstance(found, dict) else found
        return row[position] if row else None


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(RunSettings):
    """One run of `attack.py evaluate`: every defense, at every strength, against every attack, at every batch size.

    Args:
        seed: seed of the backbone's weights and of the trainings that measure utility.
        data: where images come from.
        backbone: the victim model, the same for all defenses.
        client: clients' computation of their updates.
        knowledge: knowledge of all attackers; default: that of each attack's own configuration.
        aware: attackers know the defense: `true`, `false`, or `both`, which runs each attack twice.
        metric: metric that ranks attacks; `feature_error` is for attacks that recover features, and needs no images.
        victims: attacked images; their `batch_size` is replaced by `batch_sizes`.
        batch_sizes: images per client.
        attacks: by name.
        defenses: by name; no defense is always part of the grid.
        utility: backbone settings that differ in the trainings that measure each defense's utility, such as `epochs`;
            null: utility is not measured.
        max_accuracy_drops: losses of accuracy, as fractions, at which defenses are compared.
        trainer: devices and threads.
        lpips: settings of the LPIPS metric.
        paper: published tables.

    Raises:
        ConfigError: an empty grid, a batch size below 1, or values of the paper that fit no cell.
    """

    seed: int = 0
    data: ImageSource = field(default_factory=Digits)
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    client: ClientSettings = field(default_factory=ClientSettings)
    knowledge: Knowledge | None = None
    aware: bool | Literal["both"] = True
    metric: Literal["rmse", "psnr", "ssim", "lpips", "feature_error"] = "rmse"
    victims: VictimSettings = field(default_factory=VictimSettings)
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    attacks: dict[str, GridAttack]
    defenses: dict[str, DefenseFamily]
    utility: dict[str, Any] | None = field(default_factory=dict)
    max_accuracy_drops: list[float] = field(default_factory=lambda: [0.01, 0.02, 0.05, 0.1])
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    lpips: LpipsSettings = field(default_factory=LpipsSettings)
    paper: GridPaper | None = None

    def __post_init__(self) -> None:
        if not self.attacks:
            raise ConfigError("an evaluation needs at least one attack; got none: name one under `attacks`")
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ConfigError(f"batch_sizes must be different numbers of at least 1; got {self.batch_sizes}")
        if any(not 0 <= budget <= 1 for budget in self.max_accuracy_drops):
            raise ConfigError(f"max_accuracy_drops are losses of accuracy in [0, 1]; got {self.max_accuracy_drops}")
        if self.metric == "lpips" and self.lpips.network == "none":
            raise ConfigError("metric is lpips, which lpips.network: none leaves out: name a network")
        for attack, families in (self.paper or GridPaper()).values.items():
            for family, found in families.items():
                rows = found if isinstance(found, dict) else dict.fromkeys(self.batch_sizes, found)
                known = [None] if family == NO_DEFENSE else getattr(self.defenses.get(family), "values", None)
                fits = attack in self.attacks and known is not None and set(rows) <= set(self.batch_sizes)
                if not fits or any(len(row) != len(known or ()) for row in rows.values()):
                    raise ConfigError(
                        f"paper.values.{attack}.{family} must name an attack, a defense and batch sizes of this grid, "
                        f"and hold one entry per strength; got {found}"
                    )
