"""The README and the documentation: Python is executed, command lines are read by their commands, numbers by records.

Commands are not run: some take hours. Reading one refuses unknown options, values out of range, and files that are
not there. Code cells of notebooks (`{code-cell}`) are executed by `make docs`, not here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks.docs import PAGES, examine_pages
from benchmarks.docs.figures import Figures
from lit_recon import cli
from lit_recon.attacks.base import Attack
from lit_recon.attacks.released import Reconstructor
from lit_recon.attacks.trainset import TrainsetAttack
from lit_recon.attacks.updates import FeatureRecovery
from lit_recon.cli.entry import Command
from lit_recon.defenses import Defense
from lit_recon.errors import MissingDataError
from lit_recon.experiments.configuration import instantiated, resolved

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: Stand in for the reader's own folder and files.
PLACEHOLDERS = {"DIR": "data", "FILE": "file.safetensors"}


def blocks(language: str) -> list[tuple[str, str]]:
    """Path of the page and text of every block in a language."""
    return [
        (str(path.relative_to(ROOT)), text)
        for path in PAGES
        for kind, text in BLOCK.findall(path.read_text())
        if kind == language
    ]


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, _ in blocks("python")}))
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for name, text in blocks("python"):  # a block goes on where the one before it ended
        if name == page:
            exec(compile(text, page, "exec"), names)


@pytest.mark.slow
def test_measured_numbers_are_those_of_the_records() -> None:
    """`python -m benchmarks.docs --write` replaces numbers; a number without a record needs a mark, or goes."""
    wrong = [f"{page.path.name}:{line}: {text}" for page in examine_pages(Figures()) for line, text in page.problems]
    assert wrong == []


CODE = re.compile(r"^(`{3,}).*?^\1`*\s*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Names of a page's headings in links, as GitHub and Sphinx make them; repeated headings have none of their own."""
    headings = HEADING.findall(CODE.sub(lambda code: "" if "\n" in code[0] else code[0], page.read_text()))
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", text).lower()).replace(" ", "-") for text in headings}


def links(page: Path) -> Iterator[str]:
    """Targets of a page's links and pictures within the repository."""
    for found in LINK.finditer(CODE.sub("", page.read_text())):
        if not re.match(r"https?:|mailto:", found["target"]):
            yield found["target"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / unquote(name)).resolve() if name else page
        assert path.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(path), f"{target}: {path.name} has no such heading"


def test_links_of_pages_stay_where_sphinx_finds_them() -> None:
    """Markdown above `docs/` is no page of the site; the changelog is shown from within `docs/`."""
    shown = [page for page in PAGES if page.parent != ROOT] + [ROOT / "CHANGELOG.md"]
    outside = [
        (page.name, target)
        for page in shown
        for target in links(page)
        if target.partition("#")[0].endswith(".md")
        and (page.parent == ROOT or (page.parent / target).resolve().parent == ROOT)
    ]
    assert outside == []


def test_every_page_is_in_a_table_of_contents() -> None:
    pages = {path.resolve() for path in PAGES if path.parent != ROOT}
    listed = [ROOT / "docs" / "index.md"]
    for page in listed:  # grows while it is read
        lines = "\n".join(TOCTREE.findall(page.read_text())).splitlines()
        entries = [line for line in lines if line and not line.startswith(":")]
        listed += [(page.parent / f"{entry}.md").resolve() for entry in entries]
    assert len(listed) == len(set(listed))
    assert pages == set(listed)


def exported(*rooms: str) -> dict[str, type]:
    """Public classes of modules, by documented name."""
    modules = [importlib.import_module(f"lit_recon.{room}") for room in rooms]
    found = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    return {name: value for name, value in found.items() if inspect.isclass(value)}


def test_the_gallery_has_every_attack_and_every_defense() -> None:
    rooms = "attacks.updates", "attacks.released", "attacks.released.networks", "attacks.glm", "attacks.trainset"
    kinds = Attack, FeatureRecovery, Reconstructor, TrainsetAttack, Defense
    # beside these: terms of gradient matching, what they recover, and linear models to be solved
    others = re.compile(r"\.(\w+Matching|\w+Recovery|NonNegativeInputs|ReleasedGLM|ReleasedWithoutIntercept)$")
    wanted = {
        name
        for name, value in exported(*rooms, "defenses").items()
        if (issubclass(value, kinds) or others.search(name)) and not inspect.isabstract(value) and value is not Defense
    }
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    assert len(wanted) > 40
    assert {name for name in wanted if f"{{class}}`~{name}`" not in gallery} == set()
