"""The start of a command that writes a run folder: the settings of all of them, and one call of one of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import ConfigError
from lit_recon.experiments.configuration import SAME_RUN, instantiated, resolved, settings_of
from lit_recon.modules.loggers import WandbSettings, build_loggers
from lit_recon.reporting.provenance import Paper, flatten, is_below
from lit_recon.reporting.run_folder import RunFolder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pytorch_lightning.loggers import Logger

_Schema = TypeVar("_Schema", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of every command that writes a run folder.

    Args:
        name: name of the run; default: that of its configuration file.
        out: run folder; default: runs/NAME.
        overwrite: start over where the folder holds a run already.
        wandb: Weights & Biases.
    """

    name: str | None = None
    out: Path | None = None
    overwrite: bool = False
    wandb: WandbSettings = field(default_factory=WandbSettings)


@dataclass(frozen=True, kw_only=True)
class PaperRunSettings(RunSettings):
    """Settings of a run that may repeat one of a paper.

    Args:
        paper: reference whose setting this is.
    """

    paper: Paper | None = None


class Call:
    """One call of a command that writes a run folder, one of whose settings is a RunSettings.

    The run has the name that it was given, or that of its configuration file, or `name`. `config` is the YAML text of
    all settings, which repeats the run.

    Raises:
        LitReconError: a constructor refused its arguments, or W&B is to log online without an API key.
    """

    def __init__(self, parser: ArgumentParser, values: Namespace, name: str) -> None:
        complete, self.config = resolved(parser, values, name)
        self._built = instantiated(parser, complete)
        self._wandb: WandbSettings = self._built["wandb"]
        self._wandb.resolved_mode()
        self.name, self.folder = str(complete.name), RunFolder(Path(complete.out))

    @property
    def own(self) -> dict[str, Any]:
        """All settings as in the configuration file."""
        settings: dict[str, Any] = yaml.safe_load(self.config)
        return settings

    @property
    def identity(self) -> str:
        """A hash of the settings that make the run what it is, so that files of another one are noticed."""
        kept = sorted((key, value) for key, value in flatten(self.own).items() if not is_below(key, SAME_RUN))
        return hashlib.sha256(json.dumps(kept, default=str).encode()).hexdigest()[:16]

    def settings(self, schema: type[_Schema]) -> _Schema:
        """The settings of one dataclass, of those that the command reads."""
        return settings_of(schema, self._built)

    def loggers(self) -> list[Logger]:
        """Loggers of the run; the caller ends them by `finish`."""
        return build_loggers(self.folder.logs, self.name, self._wandb, self.own)


def check_range(
    values: Mapping[str, float | Sequence[float]], low: float, high: float = math.inf, strict: bool = False
) -> None:
    """Refuse numbers outside an interval by a ConfigError; `strict` excludes the interval's ends.

    >>> check_range({"steps": 0, "rates": [0.5, 2.0]}, 1)
    Traceback (most recent call last):
    lit_recon.errors.ConfigError: steps and rates must be at least 1; got 0 and 0.5, 2
    """
    several = {name: value if isinstance(value, Sequence) else [value] for name, value in values.items()}
    if all(low < x < high if strict else low <= x <= high for numbers in several.values() for x in numbers):
        return
    if math.isinf(high):
        expected = f"above {low:g} and finite" if strict else f"at least {low:g}"
    else:
        expected = f"{'strictly ' if strict else ''}between {low:g} and {high:g}"
    given = [", ".join(f"{x:g}" for x in numbers) for numbers in several.values()]
    raise ConfigError(f"{' and '.join(several)} must be {expected}; got {' and '.join(given)}")
