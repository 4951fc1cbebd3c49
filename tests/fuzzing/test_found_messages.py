"""Messages and files that hold what a file named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.io.files import parse_json, write_text


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred\x1b[0m", "\u2028", "\udcff", "\x00", "\x85", "a\r"])
def test_a_message_is_one_printable_line(name: str) -> None:
    message = str(CorruptFileError(f"file {name} is damaged"))
    assert message.isprintable()
    assert message.startswith("file ")
    assert message.endswith("is damaged")


def test_a_long_message_keeps_its_ends() -> None:
    message = str(ConfigError(f"first {'x' * 100_000} last"))
    assert len(message) < 3000
    assert message.startswith("first xxx")
    assert message.endswith("xxx last")


def test_a_message_travels_between_processes() -> None:
    assert str(pickle.loads(pickle.dumps(ConfigError("steps must be at least 1")))) == "steps must be at least 1"


def test_text_with_a_lone_surrogate_can_be_written(tmp_path: Path) -> None:
    """Names of files that are no UTF-8 have such characters: a run must not be lost for one at its end."""
    write_text(tmp_path / "names.json", json.dumps(["\udcff"], ensure_ascii=False))
    assert parse_json((tmp_path / "names.json").read_text()) == ["\udcff"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"rmse": 0.5, "rmse": 0.1}', "several times"),
        ('{"a": [{"b": 1, "b": 1}]}', "several times"),
        ("[" * 100_000, "nested"),
        ("{", "Expecting"),
        ("9" * 5000, "digits"),
    ],
)
def test_json_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
