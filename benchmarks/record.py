"""Dated records of measurements: what ran, where, how often, and how much it varied."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_recon.io.files import write_text
from lit_recon.reporting.provenance import environment

#: The repository.
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

#: Figures and facts of one measurement, fit for JSON.
Row = dict[str, Any]

_OUR_MODULE = re.compile(rf"{re.escape(str(ROOT))}/benchmarks/(\w+)\.py")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+([^\s/'\"]*)")


def alternate(
    variants: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every variant, run in turn for `rounds` rounds after one uncounted round."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for counted in range(-1, rounds):
        for name, run in variants.items():
            start = clock()
            run()
            elapsed = clock() - start
            if counted >= 0:
                seconds[name].append(elapsed)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and count."""
    return {
        "median": round(statistics.median(values), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
        "n": len(values),
    }


def ratios(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Spread of every variant over `base`, round by round, so that a drifting machine cancels."""
    return {
        name: spread([a / b for a, b in zip(values, seconds[base], strict=True)])
        for name, values in seconds.items()
        if name != base
    }


def portable(value: Any) -> Any:
    """`value` in JSON's types, with file names instead of paths that exist on one machine only.

    >>> portable({"images": Path("/data/sets/digits.npz"), "loss": float("inf")})
    {'images': 'digits.npz', 'loss': 'inf'}
    """
    if isinstance(value, Mapping):
        return {str(key): portable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [portable(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | Path):
        return _ABSOLUTE_PATH.sub(r"\1", _OUR_MODULE.sub(r"-m benchmarks.\1", str(value)).replace(f"{ROOT}/", ""))
    return value


def write_record(
    name: str, settings: Mapping[str, Any], rows: Sequence[Row], device: str = "cpu", folder: Path = RESULTS
) -> Path:
    """Write `<date>-<name>-<device>.json`; a second run of a day gets a number.

    Args:
        name: of the benchmark.
        settings: that it was run with.
        rows: what it measured.
        device: the PyTorch device that did the work.
        folder: where records are kept.
    """
    facts = environment(device)
    if not facts.get("peak_gpu_memory_mib"):  # the processes that used the GPU were others
        facts.pop("peak_gpu_memory_mib", None)
    slug = re.sub(r"[^a-z0-9]+", "-", str(facts["device"]).lower()).strip("-")
    day = datetime.now(UTC).date().isoformat()
    path, again = folder / f"{day}-{name}-{slug}.json", 1
    while path.exists():
        again += 1
        path = folder / f"{day}-{name}-{slug}-{again}.json"
    record = portable({"name": name, "settings": settings, "rows": rows, **facts})
    write_text(path, json.dumps(record, indent=2) + "\n")
    return path


def status_mib(what: str) -> float:
    """A figure of this process's memory, such as `VmHWM`, its peak, or `VmRSS`, as Linux has it.

    Unlike `ru_maxrss`, the peak is not inherited from the process that started this one.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024
