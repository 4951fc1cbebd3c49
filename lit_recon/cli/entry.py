"""From a command line to a command, and from whatever goes wrong to one line and an exit code."""

from __future__ import annotations

import importlib
import shlex
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

#: Exit codes: bad input, as argparse has it; and 128 plus the signal's number, as shells have it.
BAD_INPUT, SIGNAL_BASE = 2, 128


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, purpose, and the module with its `parser()` and `execute(parser, values)`.

    The module is imported only when the command is used: a report needs no PyTorch.
    """

    name: str
    purpose: str
    module: str


def main(program: str, commands: Sequence[Command], arguments: Sequence[str] | None = None) -> int:
    """Run one of `commands`.

    Args:
        program: the script's name.
        commands: what it can do.
        arguments: of the command line; default: those of this process.

    Returns:
        The exit code: 0, 2 after one line about bad input, or 128 plus the number of the signal that stopped it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_usage(program, commands))
        return 0 if given else BAD_INPUT
    command = next((command for command in commands if command.name == given[0]), None)
    if command is None:
        names = ", ".join(command.name for command in commands)
        return _refuse(f"{program} has no command {given[0]!r}; expected one of: {names}", f"python {program} --help")
    from lit_recon.errors import LitReconError
    from lit_recon.experiments.configuration import readable
    from lit_recon.training.progress import Interrupted, interruptible

    try:
        with interruptible():
            module = importlib.import_module(command.module)
            parser = module.parser(f"{program} {command.name}")
            module.execute(parser, parser.parse_args(given[1:]))
    except ArgumentError as error:
        return _refuse(readable(str(error)), f"python {program} {command.name} --help")
    except LitReconError as error:
        return _refuse(str(error))
    except Interrupted as stop:
        again = shlex.join(["python", program, *_without_overwrite(given)])
        print(f"stopped; this goes on where it stopped: {again}", file=sys.stderr)
        return SIGNAL_BASE + stop.number
    return 0


def _refuse(message: str, help_command: str = "") -> int:
    line = " ".join(message.split())
    print(f"error: {line}" + (f" (see `{help_command}`)" if help_command else ""), file=sys.stderr)
    return BAD_INPUT


def _without_overwrite(arguments: Sequence[str]) -> list[str]:
    """The arguments that resume what these began: `--overwrite true` would begin anew."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith("--overwrite"):
            kept.append(argument)
        skip = argument == "--overwrite"
    return kept


def _usage(program: str, commands: Sequence[Command]) -> str:
    lines = [f"usage: python {program} COMMAND [--help] [--config FILE] [--KEY VALUE ...]", "", "commands:"]
    return "\n".join(lines + [f"  {command.name:<10}{command.purpose}" for command in commands])


def named_by_content(arguments: Sequence[str]) -> list[str]:
    """A command line with `factors` in the place of `run`, where a configuration that it names has `factors`.

    Args:
        arguments: of `reconn.py`.

    >>> named_by_content(["run", "--seed", "1"])
    ['run', '--seed', '1']
    """
    given = list(arguments)
    if given[:1] == ["run"] and any(map(_has_factors, _configurations(given))):
        given[0] = "factors"
    return given


def _configurations(arguments: Sequence[str]) -> list[Path]:
    following = dict(zip(range(len(arguments)), arguments[1:], strict=False))
    named = [following.get(index, "") for index, argument in enumerate(arguments) if argument == "--config"]
    joined = [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]
    return [Path(name) for name in (*named, *joined) if name]


def _has_factors(path: Path) -> bool:
    """Whether a file is YAML with `factors`; whatever is wrong with it is for the command to say."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and "factors" in content
