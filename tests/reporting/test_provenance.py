from __future__ import annotations

import re
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import lit_recon
from lit_recon.reporting import provenance
from lit_recon.reporting.provenance import environment, peak_memory_mib


def test_versions_are_those_that_run() -> None:
    facts = environment()
    assert facts["version_torch"] == torch.__version__
    assert facts["version_numpy"] == np.__version__
    assert facts["version_lit_recon"] == lit_recon.__version__
    assert facts["version_python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_PACKAGES", ("torch", "no-such-package"))
    assert [key for key in environment() if key.startswith("version_")] == [
        "version_lit_recon",
        "version_python",
        "version_torch",
    ]


def test_the_command_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run", "--out", "my runs/a 'b'"]
    for script, launcher in (("attack.py", ["python", "attack.py"]), ("/usr/bin/lit-recon", ["lit-recon"])):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        command = environment()["command"]
        assert isinstance(command, str)
        assert shlex.split(command) == [*launcher, *arguments]


@pytest.mark.parametrize("given", [["--overwrite", "true"], ["--overwrite=true"]])
def test_the_command_that_repeats_a_run_does_not_destroy_it(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["attack.py", "run", *given, "--seed", "3"])
    assert environment()["command"] == "python attack.py run --seed 3"


def test_the_machine_and_the_moment_are_told() -> None:
    facts = environment()
    assert facts["device"]
    assert facts["cpu_count"] == pytest.approx(torch.multiprocessing.cpu_count())
    moment = datetime.fromisoformat(str(facts["created"]))
    assert moment.tzinfo == UTC
    assert abs(datetime.now(UTC) - moment) < timedelta(minutes=1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(facts["created"]))


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells it a second way")
def test_peak_memory_agrees_with_the_kernel() -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert peak_memory_mib() == pytest.approx(int(status["VmHWM"].split()[0]) / 1024, rel=0.02)


def test_a_gpu_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a fast card at {device}")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    facts = environment("cuda:1")
    assert facts["device"] == "a fast card at cuda:1"
    assert facts["peak_gpu_memory_mib"] == 3.0


def test_without_a_description_the_processor_is_named_by_the_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provenance.Path, "is_file", lambda path: False)
    assert environment()["device"]
