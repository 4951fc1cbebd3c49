"""Reading and writing of a command's settings."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from jsonargparse.typing import register_type

from lit_recon.errors import ConfigError, LitReconError, MissingDataError
from lit_recon.reporting.run_folder import IGNORED_SETTINGS, marked

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Schema = TypeVar("_Schema", bound="DataclassInstance")

# jsonargparse makes objects of the values of a `dict[str, Any]` that name a class which can be imported, with all its
# arguments; those of a `dict` stay as they are in the file.
if TYPE_CHECKING:
    #: Settings of another command, as they are.
    PlainSettings = dict[str, Any]
else:
    PlainSettings = dict

#: Settings in which an interrupted run and the one that goes on may differ: they change how it runs or is scored.
SAME_RUN = (
    *IGNORED_SETTINGS,
    "name",
    "trainer",
    "save_every_seconds",
    "metrics",
    "lpips",
    "wandb",
    "paper",
    "backbone.cache",
)


#: Wordings of the parser and what to say instead, applied in this order.
_PHRASES = [
    (r'Parser key "([\w.+]+)":', r"\1:"),
    (r"Problem with given class_path '[\w.]*?(\w+)':", r"\1:"),
    (r"Does not validate against any of the Union subtypes Subtypes: .*? Errors: - ", ""),
    (r"Type \S*Callable.*? expects a function or a callable class: ", ""),
    (r"(?: - )?Expected a <class 'NoneType'>", ""),
    (r"Expected a dot import path string: ([\w.]+)", r"there is no class \1"),
    (r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[([^\]]*)\])", r"expected \1\2"),
    (
        r"(?:(?:Subcommand|Group) '[\w.]+' does not accept option|Option) '(\S+)'(?: is not accepted)?",
        r"unknown option '\1'",
    ),
    (r" Given value type: .*? Given value:|\.? Got value:", "; got"),
    (r"expected dict; got Namespace\(.*", r"""expected one mapping, such as '{"key": 1}', not options for its parts"""),
    (r"; got (?:Namespace|NestedArg)\(.*", ""),
    (r" - expected", " or"),
]


#: Classes that the parser finds by path only: their modules import Lightning, for which no other command waits.
_BY_PATH = dict.fromkeys(
    ("ComponentsReconstructor", "ConvolutionalReconstructor", "NeuralReconstructor"),
    "lit_recon.attacks.released.networks",
)

# A mapping that the schema leaves open, such as the settings of a grid's cells, stays one: only the places that name a
# class may build one.
set_parsing_settings(instantiate_subclass_spec_in_any=False)


def _path(given: Path | str) -> Path:
    """A path of the settings; shells expand `~` neither in `--out=~/x` nor in a file."""
    return Path(os.path.expanduser(given))


register_type(Path, str, _path, type_check=isinstance)


#: Shipped configurations, below folders named after commands; in the repository a link to its folder `configs`.
_SHIPPED = Path(__file__).parents[1] / "configs"


def find_configuration(given: Path | str, folder: str = "") -> Path:
    """The file of a configuration: a path, or else the name of a shipped one.

    Such a name is `geiping2020`, `attack/geiping2020` or `configs/attack/geiping2020.yaml`; the folder, such as
    `attack`, decides between two of the same name.

    Raises:
        MissingDataError: there is neither such a file nor such a configuration.
        ConfigError: the name is ambiguous.

    >>> find_configuration("geiping2020").name
    'geiping2020.yaml'
    """
    path = _path(given)
    if path.is_file():
        return path
    shipped = {file.relative_to(_SHIPPED).with_suffix("").as_posix(): file for file in _SHIPPED.glob("*/*.yaml")}
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    found = {full for full in shipped if name in (full, full.partition("/")[2])}
    found = found & {f"{folder}/{name}"} or found
    if len(found) == 1:
        return shipped[found.pop()]
    if found:
        raise ConfigError(f"{name} is the name of several configurations: give one of {', '.join(sorted(found))}")
    names = {key: full for full in sorted(shipped) for key in (full.partition("/")[2], full)}
    near = dict.fromkeys(names[close] for close in difflib.get_close_matches(name, names))
    raise MissingDataError(
        f"there is no configuration {given}: expected a file, seen from {Path.cwd()}, or the name of a shipped "
        f"configuration, such as {', '.join(near or sorted(shipped))}"
    )


def settings_parser(program: str, description: str, *schemas: type[DataclassInstance]) -> ArgumentParser:
    """A parser of the settings of dataclasses and of `--config FILE`, which reports errors as exceptions."""
    parser = ArgumentParser(prog=program, description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file of settings; options after it override it")
    for schema in schemas:
        parser.add_class_arguments(schema, as_group=False)
    return parser


def allow_class_path(parser: ArgumentParser, option: str) -> None:
    """Let a group of settings have a `class_path` of its own; the parser would look for a subclass of the group."""
    action: Any = parser._option_string_actions[option]
    action.basetype = None


def resolved(parser: ArgumentParser, values: Namespace, name: str) -> tuple[Namespace, str]:
    """All settings of a run, and the YAML text that repeats it; `name` is for a run without a configuration file."""
    complete = values.clone()
    files = complete.pop("config", None) or []
    if complete.name is None:
        complete.name = Path(str(files[-1])).stem if files else name
    if complete.out is None:
        complete.out = Path("runs") / complete.name
    recorded = complete.clone()
    recorded.overwrite = False  # repeating a run from its own configuration must not destroy it
    return complete, marked(parser.dump(recorded, skip_unset=False), parser.prog)


def settings_of(schema: type[_Schema], built: Mapping[str, Any]) -> _Schema:
    """The dataclass `schema` from the settings that are its own, of a command that reads several dataclasses."""
    own = {field.name for field in dataclasses.fields(schema)}
    return schema(**{name: value for name, value in built.items() if name in own})


def instantiated(parser: ArgumentParser, values: Namespace) -> dict[str, Any]:
    """The objects that the values describe; a LitReconError for null, or where a constructor refuses its arguments."""
    _refuse_null(parser, values)
    try:
        return dict(vars(parser.instantiate(values)))
    except ValueError as error:  # the parser wraps what the constructors of nested classes raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, LitReconError):
            cause = cause.__cause__
        raise cause or ConfigError(" ".join(str(error).split())) from error
    except TypeError as error:  # of the parser, which lets a number stand for a section
        raise ConfigError(
            f"the settings cannot be built ({error}): give every section, such as trainer, as settings by name"
        ) from error


def _refuse_null(parser: ArgumentParser, values: Namespace) -> None:
    """Raise a ConfigError for a setting that must have a value, and has null, which the parser lets through."""
    for action in parser._actions:
        kind, default = getattr(action, "_typehint", None), action.default
        if kind in (None, Any) or default is None or type(None) in get_args(kind):
            continue
        if action.dest in values and values[action.dest] is None:
            raise ConfigError(f"{action.dest} must not be null: leave it out for its default, {default}")


def readable(message: str) -> str:
    r"""A parser's message as one plain line, with the path of a class that is found by its path only.

    >>> readable("Parser key \"seed\":\n  Expected a <class 'int'>. Got value: x")
    'seed: expected int; got x'
    """
    line = " ".join(message.split())
    for pattern, words in _PHRASES:
        line = re.sub(pattern, words, line)
    name = next((name for name in re.findall(r"(?:no class|; got) (\w+)", line) if name in _BY_PATH), "")
    return line.strip() + (f"; give its path, {_BY_PATH[name]}.{name}" if name else "")
