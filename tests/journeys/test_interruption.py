"""A run that is killed, resumed, stopped and resumed again ends with the bits of one that was left alone."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lit_recon.reporting.run_folder import RunFolder
from tests.journeys.conftest import ROOT, Running
from tests.processes import outputs, ranks


def wait_for(pattern: str, folder: Path, process: Running) -> None:
    """Until a file is there that the process writes in the middle of its work."""
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_stopped_and_resumed(
    workplace: Path, small: list[str], script: Callable[..., subprocess.Popen[str]], attack: Callable[..., Any]
) -> None:
    arguments = [*small, "--save_every_seconds", "0.02"]
    whole, broken = workplace / "runs" / "whole", workplace / "runs" / "broken"
    assert attack(*arguments, "--out", whole).code == 0

    at = ("checkpoints/victims_0000-0000.pt", signal.SIGKILL)
    killed = script("attack.py", *arguments, "--wandb.mode", "disabled", "--out", broken, signalled=at)
    _, err = killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL, err
    assert not RunFolder(broken).is_complete
    assert not list(broken.glob("checkpoints/*.safetensors"))

    at = ("checkpoints/victims_0001-0001.pt", signal.SIGINT)
    stopped = script("attack.py", *arguments, "--wandb.mode", "disabled", "--out", broken, signalled=at)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + signal.SIGINT, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted; resume with: python attack.py run --config")
    assert list(broken.glob("checkpoints/victims_0001-0001.pt"))

    assert attack(*arguments, "--out", broken).code == 0
    for name in ("reconstructions.safetensors", "victims.csv", "logs/losses.csv"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("lost", [0, 1])
def test_a_group_that_loses_a_process_ends_and_goes_on(
    lost: int, workplace: Path, small: list[str], attack: Callable[..., Any]
) -> None:
    arguments = [*small, "--victims.n", "6", "--save_every_seconds", "0.02", "--trainer.accelerator", "cpu"]
    arguments += ["--wandb.mode", "disabled"]
    whole, broken = workplace / "runs" / "undisturbed", workplace / "runs" / f"lost_{lost}"
    if not whole.exists():
        assert attack(*arguments, "--out", whole).code == 0
    # two processes would train another backbone, of twice as large batches
    arguments += ["--backbone.checkpoint", json.loads((whole / "metrics.json").read_text())["backbone"]]
    started = ranks(ROOT / "attack.py", *arguments, "--out", broken, cwd=workplace)
    wait_for("checkpoints/*.safetensors", broken, started[lost])
    started[lost].kill()
    _, err = started[1 - lost].communicate(timeout=60)
    assert started[1 - lost].returncode == 2
    assert err.splitlines()[-1].startswith("error: another process of this group has ended")
    assert "Traceback" not in err
    kept = {path: path.stat().st_mtime_ns for path in broken.glob("checkpoints/*.safetensors")}
    assert kept
    assert not RunFolder(broken).is_complete

    outputs(ranks(ROOT / "attack.py", *arguments, "--out", broken, cwd=workplace))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    ours, theirs = (load_file(folder / "reconstructions.safetensors") for folder in (broken, whole))
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)

    finished = ranks(ROOT / "attack.py", *arguments, "--out", broken, cwd=workplace)
    assert all("holds a finished run" in one.communicate(timeout=60)[1] for one in finished), "one waits for the other"
