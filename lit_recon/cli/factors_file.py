"""Which of two commands a configuration file is for: it says so by what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml


def named_by_content(arguments: Sequence[str]) -> list[str]:
    """A command line with `factors` in the place of `run`, where a configuration that it names has `factors`.

    Args:
        arguments: of `reconn.py`.

    >>> named_by_content(["run", "--seed", "1"])
    ['run', '--seed', '1']
    """
    given = list(arguments)
    if given[:1] == ["run"] and any(map(_has_factors, _configurations(given))):
        given[0] = "factors"
    return given


def _configurations(arguments: Sequence[str]) -> list[Path]:
    following = dict(zip(range(len(arguments)), arguments[1:], strict=False))
    named = [following.get(index, "") for index, argument in enumerate(arguments) if argument == "--config"]
    joined = [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]
    return [Path(name) for name in (*named, *joined) if name]


def _has_factors(path: Path) -> bool:
    """Whether a file is YAML with `factors`; whatever is wrong with it is for the command to say."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and "factors" in content
