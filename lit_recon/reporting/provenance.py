"""Origin of a run: versions, machine, command, and the paper it follows."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import yaml

from lit_recon import __version__
from lit_recon.errors import ConfigError, CorruptFileError

_PACKAGES = ("torch", "torchvision", "pytorch-lightning", "torchmetrics", "lpips", "numpy", "scipy")


def environment(device: str = "cpu") -> dict[str, str | int | float]:
    """Versions, machine and command of this process, under flat keys for `metrics.json`; `device` is a PyTorch one."""
    facts: dict[str, str | int | float] = {"version_lit_recon": __version__}
    facts["version_python"] = platform.python_version()
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):  # an optional one
            facts[f"version_{package.replace('-', '_')}"] = version(package)
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
    facts["command"] = shlex.join([*launcher, *without_overwrite(sys.argv[1:])])
    facts["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    return facts


def without_overwrite(arguments: Sequence[str]) -> list[str]:
    """The arguments that resume or repeat what these began: `--overwrite true` would destroy it.

    >>> without_overwrite(["run", "--overwrite", "true", "--n", "3", "--overwrite=true"])
    ['run', '--n', '3']
    """
    pairs = zip(["", *arguments], arguments, strict=False)
    return [given for before, given in pairs if before != "--overwrite" and not given.startswith("--overwrite")]


def peak_memory_mib() -> float:
    """Peak resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)  # bytes there, KiB elsewhere


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Paper:
    """The paper that a run follows, empty if it follows none; reports show its values beside ours.

    Args:
        citation: authors, title, venue.
        values: published values by metric, numbers or text such as `0.16 to 0.25`.
        note: differences between the paper's setting and this one, or the table that the values are from.
    """

    citation: str = ""
    values: dict[str, float | str] = field(default_factory=dict)
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


_ABSENT = object()
#: A leaf of a configuration: a YAML scalar, or a list.
Setting = str | int | float | bool | None | list[object]


class Difference(NamedTuple):
    """A key whose value differs between two configurations; None for an absent key."""

    key: str
    before: Setting
    after: Setting

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} there, {self.after!r} now"


class _TooLargeError(ValueError):
    """An integer that is no float: the parser of settings fails on it where a float is expected."""


class _Loader(yaml.SafeLoader):
    """Plain YAML, without keys that are repeated: YAML forbids them, and PyYAML keeps the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if id(node) not in self._checked:  # afterwards it holds what `<<` merges, too
            self._checked.add(id(node))
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            repeated = [key for key in keys if keys.count(key) > 1]
            if repeated:
                raise ValueError(f"the key {repeated[0]!r} is there several times{node.start_mark}")
        super().flatten_mapping(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number: int = super().construct_yaml_int(node)
        try:
            float(number)
        except OverflowError as error:
            raise _TooLargeError(f"the number {node.value[:12]}... must be below 1e308") from error
        return number

    def content(self) -> object:
        node = self.get_single_node()
        if node is None:
            return None
        if self._size(node, {}) > _MOST_NODES:
            raise ValueError(f"its aliases stand for more than {_MOST_NODES} entries")
        return self.construct_document(node)

    def _size(self, node: yaml.Node, known: dict[int, int]) -> int:
        """Entries with all aliases in full; a ValueError for a node within itself."""
        if id(node) not in known:
            known[id(node)] = -1
            below = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = [part for entry in below for part in (entry if isinstance(entry, tuple) else (entry,))]
            known[id(node)] = 1 + sum(self._size(part, known) for part in parts)
        if known[id(node)] < 0:
            raise ValueError("an alias stands for what holds it")
        return known[id(node)]


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_MOST_NODES = 100_000


def check_numbers(option: str, value: str) -> None:
    """A ConfigError if the value of an option on the command line holds an integer that is too large for a float."""
    try:
        _Loader(value).content()
    except _TooLargeError as error:
        raise ConfigError(f"{option}: {error}") from error
    except Exception:  # noqa: BLE001  # what else is wrong, the parser says
        return


def parse_settings(text: str, source: Path | None = None) -> dict[str, object]:
    """The mapping in YAML `text`; else a CorruptFileError about the file `source` or a ConfigError about the caller."""
    try:
        parsed = _Loader(text).content()
        if not isinstance(parsed, dict):
            raise ValueError(f"got {type(parsed).__name__}")
    except Exception as error:  # PyYAML's own, and those of Python's int, float and date; RecursionError
        reason = " ".join(str(error).split()) or type(error).__name__
        if source is None:
            raise ConfigError(f"the configuration of a run must be a YAML mapping; {reason}") from error
        raise CorruptFileError(
            f"{source} must hold a YAML mapping; {reason}; restore the file, or choose another configuration or folder"
        ) from error
    return {str(key): value for key, value in parsed.items()}


def read_settings(path: Path) -> dict[str, object]:
    """The mapping in a YAML file; a CorruptFileError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # it is a folder, or no text
        raise CorruptFileError(f"{path} cannot be read as text ({error}); restore the file") from error
    return parse_settings(text, path)


def flatten(settings: Mapping[str, object]) -> dict[str, Setting]:
    """Dotted keys of a nested configuration; items of a list of mappings are numbered, a list of scalars stays whole.

    >>> flatten({"attack": {"lr": 0.1, "priors": [{"weight": 2}]}, "seed": 0})
    {'attack.lr': 0.1, 'attack.priors.0.weight': 2, 'seed': 0}
    """
    flat: dict[str, Setting] = {}
    for key, value in settings.items():
        if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()}
        elif isinstance(value, str | int | float | bool | list) or value is None:
            flat[key] = value
        else:
            flat[key] = str(value)  # dates, which YAML reads into objects of their own
    return flat


def differences(
    before: Mapping[str, object], after: Mapping[str, object], ignored: Iterable[str] = ()
) -> list[Difference]:
    """Keys of two nested configurations whose values differ, in alphabetical order; none at or below `ignored` ones."""
    old, new, skipped = flatten(before), flatten(after), tuple(ignored)
    return [
        Difference(key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if not is_below(key, skipped) and old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def is_below(key: str, sections: Iterable[str]) -> bool:
    """Whether a dotted key is one of `sections` or lies below one."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def find_setting(settings: Mapping[str, object], key: str) -> Setting:
    """The setting whose dotted key, without sections named `init_args`, is `key` or ends in `.key`; None for none.

    >>> find_setting({"client": {"class_path": "Client", "init_args": {"batch_norm": "eval"}}}, "client.batch_norm")
    'eval'
    """
    plain = {full.replace(".init_args.", "."): value for full, value in flatten(settings).items()}
    if key in plain:
        return plain[key]
    return next((value for full, value in plain.items() if full.endswith(f".{key}")), None)
