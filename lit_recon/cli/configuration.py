"""How a command reads its settings, and how it writes them down again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from lit_recon.errors import ConfigError, LitReconError
from lit_recon.reporting import IGNORED_SETTINGS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Schema = TypeVar("_Schema", bound="DataclassInstance")

#: Settings in which an interrupted run and the one that goes on may differ: they change how it runs or is scored.
SAME_RUN = (*IGNORED_SETTINGS, "name", "trainer", "save_every_seconds", "lpips", "wandb", "paper", "backbone.cache")

# A mapping that the schema leaves open, such as the settings of a grid's cells, stays one: only the places that name a
# class may build one.
set_parsing_settings(instantiate_subclass_spec_in_any=False)


def settings_parser(program: str, description: str) -> ArgumentParser:
    """A parser that reads `--config FILE`, any number of times, and reports errors as exceptions."""
    parser = ArgumentParser(prog=program, description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file of settings; options after it override it")
    return parser


def resolved(parser: ArgumentParser, values: Namespace, name: str) -> tuple[Namespace, str]:
    """Values with name and folder filled in, and the YAML text that gives these values again.

    Args:
        parser: of the command.
        values: that it read; they must have `name`, `out` and `overwrite`.
        name: of a run without a configuration file.
    """
    complete = values.clone()
    files = complete.pop("config", None) or []
    if complete.name is None:
        complete.name = Path(str(files[-1])).stem if files else name
    if complete.out is None:
        complete.out = Path("runs") / complete.name
    recorded = complete.clone()
    recorded.overwrite = False  # repeating a run from its own configuration must not destroy it
    return complete, parser.dump(recorded, skip_unset=False)


def settings_of(schema: type[_Schema], built: Mapping[str, Any]) -> _Schema:
    """The dataclass `schema` from the settings that are its own, of a command that reads several dataclasses."""
    own = {field.name for field in dataclasses.fields(schema)}
    return schema(**{name: value for name, value in built.items() if name in own})


def instantiated(parser: ArgumentParser, values: Namespace) -> dict[str, Any]:
    """The objects that the values describe.

    Raises:
        LitReconError: a constructor refused its arguments.
    """
    try:
        return dict(vars(parser.instantiate(values)))
    except ValueError as error:  # the parser wraps what the constructors of nested classes raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, LitReconError):
            cause = cause.__cause__
        raise cause or ConfigError(" ".join(str(error).split())) from error
