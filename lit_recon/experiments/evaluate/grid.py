"""The cells of an evaluation: attacks, and trainings of backbones and of generators."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lit_recon.errors import ConfigError, LitReconError, ThreatModelError, UnsupportedModelError
from lit_recon.experiments.configuration import find_configuration
from lit_recon.experiments.engine.pieces import CommandRun, Piece, Subcommand, merged, nested, settings_hash
from lit_recon.experiments.evaluate.results import NO_DEFENSE, repetition_in_words
from lit_recon.experiments.evaluate.settings import DefenseFamily, EvaluateSettings, GridAttack, GridPaper
from lit_recon.metrics import DEFAULT_METRICS, metrics_of
from lit_recon.modules.generator import GENERATOR_FILE
from lit_recon.reporting.provenance import read_settings
from lit_recon.reporting.wording import measure_of, strength_in_words

_COMMANDS = {
    "attack": Subcommand("attack.py run", "lit_recon.experiments.update_attack.run"),
    "utility": Subcommand("train.py backbone", "lit_recon.experiments.train.backbone"),
    "generator": Subcommand("train.py generator", "lit_recon.experiments.train.generator"),
}
#: The metric that is printed of a finished training.
_SHOWN = {"utility": ("accuracy", "accuracy"), "generator": ("RMSE of a latent search", "search_rmse")}
#: Where an attack's settings name the generator that it draws from.
_CHECKPOINT = "attack.init_args.parametrization.init_args.checkpoint"
#: Errors which mean that an attack cannot work on such a model, client or batch, or a defense in such a training.
INAPPLICABLE = (ThreatModelError, UnsupportedModelError)
#: Settings that the grid has for all its cells; they replace those of an attack's own configuration.
_COMMON = ("data", "backbone", "client", "victims", "trainer", "lpips", "seed")
#: Those that an attack's own settings may not change on the grid's network: images, updates and weights are the grid's.
_ATTACKED = ("data", "client", "victims", "seed")
#: Settings of a backbone that a training does not have.
_NO_TRAINING = ("checkpoint", "cache")


@dataclass(frozen=True)
class GridCell:
    """One run of a grid: an attack, a training that measures a defense's utility, or that of an attack's generator."""

    kind: Literal["attack", "utility", "generator"]
    folder: str  # below that of the grid, with a hash of the settings
    settings: dict[str, Any]
    defense: str
    strength: float | None
    attack: str = ""
    aware: bool | None = None  # of the defense; None where there is none to know
    batch_size: int = 0
    paper: float | str | None = None  # printed value of the metric
    generator: str = ""  # folder of the cell that trains the attack's generator, if one does
    repetition: int = 0  # of a training that measures utility

    def describe(self) -> str:
        """The cell in words."""
        if self.kind == "generator":
            return f"generator {Path(self.folder).name.rpartition('-')[0]}"
        defense = self.defense if self.strength is None else f"{self.defense} {strength_in_words(self.strength)}"
        if self.kind == "utility":
            return f"training under {defense}{repetition_in_words(self.repetition)}"
        known = " (defense unknown)" if self.aware is False else ""
        return f"{defense}, {self.attack}{known}, batch {self.batch_size}"

    def entry(self) -> dict[str, Any]:
        """Description of the cell for the page of the grid."""
        return {name: value for name, value in vars(self).items() if name not in ("settings", "generator")}

    @property
    def network(self) -> str:
        """The settings that determine the victim model, as text."""
        kept = [self.settings.get(name) for name in ("data", "backbone", "model", "seed")]
        return json.dumps(kept, sort_keys=True, default=str)

    def piece(self, study: Path, metric: str) -> Piece:
        """The piece of the study in this folder; `metric` is printed of a finished attack."""
        shown = _SHOWN.get(self.kind, (measure_of(metric).name, metric))
        return Piece(
            folder=self.folder,
            title=self.describe(),
            work=CommandRun(_COMMANDS[self.kind], self._complete(study), (shown,)),
            needs=(self.generator,) if self.generator else (),
            not_applicable=() if self.kind == "generator" else INAPPLICABLE,
        )

    def built(self, study: Path, generator: Path | None = None) -> dict[str, Any]:
        """The cell's settings as objects, or a ConfigError that names the cell.

        `generator` replaces one that is still to be trained in the folder `study`.
        """
        try:
            return _COMMANDS[self.kind].built(self._complete(study, generator))
        except LitReconError as error:
            raise ConfigError(f"{self.describe()}: {error}") from error

    def _complete(self, study: Path, generator: Path | None = None) -> dict[str, Any]:
        """The settings with the path of the generator."""
        if not self.generator:
            return self.settings
        return merged(self.settings, nested(_CHECKPOINT, str(generator or study / self.generator / GENERATOR_FILE)))


def build_cells(settings: EvaluateSettings, own: Mapping[str, Any]) -> list[GridCell]:
    """All cells: generators, which attacks need, then utility trainings, then attacks.

    `own` are the settings as the nested mapping of a configuration file. A MissingDataError, ConfigError or
    CorruptFileError is about an attack's configuration file.
    """
    common = {key: own[key] for key in _COMMON}
    if settings.model.class_path is not None:
        common["model"] = own["model"]
    rows = list(_rows(settings.defenses))
    trainings = list(_trainings(common, settings, rows))
    knowledge = own.get("knowledge")
    generators = {
        name: _generator(attack.generator, common)
        for name, attack in settings.attacks.items()
        if attack.generator is not None
    }
    entrants = [
        _Entrant(name, aware, _entrant(name, attack, common, knowledge, settings), generators.get(name))
        for name, attack in settings.attacks.items()
        for aware in ((True, False) if settings.aware == "both" else (settings.aware,))
    ]
    attacks = [
        _attack(entrant, row, size, settings)
        for row in rows
        for entrant in entrants
        # without a defense there is nothing to know: one cell will do
        if row.defense != NO_DEFENSE or entrant.aware == entrants[0].aware
        for size in settings.batch_sizes
    ]
    once = {cell.folder: cell for cell in generators.values()}
    return [*once.values(), *trainings, *attacks]


def part_of(cells: Sequence[GridCell], only: Collection[str]) -> list[GridCell]:
    """The cells of some defenses, or of single strengths such as `noise_0.1`, and the generators that they need."""
    chosen = [cell for cell in cells if {cell.defense, _name(cell)} & {*only} and cell.kind != "generator"]
    needed = {cell.generator for cell in chosen}
    return [cell for cell in cells if cell.folder in needed] + chosen if only else list(cells)


def own_network(cell: GridCell, own: Mapping[str, Any]) -> str | None:
    """Description of the network of an attack that is not on that of the grid, whose settings are `own`; else None."""
    if _is_on_network_of(cell.settings, own):
        return None
    model = _module(cell.settings)
    return f"its own {model['class_path']}" if model else network_in_words(cell.settings["backbone"])


def _is_on_network_of(settings: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    return settings["backbone"] == own["backbone"] and _module(settings) == _module(own)


def _module(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a victim model of another library; empty where it is a backbone."""
    model: Mapping[str, Any] = settings.get("model") or {}
    return model if model.get("class_path") else {}


def network_in_words(backbone: Mapping[str, Any]) -> str:
    """Description of an attack's own network, for the tables.

    >>> network_in_words({"trunk": {"class_path": "lit_recon.models.MLP", "init_args": {"hidden": [64]}}, "epochs": 3})
    'its own MLP(hidden=[64])'
    """
    trunk, wide = (backbone.get(key) for key in ("trunk", "feature_layer"))
    if backbone.get("checkpoint"):
        return f"its own {backbone['checkpoint']}"
    name = _in_words(trunk) if isinstance(trunk, Mapping) else "ResNet18"
    return f"its own {name}" + (f" with {_in_words(wide)}" if isinstance(wide, Mapping) else "")


def _in_words(spec: Mapping[str, Any]) -> str:
    given = spec.get("init_args") or {}
    inside = ", ".join(f"{key}={value}" for key, value in given.items())
    return f"{str(spec['class_path']).rpartition('.')[2]}({inside})"


class _Row(NamedTuple):
    """A defense at one strength, the strength's position, the settings, and those of trainings behind it alone."""

    defense: str
    strength: float | None
    position: int
    settings: dict[str, Any]
    utility: Mapping[str, Any]


class _Entrant(NamedTuple):
    """An attack, whether it knows the defense, its settings on the grid's victims, and its generator's training."""

    attack: str
    aware: bool
    settings: dict[str, Any]
    generator: GridCell | None


def _rows(families: Mapping[str, DefenseFamily]) -> Iterator[_Row]:
    """Every defense at every strength; first of none."""
    if NO_DEFENSE in families:
        raise ConfigError(f"no defense is always part of the grid: leave {NO_DEFENSE!r} out of `defenses`")
    yield _Row(NO_DEFENSE, None, 0, {}, {})
    for name, family in families.items():
        for position, value in enumerate(family.values):
            settings = merged(family.settings, nested(family.strength, _number(value)))
            yield _Row(name, value, position, settings, family.utility)


def _trainings(common: Mapping[str, Any], grid: EvaluateSettings, rows: Sequence[_Row]) -> Iterator[GridCell]:
    """The trainings that measure utility: one of every row, then those with other seeds."""
    for number in range(0 if grid.utility is None else grid.utility_seeds):
        for row in rows:
            inside = row.defense != NO_DEFENSE and 0 < row.position < len(grid.defenses[row.defense].values) - 1
            if number == 0 or not inside:
                losses = (grid.paper or GridPaper()).losses.get(row.defense)
                printed = losses[row.position] if losses else None
                yield _training({**common, "seed": common["seed"] + number}, grid.utility or {}, row, number, printed)


def _training(
    common: Mapping[str, Any],
    utility: Mapping[str, Any],
    row: _Row,
    repetition: int,
    printed: float | str | None,
) -> GridCell:
    backbone = {key: value for key, value in common["backbone"].items() if key not in _NO_TRAINING}
    shared = {key: common[key] for key in ("data", "trainer", "seed")}
    settings = {**shared, **merged(merged(backbone, utility), row.utility), "wandb": {"mode": "disabled"}}
    # of a client's settings a training has the local steps
    client = {key: value for key, value in row.settings.get("client", {}).items() if key == "local_steps"}
    defense = {key: value for key, value in row.settings.items() if key == "defense"}
    settings = merged(settings, {**defense, **client})
    folder = _folder(f"utility/{_name(row)}" + (f"-r{repetition}" if repetition else ""), settings)
    return GridCell("utility", folder, settings, row.defense, row.strength, paper=printed, repetition=repetition)


def _generator(path: Path, common: Mapping[str, Any]) -> GridCell:
    shared = {key: common[key] for key in ("data", "trainer")}
    settings = {**_of_file(path, "train"), **shared, "wandb": {"mode": "disabled"}}
    return GridCell("generator", _folder(f"generators/{path.stem}", settings), settings, NO_DEFENSE, None)


def _entrant(
    name: str,
    attack: GridAttack,
    common: Mapping[str, Any],
    knowledge: Mapping[str, Any] | None,
    grid: EvaluateSettings,
) -> dict[str, Any]:
    """The attack's settings on the grid's data and network, without a defense, with the metric that ranks attacks."""
    own = _of_file(attack.config, "attack")
    if own.get("defense") is not None:  # it would be part of what the grid calls no defense
        own.pop("defense")
    if attack.settings.get("defense") is not None:
        raise ConfigError(
            f"attacks.{name}.settings must not have a defense, which would be behind every cell of this attack, those "
            "without a defense too: name it under `defenses`"
        )
    known = knowledge if knowledge is not None else own.get("knowledge", {})
    below = {**own, **common, "knowledge": known, "wandb": {"mode": "disabled"}}
    if "backbone" in attack.settings:
        below.pop("model", None)
    settings = merged(below, attack.settings)
    changed = [key for key in _ATTACKED if settings[key] != common[key]]
    if changed and _is_on_network_of(settings, common):
        raise ConfigError(
            f"attacks.{name}.settings must leave {', '.join(_ATTACKED)} as the grid has them, since attacks are "
            f"compared on the same images and updates; got another {', '.join(changed)}: set them for the whole grid, "
            "or compare in two grids"
        )
    chosen = settings.get("metrics", list(DEFAULT_METRICS))
    measured = {metric.measure.key for metric in metrics_of([one for one in chosen if isinstance(one, str)])}
    return settings if grid.ranking.key in measured else {**settings, "metrics": [*chosen, grid.metric]}


def _of_file(path: Path, folder: str) -> dict[str, Any]:
    """The settings of another command's file that a cell may use."""
    found = find_configuration(path, folder)
    file = read_settings(found)
    return {key: value for key, value in file.items() if key not in ("name", "out", "overwrite", "paper", "wandb")}


def _attack(entrant: _Entrant, row: _Row, size: int, grid: EvaluateSettings) -> GridCell:
    aware = None if row.defense == NO_DEFENSE else entrant.aware
    fixed = {"knowledge": {"defense": bool(aware)}, "victims": {"batch_size": size}}
    settings = merged(merged(entrant.settings, row.settings), fixed)
    printed = None
    if (paper := grid.paper) is not None:
        printed = paper.printed(entrant.attack, row.defense, row.position, size)
        values = {} if printed is None else {grid.ranking.key: printed}
        settings["paper"] = {"citation": paper.citation, "values": values, "note": paper.note}
    generator = "" if entrant.generator is None else entrant.generator.folder
    parts = [_name(row), entrant.attack, *(["unaware"] if aware is False else []), f"b{size}"]
    folder = _folder(f"cells/{'-'.join(parts)}", settings, generator)
    return GridCell(
        "attack", folder, settings, row.defense, row.strength, entrant.attack, aware, size, printed, generator
    )


def _name(row: _Row | GridCell) -> str:
    return row.defense if row.strength is None else f"{row.defense}_{strength_in_words(row.strength)}"


def _folder(place: str, settings: Mapping[str, Any], generator: str = "") -> str:
    return f"{place}-{settings_hash({**settings, 'generator': generator} if generator else settings)}"


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value
