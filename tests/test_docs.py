"""The README and the documentation: Python is executed, command lines are read by their commands, numbers by records.

Commands are not run: some take hours. Reading one refuses unknown options, values out of range, and files that are
not there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.docs import PAGES, examine_pages
from benchmarks.docs.figures import Figures
from lit_recon import cli
from lit_recon.cli.entry import Command
from lit_recon.errors import MissingDataError
from lit_recon.experiments.configuration import instantiated, resolved

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: Stand in for the reader's own folder and files.
PLACEHOLDERS = {"DIR": "data", "FILE": "file.safetensors"}


def blocks(language: str) -> list[tuple[str, str]]:
    """Name of the page and text of every block in a language."""
    return [(path.name, text) for path in PAGES for kind, text in BLOCK.findall(path.read_text()) if kind == language]


def command_lines() -> list[tuple[str, str]]:
    """Every command of the console blocks, continued lines joined, comments removed."""
    return [
        (page, line[2:].partition(" #")[0].strip())
        for page, text in blocks("console")
        for line in text.replace("\\\n", " ").splitlines()
        if line.startswith("$ ")
    ]


def commands_of(script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Command]:
    """The commands behind a script, by name."""
    found: dict[str, Command] = {}

    def remember(program: str, commands: list[Command], arguments: list[str]) -> int:
        found.update({command.name: command for command in commands})
        return 0

    monkeypatch.setattr(cli, "main", remember)
    getattr(cli, script)([])
    return found


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_every_command_line_is_read(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None
    else:
        script = Path(words[words.index("python") + 1] if "python" in words else words[0]).stem
        start = next(i for i, word in enumerate(words) if word.endswith(".py")) + 1
        arguments = words[start:]
        if script == "reconn":
            arguments = cli.named_by_content(arguments)
        module = importlib.import_module(commands_of(script, monkeypatch)[arguments[0]].module)
        parser = module.parser(f"{script}.py {arguments[0]}")
        values = parser.parse_args(arguments[1:])
        if arguments[0] != "report":
            with contextlib.suppress(MissingDataError):  # what an earlier command would have left behind
                instantiated(parser, resolved(parser, values, "nameless")[0] if "name" in values else values)


@pytest.mark.parametrize("page", sorted({page for page, _ in blocks("python")}))
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for name, text in blocks("python"):  # a block goes on where the one before it ended
        if name == page:
            exec(compile(text, page, "exec"), names)


def test_measured_numbers_are_those_of_the_records() -> None:
    """`python -m benchmarks.docs --write` replaces numbers; a number without a record needs a mark, or goes."""
    wrong = [f"{page.path.name}:{line}: {text}" for page in examine_pages(Figures()) for line, text in page.problems]
    assert wrong == []
