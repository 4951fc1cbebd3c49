"""A piece of a study: one run with its own settings and folder, and its outcome."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import instantiated, readable
from lit_recon.io.files import holding, with_contents
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import format_score
from lit_recon.training.progress import interruptible

#: Settings that say how or where a run is computed or shown, not what it computes: they are no part of its hash.
NOT_HASHED = ("name", "out", "overwrite", "cache", "shard_size", "trainer", "lpips", "wandb", "paper")

#: Stands for `backbone.cache` in a hash: its default, with which pieces keep the folders that they had.
_CACHE = "runs/backbones"


def settings_hash(settings: Mapping[str, Any]) -> str:
    """A hash of the settings of a piece and of what the files hold that they name, eight hexadecimal digits.

    >>> settings_hash({"seed": 0, "trainer": {"threads": 1}}) == settings_hash({"seed": 0}) != settings_hash({})
    True
    """
    kept = {key: value for key, value in settings.items() if key not in NOT_HASHED}
    backbone = kept.get("backbone")
    if isinstance(backbone, Mapping) and "cache" in backbone:
        kept["backbone"] = {**backbone, "cache": _CACHE}
    return hashlib.sha256(json.dumps(with_contents(kept), sort_keys=True, default=str).encode()).hexdigest()[:8]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, with those of `above` taking precedence; another class keeps no arguments of the first one.

    >>> merged({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"x": 7}})
    {'a': {'x': 7, 'y': 2}, 'b': 3}
    """
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same = value.get("class_path", old.get("class_path")) == old.get("class_path")
            result[key] = merged(old, value) if same else value
        else:
            result[key] = value
    return result


def nested(key: str, value: object) -> dict[str, Any]:
    """The nested mapping in which a dotted key has a value.

    >>> nested("defense.init_args.std", 0.1)
    {'defense': {'init_args': {'std': 0.1}}}
    """
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


@dataclass(frozen=True)
class Piece:
    """One run of a study: a cell of its table, or a training that cells need.

    Attributes:
        folder: of the run, below the study's; it identifies the piece, and contains a hash of its settings.
        title: for the screen.
        work: picklable; called with the absolute path of the folder, in any process; returns what to print.
        needs: folders of the pieces that must be finished before this one starts.
        shares: by the name of something that several pieces use, such as a store of models, how much of it this piece
            needs; of those that need more than there is, one at a time runs, and makes it.
        results: files in the folder; the piece is finished when all of them are there.
        not_applicable: errors which mean that the piece has no result; it is not tried again then.
    """

    folder: str
    title: str
    work: Callable[[Path], str]
    needs: tuple[str, ...] = ()
    shares: Mapping[str, int] = field(default_factory=dict, hash=False)
    results: tuple[str, ...] = ("metrics.json",)
    not_applicable: tuple[type[Exception], ...] = ()

    def is_done(self, study: Path) -> bool:
        """Whether the piece has its result."""
        return all((study / self.folder / name).is_file() for name in self.results)


@dataclass(frozen=True)
class PieceOutcome:
    """What to print of a piece's result, or why there is none, with the traceback of an unexpected error."""

    summary: str = ""
    reason: str = ""
    applicable: bool = True
    traceback: str = ""
    seconds: float = 0.0


def attempt(piece: Piece, study: Path, log: Path) -> PieceOutcome:
    """Run a piece with its output appended to a log; an error ends the piece, not the study.

    Raises:
        Interrupted: after SIGINT or SIGTERM.
    """
    started, found = time.perf_counter(), PieceOutcome()
    with _logged(log), interruptible(), holding():
        print(f"{piece.title}: started on {platform.node()}, process {os.getpid()}", flush=True)
        try:
            found = PieceOutcome(piece.work((study / piece.folder).absolute()))
        except Exception as error:  # noqa: BLE001  # of whatever kind: the other pieces are still to be run
            reason = " ".join(str(error).split()) or type(error).__name__
            unexpected = "" if isinstance(error, LitReconError) else traceback.format_exc()
            found = PieceOutcome("", reason, not isinstance(error, piece.not_applicable), unexpected)
    return replace(found, seconds=time.perf_counter() - started)


@contextlib.contextmanager
def _logged(log: Path) -> Iterator[None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("a", encoding="utf-8") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield
    except OSError as error:  # that of a write has no file name
        raise OSError(error.errno, error.strerror, str(log)) from error


@dataclass(frozen=True)
class Subcommand:
    """A command such as `attack.py run` whose runs are pieces of a study; `module` holds its `parser` and `execute`."""

    name: str
    module: str

    def values(self, settings: Mapping[str, Any]) -> Namespace:
        """The settings as the command reads them; a ConfigError for unknown ones and values of the wrong type.

        The pieces of a study share most of their sections, such as `data` and `attack`: each is read once in a process.
        """
        known = _sections(self)
        texts = {key: (key, repr(value)) for key, value in settings.items()}
        new = {key: value for key, value in settings.items() if texts[key] not in known}
        try:
            found: Namespace = _parser(self).parse_object(new) if new else _defaults(self).clone()
        except LitReconError:
            raise
        except Exception as error:  # the parser's own, of several kinds
            raise ConfigError(readable(str(error))) from error
        found.pop("config", None)
        known.update({texts[key]: found[key] for key in new if key in found})
        for key in settings.keys() - new.keys():
            found[key] = known[texts[key]]
        return found.clone()

    def canonical(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with all defaults, so that equal runs have equal settings; errors as for `values`."""
        new, known = self.values(settings), _plain_sections(self)
        texts = {key: (key, repr(settings[key]) if key in settings else None) for key in vars(new)}
        for key in [key for key, text in texts.items() if text in known]:
            new.pop(key)
        if vars(new):
            written = yaml.safe_load(_parser(self).dump(new, skip_unset=False, skip_validation=True))
            known.update({texts[key]: written[key] for key in vars(new)})
        return {key: copy.deepcopy(known[text]) for key, text in texts.items()}

    def built(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The objects that the settings describe; errors as for `values`, and those of their constructors."""
        return instantiated(_parser(self), self.values(settings))

    def run(self, settings: Mapping[str, Any], folder: Path) -> None:
        """Run the command, or resume its run in this folder."""
        values = self.values(settings)
        values.out, values.name = folder, folder.name
        importlib.import_module(self.module).execute(_parser(self), values)


@cache
def _parser(command: Subcommand) -> ArgumentParser:
    parser: ArgumentParser = importlib.import_module(command.module).parser(command.name)
    return parser


@cache
def _defaults(command: Subcommand) -> Namespace:
    found: Namespace = _parser(command).parse_object({})
    return found


@cache
def _sections(command: Subcommand) -> dict[tuple[str, str], Any]:
    """Sections of settings that the command has read: by name and text, what the parser made of them."""
    return {}


@cache
def _plain_sections(command: Subcommand) -> dict[tuple[str, str | None], Any]:
    """The same as `_sections`, with all defaults, as in a file; by name alone where a section is its default."""
    return {}


@dataclass(frozen=True)
class CommandRun:
    """The work of a piece that is a run of a command: runs or resumes it; returns `metrics_in_words`."""

    command: Subcommand
    settings: Mapping[str, Any] = field(hash=False)
    shown: tuple[tuple[str, str], ...]

    def __call__(self, folder: Path) -> str:
        self.command.run(self.settings, folder)
        return metrics_in_words(folder, self.shown)


def metrics_in_words(folder: Path, shown: Sequence[tuple[str, str]]) -> str:
    """Metrics of a finished run by name and key, with the unit of the first one: `MSE 0.012 (mean image 0.068)`."""
    metrics = read_metrics(RunFolder(folder).metrics)
    values = [(name, value if isinstance(value := metrics.get(key), float) else None) for name, key in shown]
    first, *others = [f"{name} {format_score(shown[0][1], value)}" for name, value in values]
    return f"{first} ({', '.join(others)})" if others else first
