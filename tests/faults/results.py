"""All that a command has computed, read from its files, without times and without the origin of the run."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

#: Keys of what may differ between two runs: times, memory, and the origin of the run.
_TIMES = re.compile(r"(.*[._])?seconds([._].*)?|timed_steps|created|command|peak_memory_mib")
#: Files that say how the work went, and state from which it is resumed.
_NO_RESULT = re.compile(
    r"(.*/)?logs/(?!losses\.csv).*|.*\.(pt|ckpt|part|lock|log|unfinished)|(.*/)?\.lock|settings\.yaml"
)
_PICTURE = re.compile(r'"data:(image/[^"]+)"')


def results(place: Path) -> dict[str, Any]:
    """The content of every file of results below a folder, by path."""
    paths = (path for path in sorted(place.rglob("*")) if path.is_file())
    names = {path.relative_to(place).as_posix(): path for path in paths}
    return {name: _content(path, place) for name, path in names.items() if not _NO_RESULT.fullmatch(name)}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two results differ, in words; figures are equal only if all their digits are."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            found.append(f"{name} is {'missing' if name in one else 'too many'}")
        elif (first := one[name]) != (second := other[name]):
            keys = "" if not isinstance(first, dict) else _first_difference(first, second)
            found.append(f"{name} differs{keys}")
    return found


def _first_difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    keys = [key for key in first.keys() | second.keys() if first.get(key) != second.get(key)]
    key = min(keys)
    return f" in {key}: {str(first.get(key))[:80]} and {str(second.get(key))[:80]}"


def _content(path: Path, place: Path) -> Any:
    kind = path.suffix
    if kind == ".json":
        return _without_times(json.loads(path.read_text(encoding="utf-8")))
    if kind == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return {str(number): _without_times(row) for number, row in enumerate(csv.DictReader(file))}
    if kind == ".safetensors":
        return _tensors(path)
    if kind == ".html":  # its figures are those of the other files
        return {str(n): _digest(uri.encode()) for n, uri in enumerate(_PICTURE.findall(path.read_text("utf-8")))}
    if kind == ".yaml":  # those of cells hold absolute paths
        return path.read_text(encoding="utf-8").replace(str(place), "PLACE")
    return _digest(path.read_bytes())


def _tensors(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with safe_open(path, framework="numpy") as file:
        for name in sorted(file.keys()):
            value = file.get_tensor(name)
            found[name] = (str(value.dtype), value.shape, _digest(value.tobytes()))
        for key, text in (file.metadata() or {}).items():
            found[f"metadata {key}"] = _without_times(json.loads(text)) if text.startswith("{") else text
    return found


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(entry) for key, entry in value.items() if not _TIMES.fullmatch(key)}
    return [_without_times(entry) for entry in value] if isinstance(value, list) else value


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
