"""House rules that a glance at the sources can check: size, names, docstrings, no path of one machine."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

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


def test_a_module_says_its_purpose() -> None:
    purposes = {path: ast.get_docstring(ast.parse(path.read_text())) for path in MODULES}
    assert [name(path) for path, purpose in purposes.items() if not purpose] == []
    vague = {name(path) for path, purpose in purposes.items() if purpose and purpose.startswith("What")}
    assert vague == set(), "begin with the noun that the module is about"


@pytest.mark.parametrize("folder", ["lit_recon", "tests", "benchmarks"])
def test_a_module_stays_short(folder: str) -> None:
    assert {name(path): n for path in (ROOT / folder).rglob("*.py") if (n := line_count(path)) > 400} == {}


def test_a_folder_can_be_taken_in() -> None:
    for folder in {path.parent for path in MODULES}:
        names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(names) < 20, folder
        prefixes = Counter(stem.partition("_")[0] for stem in names if not stem.startswith("_"))
        assert [prefix for prefix, n in prefixes.items() if n >= 3] == [], f"{name(folder)}: make them a package"


def test_no_public_class_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name(path))
    assert {title: found for title, found in places.items() if len(found) > 1} == {}


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
