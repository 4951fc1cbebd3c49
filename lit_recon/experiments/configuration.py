"""How a command reads its settings, and how it writes them down again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from lit_recon.errors import ConfigError, LitReconError
from lit_recon.reporting.run_folder import IGNORED_SETTINGS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Schema = TypeVar("_Schema", bound="DataclassInstance")

#: Settings in which an interrupted run and the one that goes on may differ: they change how it runs or is scored.
SAME_RUN = (*IGNORED_SETTINGS, "name", "trainer", "save_every_seconds", "lpips", "wandb", "paper", "backbone.cache")

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
    (r"; got (?:Namespace|NestedArg)\(.*", ""),
    (r" - expected", " or"),
]


#: Names of settings, of values and of classes that had another name before version 0.2.
_RENAMED = {
    "InTurn": "FirstApplicable",
    "budgets": "max_accuracy_drops",
    "figure": "metric",
    "figures": "values",
    "hand": "batched_mlp",
    "together": "clients_per_batch",
    "view": "access",
}
#: Settings that were removed in version 0.2, and what says the same now.
_REMOVED = {"modified_model": "leave it out: the setting `server` says how a malicious server modifies the model"}
#: Modules that classes were in before version 0.2, and where those classes are now.
_MOVED = {
    "lit_recon.inversion": "lit_recon.attacks.updates",
    "lit_recon.informed": "lit_recon.attacks.released",
    "lit_recon.observation": "lit_recon.clients",
    "lit_recon.modules.reconstructor": "lit_recon.attacks.released.networks.perceptron",
    "lit_recon.modules.reconstructor_adversarial": "lit_recon.attacks.released.networks.convolutional",
    "lit_recon.modules.reconstructor_components": "lit_recon.attacks.released.networks.components",
}

# A mapping that the schema leaves open, such as the settings of a grid's cells, stays one: only the places that name a
# class may build one.
set_parsing_settings(instantiate_subclass_spec_in_any=False)


def settings_parser(program: str, description: str) -> ArgumentParser:
    """A parser that reads `--config FILE`, any number of times, and reports errors as exceptions."""
    parser = ArgumentParser(prog=program, description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file of settings; options after it override it")
    return parser


def allow_class_path(parser: ArgumentParser, option: str) -> None:
    """Let a group of settings have a `class_path` of its own; the parser would look for a subclass of the group."""
    action: Any = parser._option_string_actions[option]
    action.basetype = None


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


def readable(message: str) -> str:
    r"""A parser's message as one line in plain words; for a name of an earlier version, with the one that it has now.

    >>> readable("Parser key \"seed\":\n  Expected a <class 'int'>. Got value: x")
    'seed: expected int; got x'
    >>> readable("unrecognized arguments: --together 3")
    'unrecognized arguments: --together 3; it is called clients_per_batch now'
    """
    line = " ".join(message.split())
    for pattern, words in _PHRASES:
        line = re.sub(pattern, words, line)
    return line.strip() + _renamed(line)


def _renamed(line: str) -> str:
    """What to add to a message about a name of an earlier version."""
    missing = re.search(r"No module named '([\w.]+)'", line)
    absent = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", line)
    module = missing[1] if missing else f"{absent[1]}.{absent[2]}" if absent else ""
    if module in _MOVED:
        return f"; it is in {_MOVED[module]} now"
    name = re.search(
        r"unknown option '(?:[\w.]*\.)?(\w+)'|arguments: --(?:[\w.]*\.)?(\w+)|no class (\w+)|; got (\w+)$", line
    )
    found = next(filter(None, name.groups()), "") if name else ""
    if found in _REMOVED:
        return f"; {_REMOVED[found]}"
    return f"; it is called {_RENAMED[found]} now" if found in _RENAMED else ""
