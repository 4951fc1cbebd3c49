"""A place to run the commands in, and the demonstration cut down to seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lit_recon import cli
from tests.processes import Script

ROOT = Path(__file__).parents[2]
Running = Script | subprocess.Popen[str]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all journeys run in: a backbone that one has trained serves the others."""
    return tmp_path_factory.mktemp("workplace")


@pytest.fixture(scope="session")
def small() -> list[str]:
    """The demonstration with two victims and fewer iterations."""
    path = ROOT / "configs" / "attack" / "demo_digits.yaml"
    changes = ["--victims.n", "2", "--attack.steps", "150", "--attack.restarts", "1", "--clients_per_batch", "1"]
    return ["run", "--config", str(path), "--victims.pool", "all", *changes]


@pytest.fixture(scope="session")
def script(workplace: Path) -> Iterator[Callable[..., Running]]:
    """Starts `attack.py` or `train.py` in a process of its own: forked, or by a new interpreter and `launcher`."""

    started: list[Running] = []

    def start(
        name: str,
        *arguments: object,
        launcher: tuple[str, ...] | None = None,
        signalled: tuple[str, signal.Signals] | None = None,
    ) -> Running:
        if launcher is None:
            process: Running = Script(ROOT / name, *arguments, cwd=workplace, signalled=signalled)
        else:
            command = [sys.executable, *launcher, str(ROOT / name), *map(str, arguments)]
            process = subprocess.Popen(
                command, cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()  # of no effect on one that has ended
        process.communicate(timeout=60)


@pytest.fixture
def attack(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """`attack.py` in this process, without W&B."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("WANDB_MODE", "disabled")

    def run(*arguments: object) -> Ended:
        code = cli.attack(list(map(str, arguments)))
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def train(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`train.py` in this process, without W&B."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("WANDB_MODE", "disabled")

    def run(*arguments: object) -> Ended:
        code = cli.train(list(map(str, arguments)))
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def reconn(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`reconn.py` in this process, without W&B."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("WANDB_MODE", "disabled")

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.reconn(list(map(str, arguments)))
        return code, *capsys.readouterr()

    return run
