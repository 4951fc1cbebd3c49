"""Command lines reach their commands; whatever goes wrong becomes one line and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from jsonargparse import ArgumentParser

from lit_recon.cli import attack, console, train
from lit_recon.cli.entry import Command, main
from lit_recon.errors import ConfigError
from lit_recon.experiments.configuration import readable

UNION = """Parser key "clients_per_batch":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'int'>, typing.Literal['auto']]
  Errors:
    - Expected a <class 'int'>
    - Expected a typing.Literal['auto']
  Given value type: <class 'str'>
  Given value: x"""


def command(monkeypatch: pytest.MonkeyPatch, work: Callable[[int], None]) -> list[Command]:
    """A command `work` with one option, `--n`."""
    module = ModuleType("work_for_a_test")

    def parser(program: str) -> ArgumentParser:
        arguments = ArgumentParser(prog=program, exit_on_error=False)
        arguments.add_argument("--n", type=int, default=1)
        return arguments

    def execute(arguments: ArgumentParser, values: SimpleNamespace) -> None:
        work(values.n)

    vars(module).update(parser=parser, execute=execute)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return [Command("work", "works", module.__name__)]


def test_a_command_gets_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[int] = []
    assert main("python x.py", command(monkeypatch, got.append), ["work", "--n", "3"]) == 0
    assert got == [3]


def test_an_error_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(n: int) -> None:
        raise ConfigError(f"n must be\n  2; got {n}")

    assert main("python x.py", command(monkeypatch, fail), ["work"]) == 2
    assert capsys.readouterr() == ("", "error: n must be 2; got 1\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "runs/a/victims.csv"), "cannot use runs/a/victims.csv (No space left"),
        (OSError(30, "Read-only file system"), "cannot use a file of the run (Read-only file system): free space"),
        (MemoryError(), "not enough memory (MemoryError): free some"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate 2 GiB."),
            "not enough memory (CUDA out of memory)",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "not enough memory ([enf",
        ),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(n: int) -> None:
        raise error

    assert main("python x.py", command(monkeypatch, fail), ["work"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"error: {words}")
    assert err.endswith("then repeat the command, which goes on where it stopped\n")


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "x"), RuntimeError("shapes differ")])
def test_a_fault_of_the_program_is_not_taken_for_one_of_the_machine(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(n: int) -> None:
        raise error

    with pytest.raises(type(error)):
        main("python x.py", command(monkeypatch, fail), ["work"])


def test_an_error_of_nobodys_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(n: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main("python x.py", command(monkeypatch, fail), ["work"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_how_to_go_on(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    commands = command(monkeypatch, lambda n: signal.raise_signal(number))
    assert main("python x.py", commands, ["work", "--n", "3"]) == 128 + number
    assert capsys.readouterr().err == "interrupted; resume with: python x.py work --n 3\n"
    assert signal.getsignal(number) is before


def test_an_unknown_option_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("python x.py", command(monkeypatch, print), ["work", "--m", "3"]) == 2
    assert capsys.readouterr() == ("", "error: unrecognized arguments: --m 3 (see `python x.py work --help`)\n")


@pytest.mark.parametrize(
    ("script", "names"),
    [(attack, ("run", "evaluate", "audit", "bounds", "trainset", "report")), (train, ("backbone",))],
)
def test_help_names_the_commands(
    script: Callable[[list[str]], int], names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert script(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in names)
    assert script([]) == 2
    assert script(["fly"]) == 2
    assert "expected one of: " + ", ".join(names) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Parser key \"seed\":\n  Expected a <class 'int'>. Got value: x", "seed: expected int; got x"),
        (
            (
                "Parser key \"data\":\n  Problem with given class_path 'lit_recon.data.sources.Npz':\n"
                "    Option 'x' is not accepted"
            ),
            "data: Npz: unknown option 'x'",
        ),
        (UNION, "clients_per_batch: expected int or 'auto'; got x"),
        ("Subcommand 'run' does not accept option 'foo'", "unknown option 'foo'"),
        (
            "Parser key \"settings\":\n  Expected a <class 'dict'>. Got value: Namespace(trainer='5')",
            """settings: expected one mapping, such as '{"key": 1}', not options for its parts""",
        ),
        ("File does not exist: '/x'", "File does not exist: '/x'"),
        (
            "reconstructor: Expected a dot import path string: NeuralReconstructor",
            (
                "reconstructor: there is no class NeuralReconstructor; give its path, "
                "lit_recon.attacks.released.networks.NeuralReconstructor"
            ),
        ),
    ],
)
def test_messages_of_the_parser_are_made_readable(message: str, expected: str) -> None:
    assert readable(message) == expected


def test_the_console_command_names_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert console(["attack", "fly"]) == 2
    assert capsys.readouterr().err.endswith("(see `lit-recon attack --help`)\n")
    assert console(["attack", "run", "--foo", "1"]) == 2
    assert capsys.readouterr().err.endswith("(see `lit-recon attack run --help`)\n")
    assert console(["fly"]) == 2
    assert "expected one of: attack, train, reconn (see `lit-recon --help`)" in capsys.readouterr().err
    assert console(["--help"]) == 0
    assert "  attack      run, evaluate" in capsys.readouterr().out


def test_messages_name_other_scripts_as_they_were_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(n: int) -> None:
        raise ConfigError("train one with `python train.py backbone`; train.py shadows")

    commands = command(monkeypatch, fail)
    main("python attack.py", commands, ["work"])
    assert capsys.readouterr().err == "error: train one with `python train.py backbone`; train.py shadows\n"
    main("lit-recon attack", commands, ["work"])
    assert capsys.readouterr().err == "error: train one with `lit-recon train backbone`; lit-recon train shadows\n"


def test_a_console_command_resumes_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = command(monkeypatch, lambda n: signal.raise_signal(signal.SIGINT))
    assert main("lit-recon attack", commands, ["work", "--n", "3"]) == 130
    assert capsys.readouterr().err == "interrupted; resume with: lit-recon attack work --n 3\n"
