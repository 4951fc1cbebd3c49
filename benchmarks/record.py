"""Dated records of measurements: what ran, where, how often, and how much it varied."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_recon.data.splits import Pool
from lit_recon.io.files import write_text
from lit_recon.reporting.provenance import environment

#: The repository.
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

#: Figures and facts of one measurement, fit for JSON.
Row = dict[str, Any]

_OUR_MODULE = re.compile(rf"{re.escape(str(ROOT))}/benchmarks/(\w+)(?:/__main__)?\.py")
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


class Record:
    """The file of one measurement, `<date>-<name>-<device>.json`, written again after every row.

    `partial` is true until the measurement is complete. A killed one goes on where it stopped, in the same file, when
    the same command runs again on the same device, versions and commit: `measure` skips the rows that are there.
    `digest` is over everything else in the file: a test compares it, so that an edited record is found. A second
    measurement of a day gets a number.

    Args:
        name: of the benchmark.
        settings: that it is run with.
        pool: that attacked images are from; None where nothing is attacked.
        device: the PyTorch device that does the work.
        folder: where records are kept.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        pool: Pool | None = None,
        device: str = "cpu",
        folder: Path = RESULTS,
    ) -> None:
        facts = environment(device)
        slug = re.sub(r"[^a-z0-9]+", "-", str(facts["device"]).lower()).strip("-")
        stem, again = f"{datetime.now(UTC).date().isoformat()}-{name}-{slug}", 1
        files = {key: _digest_of_file(Path(str(value))) for key, value in settings.items() if _is_file(value)}
        head = {"name": name, "settings": settings, "files": files, "pool": pool, "command": facts["command"]}
        self._head = portable({**head, **_code()})
        place = {key: fact for key, fact in facts.items() if key == "device" or key.startswith("version_")}
        same = portable(place) | self._head
        self._device, self.path = device, folder / f"{stem}.json"
        self.rows: list[Row] = []
        for path in folder.glob(f"*-{name}-{slug}*.json"):
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if earlier["partial"] and all(earlier.get(key) == value for key, value in same.items()):
                self.path, self.rows = path, earlier["rows"]
                return
        while self.path.exists():
            again += 1
            self.path = folder / f"{stem}-{again}.json"

    def __enter__(self) -> Record:
        self._write(partial=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write(partial=False)
            print(self.path)

    def measure(self, key: Row, measure: Callable[[], Row]) -> None:
        """Append the row of a key, unless the record has it already."""
        found = portable(key)
        if not any(all(row.get(name) == value for name, value in found.items()) for row in self.rows):
            self.add({**key, **measure()})

    def add(self, row: Row, show: bool = True) -> None:
        """Append a row, and print it."""
        self.rows.append(portable(row))
        if show:
            print(self.rows[-1], flush=True)
        self._write(partial=True)

    def _write(self, partial: bool) -> None:
        facts = environment(self._device)
        if not facts.get("peak_gpu_memory_mib"):  # the processes that used the GPU were others
            facts.pop("peak_gpu_memory_mib", None)
        content = {**portable(facts), **self._head, "partial": partial, "rows": self.rows}
        write_text(self.path, json.dumps({**content, "digest": digest(content)}, indent=2) + "\n")


def digest(record: Mapping[str, Any]) -> str:
    """SHA-256 over all entries of a record but `digest`, independent of order and layout."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _code() -> dict[str, str]:
    """The commit of this repository, and whether its tracked files were as in the commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        modified = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "tree": "modified" if modified else "clean"}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "tree": "unknown"}


def _is_file(value: object) -> bool:
    return isinstance(value, str | Path) and Path(value).is_file()


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def status_mib(what: str) -> float:
    """A figure of this process's memory, such as `VmHWM`, its peak, or `VmRSS`, as Linux has it.

    Unlike `ru_maxrss`, the peak is not inherited from the process that started this one.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024
