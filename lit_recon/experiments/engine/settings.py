"""Nested settings of a study's pieces: merging them, and telling equal ones from different ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: Settings that say how or where a run is computed or shown, not what it computes: they are no part of its hash.
NOT_HASHED = ("name", "out", "overwrite", "cache", "shard_size", "trainer", "lpips", "wandb", "paper")


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits that tell the settings of a piece from those of others.

    >>> settings_hash({"seed": 0, "trainer": {"threads": 1}}) == settings_hash({"seed": 0}) != settings_hash({})
    True
    """
    kept = {key: value for key, value in settings.items() if key not in NOT_HASHED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, with those of `above` taking precedence; another class keeps no arguments of the first one.

    >>> merged({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"x": 7}})
    {'a': {'x': 7, 'y': 2}, 'b': 3}
    """
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same = value.get("class_path", old.get("class_path")) == old.get("class_path")
            result[key] = merged(old, value) if same else value
        else:
            result[key] = value
    return result


def nested(key: str, value: object) -> dict[str, Any]:
    """The nested mapping in which a dotted key has a value.

    >>> nested("defense.init_args.std", 0.1)
    {'defense': {'init_args': {'std': 0.1}}}
    """
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}
