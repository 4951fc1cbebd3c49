"""Dated records of measurements: what ran, where, how often, and how much it varied."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_recon.reporting.provenance import environment

RESULTS = Path(__file__).parent / "results"


def alternate(variants: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
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


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Spread of every variant over `base`, round by round, so that a drifting machine cancels."""
    return {
        name: spread([a / b for a, b in zip(values, seconds[base], strict=True)])
        for name, values in seconds.items()
        if name != base
    }


def write_record(name: str, settings: dict[str, Any], rows: list[dict[str, Any]], device: str = "cpu") -> Path:
    """Write `results/<date>-<name>-<device>.json`; a second run of a day gets a number."""
    facts = environment(device)
    slug = re.sub(r"[^a-z0-9]+", "-", str(facts["device"]).lower()).strip("-")
    day = datetime.now(UTC).date().isoformat()
    path, again = RESULTS / f"{day}-{name}-{slug}.json", 1
    while path.exists():
        again += 1
        path = RESULTS / f"{day}-{name}-{slug}-{again}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({"name": name, "settings": settings, "rows": rows, **facts}, indent=2) + "\n")
    return path
