"""Where and with what a run was made: versions, machine, command."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lit_recon import __version__

_PACKAGES = ("torch", "torchvision", "pytorch-lightning", "torchmetrics", "lpips", "numpy", "scipy")


def environment(device: str = "cpu") -> dict[str, str | int | float]:
    """What made a run, under flat keys for `metrics.json`.

    Args:
        device: the PyTorch device that did the work, e.g. `cuda:0`.

    Returns:
        `version_*`, `device` (its name), `cpu_count`, `platform`, `peak_memory_mib`, `command`, `created` (UTC), and
        `peak_gpu_memory_mib` on a GPU.
    """
    facts: dict[str, str | int | float] = {
        "version_lit_recon": __version__,
        "version_python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[f"version_{package.replace('-', '_')}"] = version(package)
        except PackageNotFoundError:  # an optional one
            continue
    facts["device"] = _processor()
    if device.startswith("cuda"):
        import torch

        facts["device"] = torch.cuda.get_device_name(device)
        facts["peak_gpu_memory_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    facts["cpu_count"] = os.cpu_count() or 1
    facts["platform"] = platform.platform()
    facts["peak_memory_mib"] = peak_memory_mib()
    facts["command"] = shlex.join(["python", *sys.argv])
    facts["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    return facts


def peak_memory_mib() -> float:
    """The most main memory that this process has held so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)  # bytes there, KiB elsewhere


def _processor() -> str:
    description = Path("/proc/cpuinfo")
    if description.is_file():
        for line in description.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
