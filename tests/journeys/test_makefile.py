"""What `make demo` would run is there to be run."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from lit_recon.experiments.configuration import resolved
from lit_recon.experiments.released_attack import run as reconn_run
from lit_recon.experiments.update_attack import run

ROOT = Path(__file__).parents[2]


def test_the_demonstration_compares_the_runs_of_its_configurations() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "demo"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    python = [shlex.split(line)[1:] for line in lines if "/python " in line and ".py " in line]
    *runs, (report, *compared) = python[-4:]
    assert report == "attack.py"
    assert [script for script, *_ in runs] == ["attack.py", "attack.py", "reconn.py"]
    folders, updates = [], []
    for script, name, *arguments in runs:
        assert name == "run"
        module = run if script == "attack.py" else reconn_run
        at = arguments.index("--config") + 1
        arguments[at] = str(ROOT / arguments[at])
        parser = module.parser("program")
        settings, _ = resolved(parser, parser.parse_args(arguments), "")
        folders.append(str(settings.out))
        if script == "attack.py":
            updates.append(settings)
    exact, matching = updates
    for name in ("data", "backbone", "client", "knowledge", "victims", "seed", "trainer"):
        assert getattr(exact, name) == getattr(matching, name), name
    assert compared == ["report", *folders, "--out", "runs/demo.html"]
    assert "runs/demo.html" in lines[-1]


def test_the_fast_checks_leave_out_what_is_slow() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "check"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tools = [shlex.split(line) for line in lines if line.startswith(".venv/bin/") and "pip" not in line]
    assert [Path(name).name for name, *_ in tools] == ["ruff", "ruff", "mypy", "lint-imports", "pytest"]
    arguments = tools[-1]
    assert arguments[arguments.index("-m") + 1] == "not slow and not processes"
    folders = [ROOT / given for given in arguments if given.startswith("tests/")]
    assert len(folders) > 10
    assert all(path.exists() for path in folders)
