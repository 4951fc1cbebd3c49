"""What a wheel holds is enough: the console command finds the shipped configurations, far from a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TINY = (
    "--victims.n 1 --attack.steps 2 --attack.restarts 1 --backbone.epochs 0 --lpips.network none --wandb.mode disabled"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout; a copy is built, because setuptools writes beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, tracked)):
        if name.startswith(("lit_recon", "configs/", "pyproject", "README", "LICENSE")) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to((ROOT / name).readlink() if (ROOT / name).is_symlink() else ROOT / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(out), str(source)], check=True, timeout=120)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as an installer does."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_configurations_templates_and_types_are_inside(installed: Path) -> None:
    shipped = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert {path.relative_to(installed / "lit_recon" / "configs") for path in installed.rglob("*.yaml")} == shipped
    templates = {path.name for path in (ROOT / "lit_recon" / "reporting" / "templates").iterdir()}
    assert {path.name for path in (installed / "lit_recon" / "reporting" / "templates").iterdir()} == templates
    assert (installed / "lit_recon" / "py.typed").is_file()
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"lit_recon"}


def test_the_console_command_runs_far_from_a_checkout(installed: Path, tmp_path: Path) -> None:
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    name, _, target = points.read_text().splitlines()[1].partition(" = ")
    module, _, function = target.partition(":")
    script = tmp_path / name
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    command = [sys.executable, str(script), "attack", "run", "--config", "demo_digits", *TINY.split()]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    ended = subprocess.run(
        [*command, "--out", "here"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "here" / "report.html").is_file()
    assert '"command": "lit-recon attack run' in (tmp_path / "here" / "metrics.json").read_text()
