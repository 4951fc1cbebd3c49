from __future__ import annotations

import re
import shlex
import sys
from datetime import UTC, datetime, timedelta

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
    arguments = ["attack.py", "run", "--out", "my runs/a 'b'"]
    monkeypatch.setattr(sys, "argv", arguments)
    command = environment()["command"]
    assert isinstance(command, str)
    assert shlex.split(command) == ["python", *arguments]


def test_the_machine_and_the_moment_are_told() -> None:
    facts = environment()
    assert facts["device"]
    assert facts["cpu_count"] == pytest.approx(torch.multiprocessing.cpu_count())
    moment = datetime.fromisoformat(str(facts["created"]))
    assert moment.tzinfo == UTC
    assert abs(datetime.now(UTC) - moment) < timedelta(minutes=1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(facts["created"]))


def test_peak_memory_counts_in_mib() -> None:
    before = peak_memory_mib()
    ballast = np.ones(int(before + 100) * 2**17)  # float64: 2**17 of them are a MiB
    assert peak_memory_mib() > before
    assert peak_memory_mib() > ballast.nbytes / 2**20


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
