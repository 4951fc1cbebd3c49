"""The two archives of a release: what they hold, and that the wheel alone is enough for the commands.

Everything is built and installed without an index: build backend and dependencies are those of the environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from datetime import date
from email import message_from_bytes
from pathlib import Path, PurePosixPath

import pytest
import yaml

import lit_recon

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
TINY = (
    "--victims.n 1 --attack.steps 2 --attack.restarts 1 --backbone.epochs 0 --lpips.network none --wandb.mode disabled"
)
#: What a checkout that has been worked in holds besides its sources.
LITTER = (
    ".venv/bin/python",
    "runs/demo/report.html",
    "data/cifar10.npz",
    "docs/_build/index.html",
    "tests/__pycache__/conftest.cpython-311.pyc",
    "lit_recon/__pycache__/errors.cpython-311.pyc",
    "weights.safetensors",
)
#: Tracked files that a source archive may do without.
UNPACKED = {".gitignore"}
#: Bytes that a source archive may have, packed.
LARGEST = 5_000_000


@dataclass(frozen=True)
class Built:
    """The archives, and the files of the project that they were built from."""

    source: Path
    wheel: Path
    tracked: frozenset[str]


def project_files() -> list[str]:
    """Files of the project: those that git tracks, or in an unpacked source archive those that it lists."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
        return [name for name in map(os.fsdecode, filter(None, listed.split(b"\0"))) if os.path.lexists(ROOT / name)]
    [sources] = ROOT.glob("*.egg-info/SOURCES.txt")
    return [name for name in sources.read_text().splitlines() if ".egg-info/" not in name]


def run(*command: object, cwd: Path | None = None) -> str:
    """Standard output of a command that must end well, and that does not see this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = list(map(str, command))
    ended = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both archives, of a copy of this checkout with litter in it; the wheel is built from the source archive."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    names = project_files()
    for name in (*names, *LITTER):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if name in LITTER:
            (copy / name).write_text("litter")
        else:
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy, cwd=copy)
    [source], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(source, wheel, frozenset(names))


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel; dependencies are those of the environment of this test."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin" / "python"
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", built.wheel]
    run(sys.executable, "-m", "pip", "--python", interpreter, *install)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    around = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "surroundings.pth").write_text("\n".join(around) + "\n")
    return interpreter


def inside(archive: Path) -> set[str]:
    """Files of a wheel, or of a source archive without its first folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as packed:
            return set(packed.namelist())
    with tarfile.open(archive) as packed:
        members = [member for member in packed.getmembers() if member.isfile()]
    return {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])) for member in members}


def test_an_index_accepts_both(built: Built) -> None:
    """Metadata are complete, and the description can be rendered."""
    run(sys.executable, "-m", "twine", "check", "--strict", built.source, built.wheel)


def test_metadata(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(packed.read(name))
    assert metadata["Version"] == lit_recon.__version__
    assert metadata["Author"] == "The lit_recon developers"
    assert metadata["License-Expression"] == "Apache-2.0"
    description = str(metadata.get_payload())
    assert description.startswith("# lit_recon\n")
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == [], "no file is beside it"
    assert "docs/threat_models.md" in description or "docs/fidelity.md" in description
    assert "<!--" not in description


def test_changelog_and_citation_have_the_version_and_its_date() -> None:
    unreleased, newest, *_ = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert unreleased == "[Unreleased]"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lit_recon.__version__
    assert isinstance(citation["date-released"], date)
    assert newest == f"[{citation['version']}] - {citation['date-released']}"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "required by schema 1.2.0"
    assert citation["license"] == "Apache-2.0"


def test_the_wheel_holds_the_package_alone(built: Built) -> None:
    names = inside(built.wheel)
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    expected = {name for name in built.tracked if name.startswith("lit_recon/") and name != "lit_recon/configs"}
    shipped = {f"lit_recon/{name}" for name in built.tracked if name.startswith("configs/")}
    assert package == {name for name in expected | shipped if "lit_recon/configs/" not in name} | shipped
    assert "lit_recon/py.typed" in package
    assert any(name.endswith(".html.j2") for name in package)
    assert f"lit_recon-{lit_recon.__version__}.dist-info/licenses/LICENSE" in names


def test_the_source_archive_holds_the_project_and_nothing_beside_it(built: Built) -> None:
    names = {name for name in inside(built.source) if "lit_recon.egg-info/" not in name}
    made = {"PKG-INFO", "setup.cfg"}
    wanted = {name for name in built.tracked if name != "lit_recon/configs"} - UNPACKED
    copied = {f"lit_recon/{name}" for name in built.tracked if name.startswith("configs/")}
    assert wanted - names == set()
    assert names - wanted - made - copied == set()
    assert built.source.stat().st_size < LARGEST


def test_the_console_command_runs_far_from_a_checkout(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import lit_recon; print(lit_recon.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(python.parents[1])
    command = python.with_name("lit-recon")
    assert run(command, "--version", cwd=tmp_path) == f"lit-recon {lit_recon.__version__}\n"
    assert "usage: lit-recon SCRIPT COMMAND" in run(command, "--help", cwd=tmp_path)
    run(command, "attack", "run", "--config", "demo_digits", *TINY.split(), "--out", "here", cwd=tmp_path)
    assert (tmp_path / "here" / "report.html").is_file()
    assert '"command": "lit-recon attack run' in (tmp_path / "here" / "metrics.json").read_text()
