"""House rules that a glance at the sources can check: size, docstrings, abstract or final, no path of one machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "lit_recon").rglob("*.py"))
SCRIPTS = [ROOT / name for name in ("train.py", "attack.py", "reconn.py")]
FOLDERS = ("lit_recon", "tests", "configs", "benchmarks", "docs", ".ci")
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".j2", ".html", ".csv"}
#: An absolute path below a folder that means something on one machine only; part of a URL it may be.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|tmp|root|home|Users)/")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_says_its_purpose_and_stays_short(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "begin the module with a docstring that names its one idea"
    assert line_count(path) <= 400


def test_most_modules_are_read_at_a_glance() -> None:
    assert median(map(line_count, MODULES)) < 150


def test_scripts_only_parse_and_run() -> None:
    assert {name(path): line_count(path) for path in SCRIPTS if path.exists() and line_count(path) > 15} == {}


def test_no_path_of_one_machine() -> None:
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = [
        f"{name(path)}:{number}"
        for path in files
        if path.suffix in TEXT or path.name in ("Makefile", "run")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found
