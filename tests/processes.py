"""Scripts in processes of their own, forked from one that has imported PyTorch, Lightning and the commands already.

An interpreter of its own spends ten seconds of a processor on imports, a fork none.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Imported once, before the first fork.
_PRELOADED = (
    "lit_recon.cli",
    "lit_recon.experiments.update_attack.run",
    "lit_recon.experiments.released_attack.run",
    "lit_recon.experiments.audit.run",
    "lit_recon.experiments.evaluate.run",
    "lit_recon.experiments.factors.run",
    "lit_recon.experiments.glm.run",
    "lit_recon.experiments.membership.run",
    "lit_recon.experiments.rero.run",
    "lit_recon.experiments.train.backbone",
    "lit_recon.experiments.train.generator",
    "lit_recon.experiments.train.zoo",
    "lit_recon.experiments.trainset.run",
    "lit_recon.experiments.two_layer.run",
    "matplotlib.figure",
    "opacus",
    "sklearn.datasets",
    "tests.processes",
    "wandb",
)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(_PRELOADED))


class Script:
    """A script that runs as `python SCRIPT ARGUMENTS` would; the part of `subprocess.Popen` that tests use.

    Args:
        path: of the script.
        arguments: of its command line.
        cwd: its working directory.
        environment: its variables; default: those of this process.
        signalled: a pattern of paths and the signal that the process gets right after it has first put a file in such
            a place: a file that is soon removed again may be gone before another process sees it.
    """

    def __init__(
        self,
        path: Path,
        *arguments: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        signalled: tuple[str, signal.Signals] | None = None,
    ) -> None:
        os.environ.setdefault("PYTHONPATH", str(ROOT))  # for what the process to fork from imports
        self._folder = Path(tempfile.mkdtemp())
        self._files = [self._folder / name for name in ("out", "err")]
        given = [str(path), *map(str, arguments)]
        variables = dict(os.environ if environment is None else environment)
        where = str(Path.cwd() if cwd is None else cwd)
        self._process = _CONTEXT.Process(
            target=_run, args=(given, where, variables, self._files, signalled), daemon=True
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Exit code, minus the signal that ended the process, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Wait for the end, but no longer than some seconds."""
        self._process.join(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; standard output and standard error."""
        self._process.join(timeout)
        running = self._process.exitcode is None
        if running:
            self._process.kill()
            self._process.join()
        out, err = (path.read_text() if path.exists() else "" for path in self._files)
        shutil.rmtree(self._folder, ignore_errors=True)
        if running:
            raise subprocess.TimeoutExpired(str(self._process.name), timeout or 0, out, err)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal; of no effect on a process that has ended."""
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def ranks(path: Path, *arguments: object, cwd: Path | None = None, size: int = 2) -> list[Script]:
    """Start a script in a group of `size` processes, with the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    group |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size))
    return [Script(path, *arguments, cwd=cwd, environment={**os.environ, **group, **one}) for one in own]


def outputs(started: list[Script], timeout: float = 120) -> list[str]:
    """The last line that each process printed, once all of them have ended well."""
    said = [process.communicate(timeout) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), said
    return [(out.splitlines() or [""])[-1] for out, _ in said]


def _run(
    given: list[str],
    where: str,
    variables: dict[str, str],
    files: list[Path],
    signalled: tuple[str, signal.Signals] | None,
) -> None:
    """In the new process: take over standard output and error, the folder and the variables, and run the script."""
    if signalled is not None:
        _signal_at(*signalled)
    for descriptor, path in enumerate(files, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(where)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = given
    runpy.run_path(given[0], run_name="__main__")


def _signal_at(pattern: str, number: signal.Signals) -> None:
    """Let this process send itself a signal once it has moved a file to a path that matches."""
    replace, sent = os.replace, False

    def hook(source: Any, target: Any, **kwargs: Any) -> None:
        nonlocal sent
        replace(source, target, **kwargs)
        if not sent and Path(target).match(pattern):
            sent = True
            os.kill(os.getpid(), number)

    os.replace = hook  # type: ignore[assignment]
