"""Runs the pieces of a study on a Ray cluster: settings, connection, and tasks that survive the loss of a worker."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_recon.errors import ConfigError
from lit_recon.experiments.call import check_range
from lit_recon.experiments.engine.pieces import Piece, PieceOutcome, attempt
from lit_recon.experiments.engine.runner import Executor, StudyRunner, ThisProcess, refuse_several_processes
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.training.progress import Interrupted, deferred_interruption, interruptible
from lit_recon.training.trainer import TrainerSettings

#: How often a piece is run again after its worker was lost.
_RETRIES = 5
#: Seconds within which a cluster must answer, and within which interrupted pieces must have saved their state.
_ANSWER_SECONDS, _SAVE_SECONDS = 5.0, 60.0
#: Port of a cluster's address that names none.
_PORT = 6379
#: First bytes of an HTTP/2 connection, and the type of the frame that the server, such as Ray's, answers with.
_GREETING, _SETTINGS_FRAME = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 4

_ON_CPU = TrainerSettings("cpu")


@dataclass(frozen=True)
class ClusterSettings:
    """Execution of a study: in this process or on a Ray cluster.

    Args:
        cluster: `local` starts a Ray cluster on this machine for the command, `auto` uses the one started here with
            `ray start`, and `HOST:PORT` the one at this address, whose nodes must see the working directory and the
            study's folder under the same paths. Needs lit_recon[ray]. Default: pieces run here, one after the other.
        piece_cpus: CPUs that the cluster reserves for a piece; default: trainer.threads, else 1.
        piece_gpus: GPUs for a piece, such as 0.25; default: 1 where the trainer may use one of the cluster, else 0.
    """

    cluster: str | None = None
    piece_cpus: float | None = None
    piece_gpus: float | None = None

    def __post_init__(self) -> None:
        given = {"piece_cpus": self.piece_cpus, "piece_gpus": self.piece_gpus}
        check_range({name: value for name, value in given.items() if value is not None}, 0)

    def check(self, command: str = "the command", trainer: TrainerSettings | None = None) -> None:
        """Refuse several processes, a missing Ray, and a cluster that does not answer, by a ConfigError."""
        refuse_several_processes(command, trainer)
        if self.cluster is None:
            return
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f'--cluster {self.cluster} needs Ray, which is not installed: pip install "lit_recon[ray]", or leave '
                "out --cluster to run one piece after the other in this process"
            ) from error
        if self.cluster != "local":
            _check_address(_address(self.cluster))

    def run(self, study: StudyRunner, trainer: TrainerSettings) -> list[Piece]:
        """Run the pieces of an open study that are not settled; results and errors as for `run` and `executor`."""
        print(f"run folder  {study.folder.path}", flush=True)
        with self.executor(study.folder, trainer) as executor:
            return study.run(executor)

    @contextlib.contextmanager
    def executor(self, folder: RunFolder, trainer: TrainerSettings = _ON_CPU) -> Iterator[Executor]:
        """The executor of a study in `folder`; the trainer says what a piece needs.

        A ConfigError says that the cluster refuses the connection, or lacks the CPUs and GPUs of a piece.
        """
        if self.cluster is None:
            yield ThisProcess(folder)
            return
        with _connected("local" if self.cluster == "local" else _address(self.cluster)) as ray:
            whole, nodes = ray.cluster_resources(), [node for node in ray.nodes() if node["Alive"]]
            cpus = self.piece_cpus if self.piece_cpus is not None else float(trainer.threads or 1)
            gpus = self.piece_gpus
            if gpus is None:
                gpus = 1.0 if trainer.accelerator in ("auto", "gpu") and whole.get("GPU") else 0.0
            own = [node["Resources"] for node in nodes]
            if not any(has.get("CPU", 0) >= cpus and has.get("GPU", 0) >= gpus for has in own):
                raise ConfigError(
                    f"no node of the cluster has the {cpus:g} CPUs and {gpus:g} GPUs of a piece; the cluster has "
                    f"{whole.get('CPU', 0):g} CPUs and {whole.get('GPU', 0):g} GPUs in {len(nodes)} nodes: lower "
                    "piece_cpus or piece_gpus"
                )
            print(
                f"cluster     {len(nodes)} nodes with {whole.get('CPU', 0):g} CPUs and {whole.get('GPU', 0):g} GPUs; "
                f"a piece takes {cpus:g} and {gpus:g}",
                flush=True,
            )
            yield RayCluster(ray, folder, cpus, gpus)


class RayCluster:
    """Runs pieces of the study in `folder` as tasks of the connected cluster, with so many CPUs and GPUs for each."""

    def __init__(self, ray: Any, folder: RunFolder, cpus: float, gpus: float) -> None:
        self._ray, self._folder = ray, RunFolder(folder.path.absolute())
        self._running: dict[Any, Piece] = {}
        # A nested function travels as code, so that a worker can set its import path before it imports this package.
        place, paths, pack = os.getcwd(), [path or os.getcwd() for path in sys.path], ray.cloudpickle
        command = list(sys.argv)

        def task(packed: bytes) -> dict[str, Any]:
            sys.path[:0] = [path for path in paths if path not in sys.path]
            from lit_recon.experiments.engine import cluster

            return cluster.run_packed(pack.loads, packed, place, command)

        self._task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=_RETRIES)(task)

    def submit(self, piece: Piece) -> None:
        packed = self._ray.cloudpickle.dumps((piece, self._folder))
        self._running[self._task.options(name=piece.title).remote(packed)] = piece

    def next(self) -> tuple[Piece, PieceOutcome]:
        """Wait for any piece to end; a piece that the cluster lost has that as its outcome."""
        ended: list[Any] = []
        with deferred_interruption() as signalled:  # an exception raised inside Ray's own code would be lost
            while not ended:
                ended, _ = self._ray.wait(list(self._running), timeout=1.0)
                if (number := signalled()) is not None:
                    said = f"interrupting the cluster's pieces; they have {_SAVE_SECONDS:g} s to save their state"
                    print(said, file=sys.stderr)
                    for task in self._running:
                        self._ray.cancel(task, force=False)
                    self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_SAVE_SECONDS)
                    raise Interrupted(number)
        piece = self._running.pop(ended[0])
        try:
            return piece, PieceOutcome(**self._ray.get(ended[0]))
        except self._ray.exceptions.RayError as error:
            return piece, PieceOutcome(reason=f"the cluster lost it: {' '.join(str(error).split())}")


def run_packed(loads: Any, packed: bytes, place: str, command: list[str]) -> dict[str, Any]:
    """In a worker: run a piece in the driver's working directory; the outcome as plain values.

    The piece records `command`, the driver's: the worker's own repeats nothing, and may hold Ray's password.
    """
    if not Path(place).is_dir():
        return {"reason": f"{socket.gethostname()} does not see {place}: all nodes must share the working directory"}
    os.chdir(place)
    sys.argv = command
    piece, folder = loads(packed)
    if not folder.config.is_file():
        return {"reason": f"{socket.gethostname()} does not see {folder.config}: all nodes must share the run folder"}
    if piece.is_done(folder.path):  # by a worker that was lost afterwards
        return {"summary": "finished by a worker that was lost"}
    try:
        return vars(attempt(piece, folder.path, folder.log(piece.folder)))
    except Interrupted as stop:
        return {"reason": str(stop)}


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_task_oom_retries", str(_RETRIES))
    import ray

    with warnings.catch_warnings():
        # Ray's announcement of a later change, which `piece_gpus` does not depend on.
        warnings.filterwarnings("ignore", message="Tip: In future versions of Ray", category=FutureWarning)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"--cluster {address} cannot be used: {' '.join(str(error).split())}") from error
    try:
        with interruptible():  # Ray has set a handler that would end this process at once
            yield ray
    finally:
        ray.shutdown()


def _address(cluster: str) -> str:
    """`HOST:PORT` of a cluster; a ConfigError where none is running on this machine."""
    if cluster != "auto":
        return cluster if ":" in cluster else f"{cluster}:{_PORT}"
    # Where `ray start` notes the address.
    noted = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    found = os.environ.get("RAY_ADDRESS") or (noted.read_text(encoding="utf-8").strip() if noted.is_file() else "")
    if not found or found in ("auto", "local"):
        raise ConfigError(
            "--cluster auto finds no Ray cluster on this machine: start one with `ray start --head`, give its address, "
            "or use --cluster local"
        )
    return found


def _check_address(address: str) -> None:
    """Refuse an address where no Ray cluster answers by a ConfigError that says why."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    reason, end = "it is no HOST:PORT", time.monotonic() + _ANSWER_SECONDS
    if host and port.isdecimal():
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS) as connection:
                connection.settimeout(max(0.1, end - time.monotonic()))
                connection.sendall(_GREETING)
                frame = connection.recv(9)
            if len(frame) > 3 and frame[3] == _SETTINGS_FRAME:
                return
            reason = "the program there is no Ray cluster"
        except (OSError, OverflowError) as error:
            reason = str(error)
    raise ConfigError(
        f"no Ray cluster answers at {address} ({reason}): check the address with `ray status --address {address}`, or "
        "use --cluster local"
    )
