"""Command dispatch; errors become one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import re
import shlex
import sys
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Exit codes: bad input, as argparse has it; and 128 plus the signal's number, as shells have it.
BAD_INPUT, SIGNAL_BASE = 2, 128
#: The console command that a wheel installs, in front of `attack`, `train` or `reconn`.
CONSOLE = "lit-recon"
#: Errors of a disk or of its rights, which the user can mend.
_OF_STORAGE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE),
}
#: Parts of the RuntimeErrors by which gloo and NCCL report that another process of the group has ended.
_OF_PROCESSES = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
_GOES_ON = "then repeat the command, which goes on where it stopped"


@dataclass(frozen=True)
class Command:
    """A subcommand, with the folder of its shipped configurations.

    Its module, with `parser(program)` and `execute(parser, values)`, is imported only when it is used: a report needs
    no PyTorch.
    """

    name: str
    purpose: str
    module: str
    folder: str = ""


def main(program: str, commands: Sequence[Command], arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands of a program, `python attack.py` or `lit-recon attack`; default: this process' arguments.

    Returns the exit code: 0, 2 after one line about bad input or about a disk or a memory that is full, or 128 plus the
    number of the signal that stopped it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage(f"{program} COMMAND [--help] [--config FILE] [--KEY VALUE ...]", commands))
        return 0 if given else BAD_INPUT
    command = next((command for command in commands if command.name == given[0]), None)
    if command is None:
        return refuse(program, unknown(program, given[0], [command.name for command in commands]), f"{program} --help")
    from lit_recon.errors import LitReconError
    from lit_recon.experiments.configuration import find_configuration, readable
    from lit_recon.io.files import holding
    from lit_recon.reporting.provenance import check_numbers, without_overwrite
    from lit_recon.training.progress import Interrupted, interruptible

    try:
        with interruptible(), holding():
            module = importlib.import_module(command.module)
            for option, value in _options(given[1:]):
                check_numbers(option, value)
            parser = module.parser(f"{program} {command.name}")
            files = configurations(given[1:], lambda name: _readable(find_configuration(name, command.folder)))
            module.execute(parser, parser.parse_args(files))
    except ArgumentError as error:
        return refuse(program, readable(str(error)), f"{program} {command.name} --help")
    except LitReconError as error:
        return refuse(program, str(error))
    except Interrupted as stop:
        again = shlex.join([*program.split(), *without_overwrite(given)])
        print(f"interrupted; resume with: {again}", file=sys.stderr)
        return SIGNAL_BASE + stop.number
    except (OSError, MemoryError, RuntimeError) as error:
        if not (reason := _of_the_machine(error)):
            raise
        return refuse(program, reason)
    return 0


def _of_the_machine(error: Exception) -> str:
    """What to say about an error that the machine made, such as a full disk; empty for an error of the program.

    >>> _of_the_machine(OSError(errno.ENOSPC, "No space left on device", "runs/a/victims.csv"))[:58]
    'cannot use runs/a/victims.csv (No space left on device): f'
    """
    from lit_recon.errors import lack_of_memory

    if isinstance(error, OSError):
        if error.errno not in _OF_STORAGE:
            return ""
        where = error.filename or "a file of the run"
        return f"cannot use {where} ({error.strerror}): free space, or mend its rights or its disk, {_GOES_ON}"
    said = " ".join(str(error).split())
    if any(part in said for part in _OF_PROCESSES):
        return "another process of this group has ended: see why, and start all again; they go on where they stopped"
    if short := lack_of_memory(error):
        return (
            f"not enough memory ({short}): free some, or compute less at a time by smaller settings, such as "
            f"batch_size, clients_per_batch or shard_size, {_GOES_ON}"
        )
    return ""


def _readable(path: Path) -> str:
    """The path of a configuration that is sound YAML; what its settings are is the parser's business."""
    from lit_recon.reporting.provenance import read_settings

    read_settings(path)
    return str(path)


def unknown(program: str, name: str, names: Sequence[str]) -> str:
    """The message about a command that does not exist."""
    return f"{program} has no command {name!r}; expected one of: {', '.join(names)}"


def refuse(program: str, message: str, help_command: str = "") -> int:
    """Print one line about bad input, which names other scripts as the user calls them; give the exit code."""
    line = " ".join(message.split()) + (f" (see `{help_command}`)" if help_command else "")
    if program.startswith(CONSOLE):
        line = re.sub(r"\b(?:python )?(attack|train|reconn)\.py\b", rf"{CONSOLE} \1", line)
    print(f"error: {line}", file=sys.stderr)
    return BAD_INPUT


def usage(synopsis: str, commands: Sequence[Command]) -> str:
    """The list of commands."""
    listed = (f"  {command.name:<12}{command.purpose}" for command in commands)
    return "\n".join([f"usage: {synopsis}", "", "commands:", *listed])


def configurations(arguments: Sequence[str], replace: Callable[[str], str]) -> list[str]:
    """A command line with every value of `--config` replaced.

    >>> configurations(["--config", "a", "--config=b", "--seed", "1"], str.upper)
    ['--config', 'A', '--config=B', '--seed', '1']
    """
    result = list(arguments)
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            result[index] = f"--config={replace(argument.removeprefix('--config='))}"
        elif index and arguments[index - 1] == "--config":
            result[index] = replace(argument)
    return result


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every argument as a value, with the option that it is for.

    >>> list(_options(["--seed", "1", "--name=a"]))
    [('', '--seed'), ('--seed', '1'), ('--name', 'a')]
    """
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, _, value = argument.partition("=")
        yield (name, value) if value and name.startswith("--") else (before, argument)


def named_by_content(arguments: Sequence[str]) -> list[str]:
    """The arguments of `reconn.py`, with `factors` in the place of `run` where a configuration has `factors`.

    >>> named_by_content(["run", "--seed", "1"])
    ['run', '--seed', '1']
    """
    from lit_recon.errors import LitReconError
    from lit_recon.experiments.configuration import find_configuration
    from lit_recon.reporting.provenance import read_settings

    given = list(arguments)

    def look_into(name: str) -> str:
        with contextlib.suppress(LitReconError):  # the command will report it
            if "factors" in read_settings(find_configuration(name, "reconn")):
                given[0] = "factors"
        return name

    if given[:1] == ["run"]:
        configurations(given, look_into)
    return given
