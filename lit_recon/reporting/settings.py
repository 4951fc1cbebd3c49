"""A run's configuration as flat dotted keys: for tables, look-ups and comparisons of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from lit_recon.errors import ConfigError, CorruptFileError

#: A leaf of a configuration: a YAML scalar, or a list.
Setting = str | int | float | bool | None | list[object]


class Difference(NamedTuple):
    """A key whose value differs between two configurations; None for an absent key."""

    key: str
    before: Setting
    after: Setting

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} there, {self.after!r} now"


def parse_settings(text: str, source: Path | None = None) -> dict[str, object]:
    """The mapping in YAML `text`.

    Args:
        text: a configuration as YAML.
        source: the file that the text was read from; None for text from a caller.

    Raises:
        CorruptFileError: a file holds no YAML mapping.
        ConfigError: a caller's text is none.
    """
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        parsed, reason = None, f": {' '.join(str(error).split())}"
    else:
        reason = f"; got {type(parsed).__name__}"
    if isinstance(parsed, dict):
        return {str(key): value for key, value in parsed.items()}
    if source is None:
        raise ConfigError(f"the configuration of a run must be a YAML mapping{reason}")
    raise CorruptFileError(f"{source} must hold a YAML mapping{reason}; restore the file or choose another folder")


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
    """Keys whose values differ, in alphabetical order.

    Args:
        before: a nested configuration.
        after: another one.
        ignored: dotted keys to leave out, with everything below them.
    """
    old, new, skipped = flatten(before), flatten(after), tuple(ignored)
    return [
        Difference(key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if not is_below(key, skipped) and (key not in old or key not in new or old[key] != new[key])
    ]


def is_below(key: str, sections: Iterable[str]) -> bool:
    """Whether a dotted key is one of `sections` or lies below one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def find_setting(settings: Mapping[str, object], key: str) -> Setting:
    """The setting whose dotted key is `key` or ends in `.key`; None when there is none.

    Sections named `init_args` are left out of the keys.

    >>> find_setting({"client": {"class_path": "Client", "init_args": {"batch_norm": "eval"}}}, "client.batch_norm")
    'eval'
    """
    plain = {full.replace(".init_args.", "."): value for full, value in flatten(settings).items()}
    if key in plain:
        return plain[key]
    return next((value for full, value in plain.items() if full.endswith(f".{key}")), None)
