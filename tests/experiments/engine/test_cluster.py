"""Pieces on a real Ray cluster of two nodes: results, loss of a node, interruption; and clusters that are refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lit_recon.cli import attack
from lit_recon.errors import ConfigError
from lit_recon.experiments.engine.cluster import ClusterSettings, RayCluster, run_packed
from lit_recon.experiments.engine.pieces import Piece
from lit_recon.experiments.engine.runner import StudyRunner
from lit_recon.experiments.two_layer.run import TwoLayerCellRun
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.training.progress import Interrupted, interruptible

STUDY: dict[str, Any] = {
    "base": {"d": 4, "m": 200, "batch": 1, "noise": 0.01},
    "sweeps": {"m": [100, 150, 250, 300]},
    "attacks": {"tensor": {"recovery": {"class_path": "MomentRecovery"}}},
    "repeats": 20,
    "threads": 1,
    "wandb": {"mode": "disabled"},
}
#: How soon a node that is gone is noticed: after five checks instead of half a minute.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 5}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80_000_000}
    found = Cluster(True, head_node_args={**small, "include_dashboard": False, "_system_config": HEALTH})
    found.add_node(**small)
    yield found
    found.shutdown()


def wait_for(condition: Callable[[], Any], seconds: float = 500.0) -> Any:
    """The first true value of a condition; a worker on a busy machine spends minutes on its imports."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError


def parent_of(process: str) -> int:
    """Of a process that is alive; else 0."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def starts(log: Path) -> list[str]:
    """Ids of the processes that began a piece."""
    return re.findall(r": started on .*, process (\d+)", log.read_text())


def results(folder: Path) -> dict[str, Any]:
    """Content of every cell, to six digits, but for the time that it took."""
    found = {}
    for path in folder.glob("cells/*/cell.json"):
        content = json.loads(path.read_text(), parse_float=lambda text: f"{float(text):.6g}")
        found[path.parent.name] = {key: value for key, value in content.items() if key != "seconds"}
    return found


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that all cells of a study wait for, but the one that begins first."""
    piece, gate = TwoLayerCellRun.piece, tmp_path / "gate"

    def waiting(run: TwoLayerCellRun) -> Piece:
        def work(folder: Path) -> str:
            try:
                gate.with_name("first").mkdir()
            except FileExistsError:
                while not gate.exists():
                    time.sleep(0.02)
            return run(folder)

        return replace(piece.fget(run), work=work)  # type: ignore[attr-defined]

    monkeypatch.setattr(TwoLayerCellRun, "piece", property(waiting))
    return gate


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_study_survives_the_loss_of_a_node(
    cluster: Any, held: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = tmp_path / "tiny.yaml", tmp_path / "cluster"
    config.write_text(yaml.safe_dump(STUDY))
    head, second = (node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes())
    hit: list[Path] = []

    def busy() -> list[Path]:
        """Logs of the cells that run on the second node, while cells are done and others wait."""
        logs = [log for log in folder.glob("logs/*.log") if not (folder / "cells" / log.stem / "cell.json").exists()]
        return [log for log in logs if second in map(parent_of, starts(log)[-1:])] if results(folder) else []

    def kill() -> None:
        try:
            hit.extend(wait_for(busy))
            worker = int(starts(hit[0])[-1])
            for process in (worker, second):
                os.kill(process, signal.SIGKILL)
        finally:
            held.touch()

    thread = threading.Thread(target=kill)
    thread.start()
    assert attack(["bounds", "--config", str(config), "--out", str(folder), "--cluster", cluster.address]) == 0
    thread.join()
    out = capsys.readouterr().out
    assert "cluster     2 nodes with 2 CPUs" in out
    assert [f"[{number}/5]" in out for number in range(1, 6)] == [True] * 5
    assert "FAILED" not in out
    again = starts(hit[0])[1:]
    assert again
    assert {parent_of(process) for process in again} <= {head, 0}
    assert attack(["bounds", "--config", str(config), "--out", str(tmp_path / "here")]) == 0
    assert len(results(folder)) == 5
    assert results(folder) == results(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interruption_lets_running_pieces_save_their_state(cluster: Any, tmp_path: Path) -> None:
    def work(folder: Path) -> str:
        folder.mkdir(parents=True)
        try:
            (folder / "begun").touch()
            for _ in range(1000):
                time.sleep(0.1)  # Ray interrupts a task between two of its steps
        except BaseException as error:
            (folder / "state").write_text(type(error).__name__)
            raise
        return "not interrupted"

    pieces = [Piece(f"cells/{name}", name, work) for name in "abc"]
    study = StudyRunner(pieces, tmp_path)
    study.open("seed: 0\n", overwrite=False, grows=())
    first = tmp_path / "cells" / "a"
    threading.Thread(target=lambda: wait_for((first / "begun").exists) and os.kill(os.getpid(), signal.SIGINT)).start()
    with (
        interruptible(),
        pytest.raises(Interrupted),
        ClusterSettings(cluster.address).executor(study.folder) as executor,
    ):
        study.run(executor)
    assert (first / "state").read_text() == "Interrupted"
    assert not (tmp_path / "cells" / "c").exists()
    assert not (tmp_path / "failed").exists()


def test_more_than_a_node_has_is_refused(cluster: Any, tmp_path: Path) -> None:
    settings = ClusterSettings(cluster.address, piece_cpus=64)
    settings.check()
    with (
        pytest.raises(ConfigError, match="no node of the cluster has the 64 CPUs and 0 GPUs of a piece"),
        settings.executor(RunFolder(tmp_path)),
    ):
        pass


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a program that is no Ray cluster and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9 .*refused"),
        ("silent", "no Ray cluster answers at 127.0.0.1:.*timed out"),
        ("127.0.0.1:port", "it is no HOST:PORT"),
        ("auto", "--cluster auto finds no Ray cluster on this machine"),
    ],
)
def test_a_cluster_that_does_not_answer_is_refused_before_anything_is_computed(
    given: str, words: str, silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    config, began = tmp_path / "tiny.yaml", time.monotonic()
    config.write_text(yaml.safe_dump(STUDY))
    address = silent if given == "silent" else given
    assert attack(["bounds", "--config", str(config), "--out", str(tmp_path / "run"), "--cluster", address]) == 2
    assert time.monotonic() - began < 30
    told = capsys.readouterr()
    assert re.search(words, told.err)
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert not (tmp_path / "run").exists()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ClusterSettings().check()
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install \"lit_recon\[ray\]\""):
        ClusterSettings("local").check()


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="piece_gpus must be at least 0; got -1"):
        ClusterSettings("local", piece_gpus=-1.0)


def done(folder: Path) -> str:
    """The work of a piece."""
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text("{}")
    return "done"


def test_a_worker_runs_where_the_driver_is_or_says_what_it_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    piece, folder = Piece("cells/a", "first", done), RunFolder(tmp_path / "study")

    def run(place: Path = tmp_path) -> dict[str, Any]:
        return run_packed(lambda _: (piece, folder), b"", str(place), sys.argv)

    assert "does not see" in run(tmp_path / "nowhere")["reason"]
    assert f"does not see {folder.config}" in run()["reason"]
    RunFolder.open(folder.path, "seed: 0\n")
    assert run()["summary"] == "done"
    assert run()["summary"] == "finished by a worker that was lost"


def recording(folder: Path) -> str:
    """The work of a piece: the command that its run records."""
    return str(environment()["command"])


def test_a_piece_records_the_command_of_the_study_and_not_that_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Callable[[bytes], dict[str, Any]]] = []
    ray = SimpleNamespace(cloudpickle=pickle, remote=lambda **_: tasks.append)
    folder = RunFolder.open(tmp_path, "seed: 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attack.py", "evaluate", "--cluster", "auto"])
    RayCluster(ray, folder, 1, 0)
    monkeypatch.setattr(sys, "argv", ["default_worker.py", "--redis-password=secret"])
    outcome = tasks[0](pickle.dumps((Piece("cells/a", "first", recording), folder)))
    assert outcome["summary"] == "python attack.py evaluate --cluster auto"


def test_pieces_travel(tmp_path: Path) -> None:
    from lit_recon.experiments.evaluate.grid import GridCell

    piece = GridCell("attack", "cells/a-01234567", {"seed": 0}, "none", None, "some", None, 1).piece(tmp_path, "rmse")
    assert pickle.loads(pickle.dumps(piece)) == piece
