"""Origin of a run: versions, machine, command, and the paper it follows."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lit_recon import __version__

_PACKAGES = ("torch", "torchvision", "pytorch-lightning", "torchmetrics", "lpips", "numpy", "scipy")


def environment(device: str = "cpu") -> dict[str, str | int | float]:
    """Versions, machine and command of this process, under flat keys for `metrics.json`.

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
    script = Path(sys.argv[0])
    launcher = ["python", sys.argv[0]] if script.suffix == ".py" else [script.name]  # the wheel's console command
    facts["command"] = shlex.join([*launcher, *sys.argv[1:]])
    facts["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    return facts


def peak_memory_mib() -> float:
    """Peak resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)  # bytes there, KiB elsewhere


def _processor() -> str:
    description = Path("/proc/cpuinfo")
    if description.is_file():
        for line in description.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Paper:
    """A paper and the values that it prints.

    Attributes:
        citation: authors, title, venue; empty when the run follows no paper.
        values: by metric: numbers, or text such as `0.16 to 0.25`.
        note: how the paper's setting differs from this run's, or where the paper has the values.
    """

    citation: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    note: str = ""


def paper_of(settings: Mapping[str, object]) -> Paper:
    """The section `paper` of a configuration; an empty one when it is absent."""
    section = settings.get("paper")
    if not isinstance(section, Mapping):
        return Paper()
    values = section.get("values")
    return Paper(
        citation=str(section.get("citation") or ""),
        values={str(key): value for key, value in values.items()} if isinstance(values, Mapping) else {},
        note=str(section.get("note") or ""),
    )
