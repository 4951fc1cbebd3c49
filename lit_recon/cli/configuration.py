"""How a command reads its settings, and how it writes them down again."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace


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
